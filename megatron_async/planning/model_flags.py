"""The flags that describe a model, as Megatron calls them."""

import argparse
from typing import Any

from megatron_async.planning.memory import ModelShape

__all__ = ["add_model_flags", "shape_of"]


def add_model_flags(parser: argparse.ArgumentParser) -> Any:
    """Add them, and return their group."""
    model = parser.add_argument_group("model", "Megatron's flags of the same meaning.")
    model.add_argument("--num-layers", "--layers", dest="layers", type=int, help="of the model")
    model.add_argument("--hidden-size", type=int, help="transformer width")
    model.add_argument(
        "--num-attention-heads", "--heads", dest="heads", type=int, help="attention heads"
    )
    model.add_argument(
        *("--num-query-groups", "--query-groups"),
        dest="query_groups",
        type=int,
        help="key and value heads (default: as many as attention heads)",
    )
    model.add_argument("--kv-channels", type=int, help="width of a head (default: hidden / heads)")
    model.add_argument("--ffn-hidden-size", type=int, help="as Megatron has it by default")
    model.add_argument("--swiglu", action="store_true", help="gated MLP: a third matrix")
    model.add_argument("--disable-bias-linear", action="store_true", help="no biases")
    model.add_argument("--rms-norm", action="store_true", help="--normalization RMSNorm")
    model.add_argument("--rotary", action="store_true", help="no learned position embeddings")
    model.add_argument(
        *("--untie-embeddings-and-output-weights", "--untied"),
        dest="untied",
        action="store_true",
        help="output layer with its own weight",
    )
    model.add_argument("--vocab-size", type=int, default=50304, help="after padding")
    model.add_argument("--seq-length", type=int, default=2048, help="tokens (default 2048)")
    model.add_argument(
        "--num-experts", "--experts", dest="experts", type=int, help="of each MoE layer"
    )
    model.add_argument(
        *("--moe-router-topk", "--experts-per-token"),
        dest="experts_per_token",
        type=int,
        default=2,
        help="experts per token (default 2)",
    )
    return model


def shape_of(args: argparse.Namespace) -> ModelShape:
    """Return the model that they describe.

    Raises:
        ValueError: a size below 1.
    """
    return ModelShape(
        layers=args.layers,
        hidden_size=args.hidden_size,
        attention_heads=args.heads,
        vocab_size=args.vocab_size,
        seq_length=args.seq_length,
        query_groups=args.query_groups,
        kv_channels=args.kv_channels,
        ffn_hidden_size=args.ffn_hidden_size,
        gated=args.swiglu,
        bias=not args.disable_bias_linear,
        rms_norm=args.rms_norm,
        learned_positions=not args.rotary,
        tied=not args.untied,
        experts=args.experts,
        experts_per_token=args.experts_per_token,
    )
