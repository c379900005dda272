"""``--fused-cpu-kernels`` computes what Megatron's own operators do, to rounding."""

import pytest

from megatron_async.__main__ import main
from tests.support.gpt import Value, gpt_args
from tests.support.torchrun import run_python, run_torchrun


def test_fused_operators_are_megatrons_to_rounding() -> None:
    result = run_python(
        """
        import json, os
        os.environ.update(RANK="0", WORLD_SIZE="1", MASTER_ADDR="localhost", MASTER_PORT="0")
        from megatron_async import cpu_backend
        cpu_backend.install()
        import torch
        from megatron.core import parallel_state, tensor_parallel
        from megatron.core.tensor_parallel import layers, random
        from megatron.core.transformer.dot_product_attention import DotProductAttention
        from megatron.core.transformer.enums import AttnMaskType
        from megatron.core.transformer.transformer_config import TransformerConfig
        from torch.nn import functional

        torch.distributed.init_process_group("gloo")
        parallel_state.initialize_model_parallel()
        random.model_parallel_cuda_manual_seed(1)
        config = TransformerConfig(
            num_layers=1, hidden_size=32, num_attention_heads=4, num_query_groups=2,
            attention_dropout=0.0,
        )
        attention = DotProductAttention(config, 1, AttnMaskType.causal, "self")

        def tensor(*shape):
            torch.manual_seed(sum(shape))
            return torch.randn(shape, requires_grad=True)

        query, key, value = tensor(16, 3, 4, 8), tensor(16, 3, 2, 8), tensor(16, 3, 2, 8)
        logits, target = tensor(16, 3, 50), torch.arange(48).view(16, 3)
        input, weight = tensor(16, 3, 32), tensor(24, 32)
        mask = torch.ones(3, 1, 16, 16, dtype=torch.bool).triu(1)

        def all_of_them(mask):
            # The original works on the logits in place.
            loss = tensor_parallel.vocab_parallel_cross_entropy(logits * 1, target)
            return [
                (attention(query, key, value, mask), (query, key, value)),
                (loss, (logits,)),
                (
                    layers.linear_with_grad_accumulation_and_async_allreduce(
                        input=input, weight=weight, bias=None, gradient_accumulation_fusion=False,
                        allreduce_dgrad=False, sequence_parallel=False, grad_output_buffer=None,
                        wgrad_deferral_limit=0,
                        tp_group=parallel_state.get_tensor_model_parallel_group(),
                    ),
                    (input, weight),
                ),
            ]

        def outputs(mask=None):
            found = []
            for output, inputs in all_of_them(mask):
                torch.manual_seed(0)
                gradients = torch.autograd.grad(output, inputs, torch.randn_like(output))
                found.append([output, *gradients])
            return found

        calls = []
        def counted(name):
            original = getattr(functional, name)
            def call(*args, **kwargs):
                calls.append(name)
                return original(*args, **kwargs)
            setattr(functional, name, call)
        for name in ("scaled_dot_product_attention", "cross_entropy", "linear"):
            counted(name)

        reference = outputs()
        before = list(calls)
        rows = cpu_backend.install_fused_kernels()
        assert cpu_backend.install_fused_kernels() is rows
        fused = outputs()
        during = list(calls)
        masked = outputs(mask)
        far = [
            max((a - b).abs().max().item() for a, b in zip(*pair))
            for pair in zip(reference, fused)
        ]
        print(json.dumps({
            "shapes": [[list(t.shape) for t in one] for one in reference]
                == [[list(t.shape) for t in one] for one in fused],
            "close": [one < 1e-5 for one in far],
            "before": before,
            "during": during,
            # Megatron's own attention, since a mask may be any.
            "masked": all(torch.equal(a, b) for a, b in zip(reference[0], masked[0])),
        }))
        """
    )
    assert result == {
        "shapes": True,
        "close": [True] * 3,
        "before": [],
        "during": ["cross_entropy", "scaled_dot_product_attention", "linear"],
        "masked": True,
    }


def test_flag_is_for_cpu_ranks() -> None:
    with pytest.raises(SystemExit, match="--fused-cpu-kernels is for CPU ranks: add --cpu"):
        main(["script.py", "--fused-cpu-kernels"])


@pytest.mark.slow
def test_training_with_fused_kernels_has_the_same_losses_to_rounding() -> None:
    flags: dict[str, Value] = {
        "hidden_dropout": 0,
        "attention_dropout": 0,
        "no_create_attention_mask_in_dataloader": True,
        "train_iters": 20,
        "pipeline_schedule": "fresh-2bw",
        "delayed_microbatches": 4,
    }
    plain = run_torchrun(1, gpt_args(**flags))
    fused = run_torchrun(1, gpt_args(**flags, fused_cpu_kernels=True))
    assert len(fused.losses) == 20
    for number, loss in plain.loss_values.items():
        assert fused.loss_values[number] == pytest.approx(loss, rel=1e-4)
