"""The checks: each takes the logs of some runs and says what was expected, measured, let through.

None of them starts anything. A log without the figure that is looked for raises
:class:`~megatron_async.gpu_check.run_log.MeasurementError`.
"""

import statistics
from collections.abc import Mapping, Sequence

from megatron_async.gpu_check.rows import Row
from megatron_async.gpu_check.run_log import MeasurementError, RunLog

__all__ = [
    "LOSS_LIMIT",
    "Parts",
    "added_memory",
    "bubble",
    "delay_shows",
    "held_memory",
    "no_race",
    "overhead",
    "peak_memory",
    "same_losses",
    "speed",
]

type Parts = Mapping[str, float]
"""A stage's memory as ``megatron-async plan --csv`` has it, in bytes by name."""

LOSS_LIMIT = 2.0**-8
"""The unit roundoff of bf16, which has 8 bits of precision; relative."""

_BUBBLE_LIMIT = 0.5
_GAIN_LIMIT = 0.5
_OVERHEAD_LIMIT = 1.05
_HELD_LIMIT = 0.05
_PEAK_LIMIT = 0.25
_SLACK = 128 * 2**20  # workspaces of cuBLAS, which live in the same allocator
_MIB = 2**20
_ADDED = ("second_version", "gradient_copy", "correction", "second_grad_buffer")


def same_losses(ours: RunLog, theirs: RunLog) -> Row:
    """Two runs that compute the same, on other devices or in another order."""
    differences = _differences(ours, theirs)
    worst = max(differences)
    return Row.judged(
        expected="equal",
        measured=f"{worst:.1e} at most, in {len(differences)} iterations",
        limit=f"{LOSS_LIMIT:.1e} relative",
        passes=worst <= LOSS_LIMIT,
    )


def delay_shows(asynchronous: RunLog, synchronous: RunLog) -> Row:
    """The first batch runs on the same weights; later ones do not, since updates come a step late.

    Otherwise the flags had no effect, or a delay is too small for the other checks to see.
    """
    first, *later = _differences(asynchronous, synchronous)
    worst = max(later, default=0.0)
    return Row.judged(
        expected="iteration 1 equal, later ones not",
        measured=f"{first:.1e}, then up to {worst:.1e}",
        limit=f"{LOSS_LIMIT:.1e} relative",
        passes=first <= LOSS_LIMIT < worst,
    )


def bubble(asynchronous: RunLog, synchronous: RunLog, *, stages: int, microbatches: int) -> Row:
    """The share of the time that stages wait for each other, against that of 1F1B.

    1F1B waits for p - 1 of m + p - 1 slots.
    """
    ours, theirs = (statistics.median(log.bubbles()) for log in (asynchronous, synchronous))
    ideal = (stages - 1) / (microbatches + stages - 1)
    return Row.judged(
        expected=f"0 %; 1F1B: {ideal:.0%}",
        measured=f"{ours:.1%}; 1F1B: {theirs:.1%}",
        limit=f"{_BUBBLE_LIMIT:g} of 1F1B's",
        passes=ours <= _BUBBLE_LIMIT * theirs,
    )


def speed(asynchronous: RunLog, synchronous: RunLog, *, stages: int, microbatches: int) -> Row:
    """The time of an iteration, which no counter of this package takes, against that of 1F1B."""
    ours, theirs = (statistics.median(log.seconds()) for log in (asynchronous, synchronous))
    ideal = (microbatches + stages - 1) / microbatches
    least = 1 + _GAIN_LIMIT * (ideal - 1)
    gain = theirs / ours
    return Row.judged(
        expected=f"{ideal:.2f}",
        measured=f"{gain:.2f} ({1e3 * ours:.0f} and {1e3 * theirs:.0f} ms)",
        limit=f"at least {least:.2f}",
        passes=gain >= least,
    )


def overhead(plugin: RunLog, plain: RunLog) -> Row:
    """What the plugin costs where it cannot gain: on one stage."""
    ours, theirs = (statistics.median(log.seconds()) for log in (plugin, plain))
    ratio = ours / theirs
    return Row.judged(
        expected="1.00",
        measured=f"{ratio:.3f} ({1e3 * ours:.0f} and {1e3 * theirs:.0f} ms)",
        limit=f"at most {_OVERHEAD_LIMIT:.2f}",
        passes=ratio <= _OVERHEAD_LIMIT,
    )


def added_memory(asynchronous: RunLog, synchronous: RunLog, plan: Sequence[Parts]) -> Row:
    """What asynchronous training adds between iterations, on the last stage.

    There no activations are left between iterations, so that the plan's number is exact.
    """
    last, ranks = len(plan) - 1, len(plan)
    added = asynchronous.memory(ranks=ranks)[last].held - synchronous.memory(ranks=ranks)[last].held
    return _close(
        measured=added,
        expected=sum(plan[last][name] for name in _ADDED),
        relative=_HELD_LIMIT,
        slack=0.0,
    )


def held_memory(asynchronous: RunLog, plan: Sequence[Parts]) -> Row:
    """All that is held between iterations, on the last stage."""
    last = len(plan) - 1
    return _close(
        measured=asynchronous.memory(ranks=len(plan))[last].held,
        expected=plan[last]["total"] - plan[last]["activations"],
        relative=_HELD_LIMIT,
    )


def peak_memory(asynchronous: RunLog, plan: Sequence[Parts]) -> Row:
    """The peak, on the stage that is farthest from its plan; activations are an estimate there."""
    found = asynchronous.memory(ranks=len(plan))
    worst = max(
        range(len(plan)), key=lambda stage: abs(found[stage].peak / plan[stage]["total"] - 1)
    )
    return _close(
        measured=found[worst].peak,
        expected=plan[worst]["total"],
        relative=_PEAK_LIMIT,
    )


def no_race(log: RunLog, planted: RunLog, synchronous: RunLog | None = None) -> Row:
    """What the CUDA sanitizer found in a run, if it finds the race that was planted.

    Args:
        log: of the run. The sanitizer ends it at the first race.
        planted: of :mod:`megatron_async.gpu_check.planted_race`.
        synchronous: of the same run without this package's flags, to say whose the race is.
    """
    seen = "found" if planted.races else "not found"
    measured = f"{log.races or 'none'}; the planted one {seen}"
    if synchronous is not None:
        measured += f"; in plain Megatron {synchronous.races or 'none'}"
    return Row.judged(
        expected="none; a planted one found",
        measured=measured,
        limit="none",
        passes=planted.races > 0 and log.races == 0,
    )


def _differences(ours: RunLog, theirs: RunLog) -> list[float]:
    pair = ours.losses(), theirs.losses()
    if len(pair[0]) != len(pair[1]):
        raise MeasurementError(
            f"{ours.name} logged {len(pair[0])} iterations, {theirs.name} {len(pair[1])}"
        )
    return [abs(a - b) / abs(b) for a, b in zip(*pair, strict=True)]


def _close(*, measured: float, expected: float, relative: float, slack: float = _SLACK) -> Row:
    allowed = relative * expected + slack
    return Row.judged(
        expected=f"{expected / _MIB:.0f} MiB",
        measured=f"{measured / _MIB:.0f} MiB",
        limit=f"+- {allowed / _MIB:.0f} MiB",
        passes=abs(measured - expected) <= allowed,
    )
