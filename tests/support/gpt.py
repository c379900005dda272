"""Command lines of tiny GPTs on mock data."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

__all__ = ["ASYNC", "PRETRAIN_GPT", "REPOSITORY", "Value", "gpt_args"]

REPOSITORY = Path(__file__).resolve().parents[2]
PRETRAIN_GPT = Path(
    os.environ.get("MEGATRON_PRETRAIN_GPT", REPOSITORY / "examples" / "pretrain_gpt.py")
)

type Value = str | int | float | bool | Path | Sequence[str | int | float | Path] | None
"""Of a flag."""

ASYNC: Mapping[str, Value] = {"pipeline_schedule": "pipedream-2bw"}

# One layer on each of 4 stages; 8 microbatches a batch with one data-parallel rank.
_GPT_ARGS: Mapping[str, Value] = {
    "num_layers": 4,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "seq_length": 64,
    "max_position_embeddings": 64,
    "vocab_size": 256,
    "mock_data": True,
    "tokenizer_type": "NullTokenizer",
    "micro_batch_size": 2,
    "global_batch_size": 16,
    "train_iters": 6,
    "lr": "1e-3",
    "min_lr": "1e-3",
    "lr_decay_style": "constant",
    "log_interval": 1,
    "eval_iters": 0,
    "eval_interval": 1000,
    "optimizer": "adam",
    "num_workers": 0,
    "seed": 1234,
}


def gpt_args(**overrides: Value) -> list[str]:
    """Make the command line of a tiny GPT on mock data.

    Dropout is Megatron's default (0.1, twice): pass ``hidden_dropout=0, attention_dropout=0`` to
    compare layouts.

    Args:
        overrides: a flag's name with underscores, and its value. ``True`` gives the bare flag,
            ``None`` or ``False`` leaves it out, a sequence gives several values.
    """
    argv: list[str] = []
    for name, value in {**_GPT_ARGS, **overrides}.items():
        if value is None or value is False:
            continue
        argv.append("--" + name.replace("_", "-"))
        if value is True:
            continue
        values = [value] if isinstance(value, str | int | float | Path) else value
        argv += [str(one) for one in values]
    return argv
