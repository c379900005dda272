"""A row of the hooks' table, and what makes a replacement."""

import functools
from collections.abc import Callable
from typing import Any

from megatron_async.megatron import releases
from megatron_async.megatron.replaced import Replacement, mark

__all__ = ["TRAINING", "called_by_source", "hook", "row"]

TRAINING = "megatron.training.training"

_calls: set[tuple[str, str | None]] = set()
"""What :func:`hook` has made: by which function, and of what."""


def hook(make: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Declare a function that takes an attribute of Megatron and returns its replacement.

    It stands in the table; in a Megatron whose source was patched (``patches/``) it is called
    there, as a decorator.
    """

    @functools.wraps(make)
    def made(original: Any) -> Any:
        replacement = make(original)
        mark(replacement)
        function = original.fget if isinstance(original, property) else original
        _calls.add((make.__qualname__, getattr(function, "__name__", None)))
        return replacement

    return made


def called_by_source(row: Replacement) -> bool:
    """Whether what a row replaces was passed to its function, be it wrapped since or not."""
    name = row.make.__qualname__
    return not _calls.isdisjoint({(name, row.attribute), (name, None)})


def row(
    target: str,
    attribute: str,
    make: Callable[[Any], Any],
    why: str,
    *,
    versions: str = releases.VERSIONS,
) -> Replacement:
    """Make one.

    Args:
        target: what holds the attribute, as ``module`` or ``module:Class``.
        attribute: its name.
        make: takes the original, returns the replacement; declared with :func:`hook`.
        why: one sentence, without a full stop.
        versions: specifier of the releases of megatron-core that it was tested with.
    """
    return Replacement(target=target, attribute=attribute, make=make, why=why, versions=versions)
