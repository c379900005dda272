"""Megatron's 1F1B as lists of actions."""

import pytest

from megatron_async.schedules.actions import Kind
from megatron_async.schedules.one_f_one_b import ONE_F_ONE_B
from megatron_async.schedules.pipedream_2bw import PIPEDREAM_2BW
from megatron_async.schedules.schedule import Pipeline
from megatron_async.schedules.validator import ScheduleError, validate
from tests.schedules.lists import call_of, one_f_one_b, short


def test_order() -> None:
    actions = call_of(ONE_F_ONE_B, stages=4, stage=2, batch=5, microbatches=3)
    assert [action.kind for action in actions] == [
        *(Kind.RECV_FORWARD, Kind.FORWARD, Kind.SEND_FORWARD, Kind.RECV_FORWARD),
        *(Kind.FORWARD, Kind.SEND_FORWARD_RECV_BACKWARD),
        *(Kind.BACKWARD, Kind.SEND_BACKWARD_RECV_FORWARD),
        *(Kind.FORWARD, Kind.SEND_FORWARD_RECV_BACKWARD, Kind.BACKWARD, Kind.SEND_BACKWARD),
        *(Kind.RECV_BACKWARD, Kind.START_REDUCTION, Kind.BACKWARD, Kind.SEND_BACKWARD),
        *(Kind.FINISH_REDUCTION, Kind.UPDATE),
    ]
    assert short(actions) == "F5.0v5 F5.1v5 B5.0v5 F5.2v5 B5.1v5 B5.2v5 U5v6"


def test_fewer_microbatches_than_warm_up() -> None:
    actions = call_of(ONE_F_ONE_B, stages=4, stage=0, batch=0, microbatches=2)
    assert short(actions) == "F0.0v0 F0.1v0 B0.0v0 B0.1v0 U0v1"


def test_a_gather_follows_the_update() -> None:
    actions = call_of(ONE_F_ONE_B, stages=1, stage=0, batch=0, microbatches=1, gather_ahead=True)
    assert short(actions, collectives=True) == "F0.0v0 R0 B0.0v0 r0 U0v1 G1 g1"


def test_impossible_calls_are_refused() -> None:
    with pytest.raises(ValueError, match="at least one microbatch, got 0"):
        call_of(ONE_F_ONE_B, stages=2, stage=0, batch=0, microbatches=0)
    with pytest.raises(ValueError, match="stage 2 does not exist in a pipeline of 2 stages"):
        call_of(ONE_F_ONE_B, stages=2, stage=2, batch=0, microbatches=1)


@pytest.mark.parametrize("stages", range(1, 7))
@pytest.mark.parametrize("gather_ahead", [False, True])
def test_every_layout_is_valid_and_has_no_delay(stages: int, gather_ahead: bool) -> None:
    pipeline = Pipeline(stages=stages, deferred=False, gather_ahead=gather_ahead)
    for count in (1, 2, stages, 2 * stages + 1):
        counts = [count] * 3
        lists = one_f_one_b(stages, counts, gather_ahead=gather_ahead)
        validate(lists, schedule=ONE_F_ONE_B, pipeline=pipeline, microbatches=counts)
    counts = [stages] * 3
    lists = one_f_one_b(stages, counts)
    with pytest.raises(ScheduleError, match="must run forward on version 0"):
        validate(
            lists,
            schedule=PIPEDREAM_2BW,
            pipeline=Pipeline(stages=stages, deferred=False),
            microbatches=counts,
        )
