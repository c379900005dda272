"""A row of the hooks' table."""

from collections.abc import Callable
from typing import Any

from megatron_async.megatron import releases
from megatron_async.megatron.replaced import Replacement

__all__ = ["TRAINING", "row"]

TRAINING = "megatron.training.training"


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
        make: takes the original, returns the replacement.
        why: one sentence, without a full stop.
        versions: specifier of the releases of megatron-core that it was tested with.
    """
    return Replacement(target=target, attribute=attribute, make=make, why=why, versions=versions)
