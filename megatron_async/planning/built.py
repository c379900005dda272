"""Parameters of the model that Megatron builds, on the meta device: no memory, no GPU.

Run as ``python -m megatron_async.planning.built`` in a process of its own, since it stands in for
the process group and for the GPU. It reads a list of models as JSON from its standard input and
prints one list of numbers for each, of one rank of each stage.
"""

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from megatron_async.planning.memory import Layout, ModelShape

__all__ = ["built_parameters"]


def built_parameters(models: Sequence[tuple[ModelShape, Layout]]) -> list[list[int]]:
    """Return, for each model, the parameters of one rank of each stage as Megatron builds them.

    Raises:
        RuntimeError: Megatron refuses a model; the message is its own.
    """
    asked = json.dumps([[asdict(shape), asdict(layout)] for shape, layout in models])
    job = subprocess.run(
        [sys.executable, "-m", __name__],
        input=asked,
        capture_output=True,
        text=True,
        check=False,
    )
    if job.returncode:
        reason = job.stderr.strip().splitlines() or [f"exit code {job.returncode}"]
        raise RuntimeError(f"Megatron did not build the model: {reason[-1]}")
    found: list[list[int]] = json.loads(job.stdout.splitlines()[-1])
    return found


def _build_all(models: Sequence[tuple[ModelShape, Layout]]) -> list[list[int]]:
    import torch
    import torch.distributed as dist

    new_group = dist.new_group
    tensor: Any = torch.Tensor
    tensor.cuda = lambda self, *_, **__: self
    torch.cuda.current_device = lambda: torch.device("meta")  # type: ignore[assignment, return-value]
    dist.new_group = lambda *a, **k: new_group(*a, **{**k, "backend": None})
    return [
        [_build(shape, layout, stage) for stage in range(layout.stages)] for shape, layout in models
    ]


def _build(shape: ModelShape, layout: Layout, stage: int) -> int:
    """On a process group that only pretends to have ranks."""
    import torch
    import torch.distributed as dist
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.pipeline_parallel_layer_layout import (
        PipelineParallelLayerLayout,
    )
    from megatron.core.transformer.transformer_config import TransformerConfig
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from megatron_async.planning.partition import layout as layout_flag

    ranks = layout.tensor_parallel * layout.expert_parallel
    dist.init_process_group(
        "fake", store=FakeStore(), rank=stage * ranks, world_size=ranks * layout.stages
    )
    try:
        parallel_state.initialize_model_parallel(
            layout.tensor_parallel,
            layout.stages,
            expert_model_parallel_size=layout.expert_parallel,
        )
        spread = None
        if len(set(layout.layers_per_stage)) > 1:
            spread = PipelineParallelLayerLayout(
                layout_flag(layout.layers_per_stage), layout.stages
            )
        gated = torch.nn.functional.silu if shape.gated else torch.nn.functional.gelu
        config = TransformerConfig(
            num_layers=shape.layers,
            hidden_size=shape.hidden_size,
            num_attention_heads=shape.attention_heads,
            num_query_groups=shape.query_groups,
            kv_channels=shape.kv_channels,
            ffn_hidden_size=shape.ffn,
            gated_linear_unit=shape.gated,
            activation_func=gated,
            normalization="RMSNorm" if shape.rms_norm else "LayerNorm",
            add_bias_linear=shape.bias,
            num_moe_experts=shape.experts,
            tensor_model_parallel_size=layout.tensor_parallel,
            pipeline_model_parallel_size=layout.stages,
            pipeline_model_parallel_layout=spread,
            expert_model_parallel_size=layout.expert_parallel,
            pipeline_dtype=torch.float32,
            use_cpu_initialization=True,
            perform_initialization=False,
        )
        with torch.device("meta"):
            built = GPTModel(
                config,
                get_gpt_layer_local_spec(
                    num_experts=shape.experts, normalization=config.normalization
                ),
                vocab_size=shape.vocab_size,
                max_sequence_length=shape.seq_length,
                pre_process=stage == 0,
                post_process=stage == layout.stages - 1,
                share_embeddings_and_output_weights=shape.tied,
                position_embedding_type="learned_absolute" if shape.learned_positions else "rope",
            )
        return sum(parameter.numel() for parameter in built.parameters())
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


if __name__ == "__main__":
    given = [(ModelShape(**shape), Layout(**layout)) for shape, layout in json.load(sys.stdin)]
    print(json.dumps(_build_all(given)))
