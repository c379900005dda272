"""The flags that all benchmarks have."""

import argparse
from pathlib import Path

__all__ = ["add_common"]


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
