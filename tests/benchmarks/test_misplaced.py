"""The benchmarks' schedule that is wrong on purpose."""

import pytest
from support.misplaced import misplaced_schedule

from megatron_async.schedules import SCHEDULES
from megatron_async.schedules.actions import Kind
from megatron_async.schedules.pipedream_2bw import PIPEDREAM_2BW
from megatron_async.schedules.schedule import Pipeline, action_lists
from megatron_async.schedules.simulator import Costs, simulate
from megatron_async.schedules.validator import validate
from tests.schedules.lists import call_of, find

WRONG = misplaced_schedule()


def test_it_is_not_one_of_the_package() -> None:
    assert WRONG.name not in SCHEDULES
    assert "wrong" in WRONG.title


@pytest.mark.parametrize("stage", range(4))
def test_the_completion_stands_after_the_communication_that_it_should_stand_before(
    stage: int,
) -> None:
    right, wrong = (
        call_of(each, stages=4, stage=stage, batch=1, microbatches=4)
        for each in (PIPEDREAM_2BW, WRONG)
    )
    at = find(right, Kind.COMPLETE_UPDATE)
    assert wrong[at].kind is Kind.SEND_BACKWARD_RECV_FORWARD
    assert [*wrong[:at], wrong[at + 1], wrong[at], *wrong[at + 2 :]] == right


@pytest.mark.parametrize("stages", [2, 4, 8])
def test_it_trains_rightly_and_the_steps_queue(stages: int) -> None:
    pipeline = Pipeline(stages=stages)
    counts = [stages] * 12
    lists = action_lists(WRONG, pipeline, counts)
    validate(lists, schedule=WRONG, pipeline=pipeline, microbatches=counts)
    run = simulate(lists, Costs(forward=60, backward=120, optimizer=36))
    assert run.iteration_time == pytest.approx(stages * 180 + stages * 36)
