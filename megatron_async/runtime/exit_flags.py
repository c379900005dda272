"""The flags that make Megatron ask all ranks whether to stop.

They are off while Megatron decides in an iteration in which the answer is known. A save in there
has to see those of the command line: it stores them, and protects its helper by them.
"""

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from megatron_async.runtime.run import run

__all__ = ["as_given", "replaced"]


@contextmanager
def replaced(args: argparse.Namespace, **values: Any) -> Iterator[None]:
    """Let flags have other values inside of the block."""
    before = {name: getattr(args, name) for name in values}
    run.given_flags.update(before)
    vars(args).update(values)
    try:
        yield
    finally:
        vars(args).update(before)
        run.given_flags.clear()


@contextmanager
def as_given(args: argparse.Namespace) -> Iterator[None]:
    """Let the flags have the values of the command line again, inside of :func:`replaced`."""
    now = {name: getattr(args, name) for name in run.given_flags}
    vars(args).update(run.given_flags)
    try:
        yield
    finally:
        vars(args).update(now)
