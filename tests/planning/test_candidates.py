"""The schedules that can be planned."""

import pytest

from megatron_async.planning.candidates import candidate, candidates
from megatron_async.schedules import SCHEDULES
from megatron_async.schedules.validator import validate

NAMES = [each.name for each in candidates()]


def test_every_registered_schedule_can_be_planned() -> None:
    assert {each.schedule.name for each in candidates()} == set(SCHEDULES.names) - {"default"}
    assert len(set(NAMES)) == len(NAMES)
    assert len({each.title for each in candidates()}) == len(NAMES)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("gather_ahead", [False, True])
@pytest.mark.parametrize("reduce_late", [False, True])
def test_planned_schedules_are_valid(name: str, gather_ahead: bool, reduce_late: bool) -> None:
    planned = candidate(name)
    pipeline = planned.pipeline(stages=4, gather_ahead=gather_ahead, reduce_late=reduce_late)
    if problems := planned.schedule.problems(pipeline, 8):
        with pytest.raises(ValueError, match=problems[0].reason):
            planned.lists(pipeline, microbatches=8, iterations=4)
        assert (name, gather_ahead) == ("paci", True)
        return
    lists = planned.lists(pipeline, microbatches=8, iterations=4)
    validate(lists, schedule=planned.schedule, pipeline=pipeline, microbatches=[8] * 4)


def test_what_a_schedule_refuses_is_not_offered() -> None:
    assert "pipedream-2bw-undeferred" in NAMES
    assert "paci" in NAMES
    assert "paci-undeferred" not in NAMES


def test_unknown_schedule() -> None:
    with pytest.raises(ValueError, match="no schedule is named 'gpipe'; there are: 1f1b, "):
        candidate("gpipe")
