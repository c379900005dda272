"""ZB-H1 as lists of actions."""

from dataclasses import replace

import pytest

from megatron_async.planning.memory import peak_in_flight
from megatron_async.schedules.actions import COMPUTE, Kind
from megatron_async.schedules.schedule import Pipeline, action_lists
from megatron_async.schedules.simulator import Costs, simulate
from megatron_async.schedules.validator import ScheduleError, validate
from megatron_async.schedules.zero_bubble_h1 import ZERO_BUBBLE_H1
from tests.schedules.lists import Lists, call_of

LETTERS = {Kind.FORWARD: "F", Kind.BACKWARD: "B", Kind.BACKWARD_WEIGHT: "W"}


def lists_of(stages: int, microbatches: int, iterations: int = 6) -> Lists:
    pipeline = Pipeline(stages=stages, deferred=False)
    return action_lists(ZERO_BUBBLE_H1, pipeline, [microbatches] * iterations)


def test_order() -> None:
    def order(stage: int) -> str:
        actions = call_of(ZERO_BUBBLE_H1, stages=3, stage=stage, batch=0, microbatches=4)
        return " ".join(f"{LETTERS[a.kind]}{a.microbatch}" for a in actions if a.kind in COMPUTE)

    assert order(0) == "F0 F1 F2 B0 W0 F3 B1 W1 B2 W2 B3 W3"
    assert order(2) == "F0 B0 F1 B1 F2 B2 W0 F3 B3 W1 W2 W3"


@pytest.mark.parametrize("stages", range(1, 7))
@pytest.mark.parametrize("microbatches", [1, 4, 12])
def test_every_layout_is_valid(stages: int, microbatches: int) -> None:
    pipeline = Pipeline(stages=stages, deferred=False)
    lists = lists_of(stages, microbatches, 3)
    counts = [microbatches] * 3
    validate(lists, schedule=ZERO_BUBBLE_H1, pipeline=pipeline, microbatches=counts)


@pytest.mark.parametrize(("stages", "microbatches"), [(2, 4), (4, 8), (8, 16)])
@pytest.mark.parametrize("forward", [1.0, 1.25])
def test_bubble_and_memory_are_those_of_the_paper(
    stages: int, microbatches: int, forward: float
) -> None:
    lists = lists_of(stages, microbatches)
    run = simulate(lists, Costs(forward=forward, backward=2.0))
    bubble = (stages - 1) * (forward + 1.0 - 1.0)
    assert run.iteration_time == pytest.approx(microbatches * (forward + 2.0) + bubble)
    assert [peak_in_flight(actions) for actions in lists] == [stages] * stages


def test_weights_gradients_are_needed() -> None:
    pipeline = Pipeline(stages=2, deferred=False)
    lists = lists_of(2, 3, 1)
    lists[0] = [a for a in lists[0] if a.kind is not Kind.BACKWARD_WEIGHT or a.microbatch != 1]
    with pytest.raises(ScheduleError, match="gradients of 1 microbatches are still to come"):
        validate(lists, schedule=ZERO_BUBBLE_H1, pipeline=pipeline, microbatches=[3])
    lists = lists_of(2, 3, 1)
    first = next(i for i, a in enumerate(lists[1]) if a.kind is Kind.BACKWARD)
    lists[1].insert(first, replace(lists[1][first], kind=Kind.BACKWARD_WEIGHT))
    with pytest.raises(ScheduleError, match="its backward was not run before"):
        validate(lists, schedule=ZERO_BUBBLE_H1, pipeline=pipeline, microbatches=[3])
