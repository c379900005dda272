"""The size of the delay correction, relative to the update."""

import math
from collections.abc import Mapping, Sequence

import torch

from megatron_async.corrections.base import DelayCorrection
from megatron_async.runtime.counters.counter import Counter, Scalar

__all__ = ["CorrectionRatio"]

_CORRECTION, _UPDATE = "correction", "update"


class CorrectionRatio(Counter):
    """Sums of squares of the correction and of the update, over a sample of each parameter.

    Args:
        corrections: those of this rank.
        interval: measure in each iteration that it divides: measuring takes some small kernels for
            each parameter.
    """

    names = (_CORRECTION, _UPDATE)

    def __init__(self, corrections: Sequence[DelayCorrection], *, interval: int = 1) -> None:
        self._corrections = corrections
        self._interval = interval

    def before_update(self, iteration: int) -> None:
        for correction in self._corrections:
            correction.measure = iteration % self._interval == 0

    def collect(self) -> dict[str, float | torch.Tensor]:
        sums: dict[str, float | torch.Tensor] = {}
        for correction in self._corrections:
            if correction.squares is not None:
                for name, value in zip(self.names, correction.squares, strict=True):
                    sums[name] = sums.get(name, 0.0) + value
        return sums

    def scalars(self, sums: Mapping[str, float], iteration: int) -> list[Scalar]:
        if sums.get(_UPDATE, 0.0) <= 0:
            return []
        # Measured in the update before the one that carried it.
        ratio = math.sqrt(sums[_CORRECTION] / sums[_UPDATE])
        return [("delay-correction-ratio", ratio, iteration - 1)]
