"""Prints the numbers of parameters of the models that Megatron builds, as JSON."""

import json
from typing import Any

from tests.planning.models import MODELS, layout_of, shape_of


def megatron_counts() -> dict[str, list[int]]:
    """Build every stage of every model, on a process group that only pretends to have ranks."""
    import torch
    import torch.distributed as dist
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.transformer_config import TransformerConfig
    from torch.testing._internal.distributed.fake_pg import FakeStore

    new_group = dist.new_group
    tensor: Any = torch.Tensor
    tensor.cuda = lambda self, *_, **__: self
    torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment, return-value]
    dist.new_group = lambda *a, **k: new_group(*a, **{**k, "backend": None})

    counts: dict[str, list[int]] = {}
    for name, (model, parallel) in MODELS.items():
        shape, layout = shape_of(model), layout_of(parallel)
        ranks = layout.tensor_parallel * layout.expert_parallel
        counts[name] = []
        for stage in range(layout.stages):
            dist.init_process_group(
                "fake", store=FakeStore(), rank=stage * ranks, world_size=ranks * layout.stages
            )
            parallel_state.initialize_model_parallel(
                layout.tensor_parallel,
                layout.stages,
                expert_model_parallel_size=layout.expert_parallel,
            )
            config = TransformerConfig(
                num_layers=shape.layers,
                hidden_size=shape.hidden_size,
                num_attention_heads=shape.attention_heads,
                num_query_groups=shape.query_groups,
                kv_channels=shape.kv_channels,
                ffn_hidden_size=shape.ffn,
                gated_linear_unit=shape.gated,
                activation_func=torch.nn.functional.silu
                if shape.gated
                else torch.nn.functional.gelu,
                add_bias_linear=shape.bias,
                num_moe_experts=shape.experts,
                tensor_model_parallel_size=layout.tensor_parallel,
                pipeline_model_parallel_size=layout.stages,
                expert_model_parallel_size=layout.expert_parallel,
                pipeline_dtype=torch.float32,
                use_cpu_initialization=True,
            )
            built = GPTModel(
                config,
                get_gpt_layer_local_spec(num_experts=shape.experts),
                vocab_size=shape.vocab_size,
                max_sequence_length=shape.seq_length,
                pre_process=stage == 0,
                post_process=stage == layout.stages - 1,
                share_embeddings_and_output_weights=shape.tied,
                position_embedding_type="learned_absolute" if shape.learned_positions else "rope",
            )
            counts[name].append(sum(parameter.numel() for parameter in built.parameters()))
            parallel_state.destroy_model_parallel()
            dist.destroy_process_group()
    return counts


if __name__ == "__main__":
    print(json.dumps(megatron_counts()))
