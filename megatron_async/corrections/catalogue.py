"""What corrections there are and which settings each of them has. Plain data, without torch."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

__all__ = ["CATALOGUE", "CorrectionKind"]


@dataclass(frozen=True, kw_only=True)
class CorrectionKind:
    """A delay correction, described.

    Attributes:
        name: value of ``--delay-correction``.
        summary: for ``--help``; no full stop at the end.
        buffers: fp32 numbers that it keeps for each main parameter.
        scaled: whether it has a strength (``--delay-correction-strength``).
        has_momentum: whether it has a momentum (``--delay-correction-momentum``).
        adapts: whether its strength can adapt (``--delay-correction-adaptive-strength``); that
            takes one more buffer.
        any_delay: whether it is defined for other delays than one step.
        needs_last_update: whether the first update, which has none before it, is not corrected.
    """

    name: str
    summary: str
    buffers: int = 1
    scaled: bool = True
    has_momentum: bool = False
    adapts: bool = False
    any_delay: bool = False
    needs_last_update: bool = False

    def buffers_with(self, *, adaptive_strength: bool) -> int:
        """Number of buffers, one more if the strength adapts."""
        return self.buffers + (1 if adaptive_strength and self.adapts else 0)


_KINDS: Final = (
    CorrectionKind(
        name="error-feedback",
        summary="adds the difference between this update and the last one",
        adapts=True,
        needs_last_update=True,
    ),
    CorrectionKind(
        name="weight-prediction",
        summary="lets the model compute on weights that are moved once more along the last update, "
        "for each step of delay",
        any_delay=True,
    ),
    CorrectionKind(
        name="nesterov",
        summary="averages the updates with a momentum and looks ahead along it",
        scaled=False,
        has_momentum=True,
        any_delay=True,
    ),
    CorrectionKind(
        name="delay-compensation",
        summary="corrects the gradient to first order, with its own square for the Hessian",
        adapts=True,
        needs_last_update=True,
    ),
)

CATALOGUE: Final[Mapping[str, CorrectionKind]] = {kind.name: kind for kind in _KINDS}
"""The corrections by name."""
