"""Models to count the parameters of."""

from typing import Any

from megatron_async.planning.memory import Layout, ModelShape

__all__ = ["LLAMA_LIKE", "MODELS", "TINY", "layout_of", "shape_of"]

TINY: dict[str, Any] = {"layers": 8, "hidden_size": 32, "attention_heads": 4, "seq_length": 64}
LLAMA_LIKE: dict[str, Any] = {
    "query_groups": 2,
    "bias": False,
    "gated": True,
    "learned_positions": False,
    "tied": False,
}
MODELS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "tied, PP 4": ({}, {"stages": 4}),
    "tied, PP 1": ({}, {"stages": 1}),
    "untied, PP 1, wide heads": ({"tied": False, "kv_channels": 12}, {"stages": 1}),
    "llama-like, TP 2, PP 2": (
        {**LLAMA_LIKE, "ffn_hidden_size": 96},
        {"stages": 2, "tensor_parallel": 2},
    ),
    "biases, TP 2, PP 2": ({}, {"stages": 2, "tensor_parallel": 2}),
    "experts, EP 2, PP 2": (
        {**LLAMA_LIKE, "experts": 4},
        {"stages": 2, "expert_parallel": 2, "data_parallel": 2},
    ),
    "RMSNorm, uneven, 10B": (
        {
            **LLAMA_LIKE,
            "rms_norm": True,
            "layers": 48,
            "hidden_size": 4096,
            "attention_heads": 32,
            "query_groups": 8,
            "vocab_size": 50304,
        },
        {"stages": 3, "layers_per_stage": [17, 18, 13]},
    ),
    "experts with biases": ({"experts": 4}, {"stages": 1}),
}


def shape_of(options: dict[str, Any]) -> ModelShape:
    return ModelShape(**{**TINY, "vocab_size": 512, **options})


def layout_of(options: dict[str, Any]) -> Layout:
    stages = options["stages"]
    return Layout(**{"layers_per_stage": [8 // stages] * stages, **options})
