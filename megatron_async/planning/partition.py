"""An exact split of a model over stages: the slowest stage is as fast as it can be.

Without a flush an iteration takes what the slowest stage takes, whatever the others do, so this is
all that matters of where layers go. (With a flush the other stages matter as well; AdaPtis, arXiv
2509.23722, searches partition, placement and order together.) Layers keep their order, the
embedding is in front of them and the head behind them, and each of these elements has its time for
a whole iteration, m (t_f + t_b) and its part of the optimizer's step.

Two passes of dynamic programming: the first finds the least time of the slowest stage, the second,
among all splits that reach it, that with the least sum of squares, which is the most even one.
"""

import math
from collections.abc import Callable, Sequence
from itertools import accumulate, groupby

__all__ = ["layers_per_stage", "layout", "partition"]

type Fits = Callable[[int, int, int], bool]


def partition(
    times: Sequence[float], stages: int, *, fits: Fits | None = None
) -> list[tuple[int, int]]:
    """Return each stage's elements as (first, behind the last).

    Args:
        times: of the elements in order, in any unit: embedding, layers, head.
        stages: p; each gets at least one element.
        fits: from a stage, its first element and the one behind its last, whether it may hold them;
            what a stage holds in memory, say. By default anything may be anywhere.

    Raises:
        ValueError: fewer elements than stages, a negative time, or no split that fits.
    """
    count = len(times)
    if not 1 <= stages <= count:
        raise ValueError(f"{count} elements do not go into {stages} stages")
    if min(times) < 0:
        raise ValueError("times must not be negative")
    sums = [0.0, *accumulate(times)]

    def cost(first: int, end: int) -> float:
        return sums[end] - sums[first]

    allowed = [
        {
            (first, end)
            for first in range(stage, count)
            for end in range(first + 1, count - (stages - 1 - stage) + 1)
            if (stage > 0 or first == 0)
            and (stage < stages - 1 or end == count)
            and (fits is None or fits(stage, first, end))
        }
        for stage in range(stages)
    ]
    slowest, _ = _best(allowed, count, cost, max)
    if math.isinf(slowest):
        raise ValueError(f"no split of {count} elements over {stages} stages fits")
    # What is equal but for rounding counts as equal.
    limit = slowest * (1 + 1e-12)
    even = [{each for each in stage if cost(*each) <= limit} for stage in allowed]
    _, split = _best(even, count, lambda first, end: cost(first, end) ** 2, lambda a, b: a + b)
    return split


def _best(
    allowed: Sequence[set[tuple[int, int]]],
    count: int,
    cost: Callable[[int, int], float],
    joined: Callable[[float, float], float],
) -> tuple[float, list[tuple[int, int]]]:
    """The least joined cost of a chain of allowed intervals from 0 to ``count``, and the chain."""
    best: dict[int, tuple[float, list[tuple[int, int]]]] = {0: (0.0, [])}
    for intervals in allowed:
        reached: dict[int, tuple[float, list[tuple[int, int]]]] = {}
        for first, end in sorted(intervals):
            if first not in best:
                continue
            total, chain = best[first]
            total = joined(total, cost(first, end))
            if end not in reached or total < reached[end][0]:
                reached[end] = (total, [*chain, (first, end)])
        best = reached
    return best.get(count, (math.inf, []))


def layers_per_stage(split: Sequence[tuple[int, int]]) -> list[int]:
    """Return how many layers each stage has; the first and the last element are none."""
    counts = [end - first for first, end in split]
    counts[0] -= 1
    counts[-1] -= 1
    return counts


def layout(layers: Sequence[int]) -> str:
    """Return the value of Megatron's ``--pipeline-model-parallel-layout``.

    For example ``Et*3|(t*4|)*2t*3L`` for 3, 4, 4, 3: E is the embedding, t a layer, L the head, and
    a bar the border between two stages. Source: ``PipelineParallelLayerLayout`` in
    megatron/core/transformer/pipeline_parallel_layer_layout.py.

    Args:
        layers: of each stage; the first has the embedding and the last the head as well.
    """
    stages = [_repeated("t", count) for count in layers]
    stages[0] = "E" + stages[0]
    stages[-1] += "L"
    text = ""
    for stage, group in groupby(stages[:-1]):
        length = len(list(group))
        text += f"{stage}|" if length == 1 else f"({stage}|)*{length}"
    return text + stages[-1]


def _repeated(letter: str, count: int) -> str:
    return letter * count if count < 3 else f"{letter}*{count}"
