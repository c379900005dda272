"""What a delay correction is: a record of what it does and which settings it has. Without torch."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from megatron_async.registry import Flag

__all__ = ["ADAPTIVE_STRENGTH", "MOMENTUM", "STRENGTH", "Correction", "Settings"]

type Settings = Mapping[str, Any]
"""The values of a correction's flags by their ``dest``."""

STRENGTH = Flag(
    name="--delay-correction-strength",
    parse=float,
    default=1.0,
    metavar="LAMBDA",
    help="Factor of the delay correction. 0 leaves the update as it is.",
    fits=lambda strength: 0.0 <= strength < float("inf"),
    takes="a finite number >= 0; 1 corrects in full",
    idle=0.0,
)
ADAPTIVE_STRENGTH = Flag(
    name="--delay-correction-adaptive-strength",
    switch=True,
    default=False,
    help="Adapt the strength to each element and update, with --delay-correction-strength as "
    "the scale. Error feedback then looks ahead only as far as successive updates agree; delay "
    "compensation divides by the gradient's root mean square. Takes one more buffer.",
)
MOMENTUM = Flag(
    name="--delay-correction-momentum",
    parse=float,
    default=0.99,
    metavar="GAMMA",
    help="Momentum of --delay-correction nesterov.",
    fits=lambda momentum: 0.0 <= momentum < 1.0,
    takes="a number of at least 0 and below 1",
    idle=0.0,
)


@dataclass(frozen=True, kw_only=True)
class Correction:
    """A delay correction.

    Attributes:
        name: value of ``--delay-correction``.
        summary: for ``--help``, to follow the name; no full stop at the end.
        build: makes the correction of one torch optimizer (a
            :class:`~megatron_async.corrections.base.DelayCorrection`) from the optimizer and the
            settings. It imports torch when it is called.
        settings: the flags that mean something with it.
        buffers: fp32 numbers that it keeps for each main parameter, with these settings.
        any_delay: whether it is defined for delays of more than one step, and for different ones
            on different stages.
        looks_ahead: whether the weights that the model computes on are moved by an amount that
            depends on the delay, so that copies of a parameter with different delays would differ.
        needs_last_update: whether the first update, which has none before it, is not corrected.
        has_momentum: whether it brings a momentum of its own, beside the optimizer's.
    """

    name: str
    summary: str
    build: Callable[[Any, Settings], Any]
    settings: tuple[Flag, ...] = ()
    buffers: int = 1
    any_delay: bool = False
    looks_ahead: bool = False
    needs_last_update: bool = False
    has_momentum: bool = False

    @property
    def flags(self) -> tuple[Flag, ...]:
        """As a registry asks for them."""
        return self.settings

    def settings_in(self, values: Any) -> dict[str, Any]:
        """Return its settings from a namespace; flags that it lacks have their defaults."""
        return {flag.dest: getattr(values, flag.dest, flag.default) for flag in self.settings}

    def adapts(self, settings: Settings) -> bool:
        """Whether the strength adapts."""
        return bool(settings.get(ADAPTIVE_STRENGTH.dest))

    def buffers_with(self, settings: Settings) -> int:
        """Number of buffers, one more if the strength adapts."""
        return self.buffers + (1 if self.adapts(settings) else 0)

    def label(self, settings: Settings) -> str:
        """The correction and what decides which buffers it keeps."""
        return f"{self.name}{' with adaptive strength' if self.adapts(settings) else ''}"
