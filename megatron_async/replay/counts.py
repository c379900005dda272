"""How often the host waits for the device, and how many kernels it launches."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from megatron_async.replay.trace import Begin, End, Iteration, Kernel, Synchronize, Trace

__all__ = ["Count", "host_waits", "launches"]


@dataclass(frozen=True, kw_only=True)
class Count:
    """Something that happens on a stage, so often in an iteration (a mean)."""

    stage: int
    text: str
    number: float


def host_waits(traces: Sequence[Trace]) -> list[Count]:
    """Return for what, and where, the hosts wait for their device; the most frequent first.

    Of each stage the first rank is looked at.
    """
    found: list[Count] = []
    for trace in _one_a_stage(traces):
        places = Counter(
            f"{item.why} in {item.where.rpartition(':')[2]}"
            for item in trace.items
            if isinstance(item, Synchronize)
        )
        found += _means(trace, places)
    return sorted(found, key=lambda count: -count.number)


def launches(traces: Sequence[Trace]) -> list[Count]:
    """Return how many kernels the actions of each stage launch; the most first."""
    found: list[Count] = []
    for trace in _one_a_stage(traces):
        actions: Counter[str] = Counter()
        action = "outside of actions"
        for item in trace.items:
            match item:
                case Begin():
                    action = item.action
                case End():
                    action = "outside of actions"
                case Kernel():
                    actions[action] += 1
        found += _means(trace, actions)
    return sorted(found, key=lambda count: -count.number)


def _one_a_stage(traces: Sequence[Trace]) -> list[Trace]:
    return list({trace.stage: trace for trace in reversed(traces)}.values())[::-1]


def _means(trace: Trace, found: Counter[str]) -> list[Count]:
    iterations = max(sum(isinstance(item, Iteration) for item in trace.items), 1)
    return [
        Count(stage=trace.stage, text=text, number=number / iterations)
        for text, number in found.items()
    ]
