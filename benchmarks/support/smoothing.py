"""Smooth loss curves of runs that see the same batches, and where one comes down to a loss.

How hard a batch is shows in all runs alike: what one run's loss is above or below its own smooth
curve is subtracted from every other's before it is smoothed, too. What is left is the noise of a
run itself.
"""

from collections.abc import Sequence

import numpy
from numpy.typing import NDArray

__all__ = ["Curve", "reached", "smooth", "without_batches"]

type Curve = NDArray[numpy.float64]
"""A loss for each iteration, the first one's first."""

_WIDTH = 1.25  # a value is made of the iterations from n / _WIDTH to n * _WIDTH
_POINTS = 400  # values that are computed; those between them are interpolated


def smooth(losses: Curve) -> Curve:
    """Return a smooth curve: at each iteration n that of a line through the losses around it, over
    log n, in which losses fall more evenly than over n."""
    logs = numpy.log(numpy.arange(1, len(losses) + 1))
    points = numpy.linspace(logs[0], logs[-1], _POINTS)
    reach = numpy.log(_WIDTH)
    values = numpy.empty(_POINTS)
    for index, point in enumerate(points):
        near = numpy.abs(logs - point) <= reach
        if near.sum() < 3:
            near = numpy.argsort(numpy.abs(logs - point))[: min(3, len(losses))]
        degree = 1 if len(losses) > 1 else 0
        values[index] = numpy.polyval(numpy.polyfit(logs[near] - point, losses[near], degree), 0.0)
    return numpy.interp(logs, points, values)


def without_batches(losses: Curve, reference: Curve) -> Curve:
    """Return the smooth curve of a run, without what its batches did to another one.

    Args:
        losses: of the run.
        reference: of the other one, of at least as many iterations, on the same batches.
    """
    residual = reference - smooth(reference)
    return smooth(losses - residual[: len(losses)])


def reached(curve: Sequence[float] | Curve, loss: float) -> float | None:
    """Return after how many iterations, a part of one included, a smooth curve is down at a loss;
    None if it never is."""
    below = numpy.flatnonzero(numpy.asarray(curve) <= loss)
    if not len(below):
        return None
    first = int(below[0])
    if first == 0:
        return 1.0
    before, after = curve[first - 1], curve[first]
    return float(first + (before - loss) / (before - after))
