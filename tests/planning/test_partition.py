"""The exact split of a model over stages."""

import random
from itertools import combinations, pairwise

import pytest
from megatron.core.transformer.enums import LayerType
from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout

from megatron_async.planning.partition import layers_per_stage, layout, partition


def all_splits(count: int, stages: int) -> list[list[tuple[int, int]]]:
    return [list(pairwise([0, *cuts, count])) for cuts in combinations(range(1, count), stages - 1)]


def sums(times: list[float], split: list[tuple[int, int]]) -> list[float]:
    return [sum(times[first:end]) for first, end in split]


@pytest.mark.parametrize("seed", range(40))
def test_no_split_is_better(seed: int) -> None:
    chance = random.Random(seed)
    count = chance.randint(2, 11)
    stages = chance.randint(1, count)
    times = [float(chance.randint(0, 12)) for _ in range(count)]
    found = partition(times, stages)
    slowest = min(max(sums(times, each)) for each in all_splits(count, stages))
    assert found in all_splits(count, stages)
    assert max(sums(times, found)) == slowest
    # And among those as fast none is more even.
    assert sum(s * s for s in sums(times, found)) == min(
        sum(s * s for s in sums(times, each))
        for each in all_splits(count, stages)
        if max(sums(times, each)) == slowest
    )


@pytest.mark.parametrize("seed", range(20))
def test_no_split_that_fits_is_better(seed: int) -> None:
    chance = random.Random(seed)
    count, stages = 9, 4
    times = [float(chance.randint(1, 12)) for _ in range(count)]
    room = [chance.randint(1, 4) for _ in range(stages)]

    def fits(stage: int, first: int, end: int) -> bool:
        return end - first <= room[stage]

    possible = [
        split
        for split in all_splits(count, stages)
        if all(fits(stage, *part) for stage, part in enumerate(split))
    ]
    if not possible:
        with pytest.raises(ValueError, match="no split of 9 elements over 4 stages fits"):
            partition(times, stages, fits=fits)
        return
    found = partition(times, stages, fits=fits)
    assert found in possible
    assert max(sums(times, found)) == min(max(sums(times, each)) for each in possible)


def test_a_heavy_head_gets_fewer_layers() -> None:
    # 14 layers of 1, a head of 2.
    split = partition([0.0, *[1.0] * 14, 2.0], 4)
    assert layers_per_stage(split) == [4, 4, 4, 2]


@pytest.mark.parametrize(
    "layers",
    [[3, 4, 4, 3], [2], [1, 2], [0, 5, 5, 5, 0], [4, 4, 4, 4], [12, 13, 13, 12, 12, 10], [16, 0]],
)
def test_megatron_reads_the_layout(layers: list[int]) -> None:
    text = layout(layers)
    read = PipelineParallelLayerLayout(text, len(layers))
    read.validate_layer_layout(num_layers=sum(layers), mtp_num_layers=0)
    assert read.virtual_pipeline_model_parallel_size == 1
    built = [
        (
            chunk.count(LayerType.embedding),
            chunk.count(LayerType.decoder),
            chunk.count(LayerType.loss),
        )
        for (chunk,) in read.layout
    ]
    last = len(layers) - 1
    assert built == [
        (int(stage == 0), count, int(stage == last)) for stage, count in enumerate(layers)
    ]


def test_layout_is_short() -> None:
    assert layout([3, 4, 4, 3]) == "Et*3|(t*4|)*2t*3L"


@pytest.mark.parametrize(
    ("times", "stages", "message"),
    [([1.0, 1.0], 3, "2 elements do not go into 3 stages"), ([1.0, -1.0], 1, "negative")],
)
def test_refused(times: list[float], stages: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        partition(times, stages)
