"""The flags that all benchmarks have, and those of a model that is really computed."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from support.jobs import gpt_flags

__all__ = ["add_common", "add_model", "model_flags"]


def add_model(
    parser: argparse.ArgumentParser,
    *,
    hidden_size: int,
    heads: int,
    seq_length: int,
    vocab_size: int,
    micro_batch_size: int,
    optimizers: Sequence[str],
) -> None:
    """Add a model's flags with these defaults; it has 4 layers, and the first of the optimizers."""
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden-size", type=int, default=hidden_size)
    parser.add_argument("--heads", type=int, default=heads)
    parser.add_argument("--seq-length", type=int, default=seq_length)
    parser.add_argument("--vocab-size", type=int, default=vocab_size)
    parser.add_argument("--micro-batch-size", type=int, default=micro_batch_size)
    parser.add_argument("--optimizer", choices=optimizers, default=optimizers[0])


def model_flags(args: argparse.Namespace, *, stages: int, microbatches: int) -> list[str]:
    """Return Megatron's flags of a job of the model that was asked for."""
    return gpt_flags(
        layers=args.layers,
        hidden_size=args.hidden_size,
        heads=args.heads,
        seq_length=args.seq_length,
        vocab_size=args.vocab_size,
        micro_batch_size=args.micro_batch_size,
        stages=stages,
        microbatches=microbatches,
        iterations=args.iterations,
        optimizer=args.optimizer,
    )


def add_common(parser: argparse.ArgumentParser, *, iterations: int, repeats: int) -> None:
    """Add them.

    Args:
        iterations: The default number of measured iterations of a job.
        repeats: The default number of times that every job is run.
    """
    parser.add_argument(
        "--iterations",
        type=int,
        default=iterations,
        help=f"measured iterations of each job, fill and drain excluded (default {iterations})",
    )
    parser.add_argument(
        "--repeats",
        type=int,
        default=repeats,
        help=f"times that each job is run, in turn with the others (default {repeats})",
    )
    parser.add_argument(
        "--timeout", type=float, default=900.0, help="seconds until a job is stopped (default 900)"
    )
    parser.add_argument("--csv", type=Path, metavar="FILE", help="write the rows as CSV")
    parser.add_argument("--png", type=Path, metavar="FILE", help="draw the rows")
    parser.add_argument(
        "--quick", action="store_true", help="a minute's run that shows that it works, no more"
    )
