"""The flags that make Megatron ask all ranks whether to stop.

They are off while Megatron decides in an iteration in which the answer is known. A save in there
has to see those of the command line: it stores them, and protects its helper by them.
"""

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

__all__ = ["as_given", "replaced"]

_given: dict[str, Any] = {}
"""Of each flag that is replaced now, the value on the command line."""


@contextmanager
def replaced(args: argparse.Namespace, **values: Any) -> Iterator[None]:
    """Let flags have other values inside of the block."""
    before = {name: getattr(args, name) for name in values}
    _given.update(before)
    vars(args).update(values)
    try:
        yield
    finally:
        vars(args).update(before)
        _given.clear()


@contextmanager
def as_given(args: argparse.Namespace) -> Iterator[None]:
    """Let the flags have the values of the command line again, inside of :func:`replaced`."""
    now = {name: getattr(args, name) for name in _given}
    vars(args).update(_given)
    try:
        yield
    finally:
        vars(args).update(now)
