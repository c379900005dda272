"""Megatron's interleaved 1F1B as lists of actions."""

import pytest

from megatron_async.schedules.actions import Kind
from megatron_async.schedules.interleaved import INTERLEAVED
from megatron_async.schedules.schedule import Pipeline, action_lists
from megatron_async.schedules.validator import validate
from tests.schedules.lists import call_of


def test_order() -> None:
    # p = 2, v = 2, m = 2, last stage: 2 warm-up forwards, then chunk 1 first backward.
    actions = call_of(INTERLEAVED, stages=2, stage=1, batch=0, microbatches=2, chunks=2)
    order = [
        f"{a.kind.value[0]}{a.microbatch}.{a.chunk}"
        for a in actions
        if a.kind in (Kind.FORWARD, Kind.BACKWARD)
    ]
    assert order == ["f0.0", "f1.0", "f0.1", "b0.1", "f1.1", "b1.1", "b0.0", "b1.0"]


def test_impossible_calls_are_refused() -> None:
    with pytest.raises(ValueError, match="multiple of 2 microbatches"):
        call_of(INTERLEAVED, stages=2, stage=1, batch=0, microbatches=3, chunks=2)
    with pytest.raises(ValueError, match="at least 2 stages and 2 model chunks"):
        call_of(INTERLEAVED, stages=2, stage=1, batch=0, microbatches=2, chunks=1)


@pytest.mark.parametrize("stages", range(2, 7))
@pytest.mark.parametrize("chunks", [2, 3])
@pytest.mark.parametrize("gather_ahead", [False, True])
def test_every_layout_is_valid(stages: int, chunks: int, gather_ahead: bool) -> None:
    pipeline = Pipeline(stages=stages, deferred=False, chunks=chunks, gather_ahead=gather_ahead)
    counts = [stages, 3 * stages]
    lists = action_lists(INTERLEAVED, pipeline, counts)
    validate(lists, schedule=INTERLEAVED, pipeline=pipeline, microbatches=counts)
