"""Late messages in the simulator: what they cost, and what more microbatches in flight make up."""

import pytest

from megatron_async.schedules.fresh_2bw import FRESH_2BW
from megatron_async.schedules.paci import PACI
from megatron_async.schedules.pipedream_2bw import PIPEDREAM_2BW
from megatron_async.schedules.schedule import Pipeline, Schedule, action_lists, settled_calls
from megatron_async.schedules.simulator import Costs, simulate


def ratio(schedule: Schedule, *, extra: int, microbatches: int, latency: float) -> float:
    pipeline = Pipeline(stages=4, extra_warmup=extra)
    calls = settled_calls(schedule, pipeline, microbatches)
    lists = action_lists(schedule, pipeline, [microbatches] * calls)
    costs = Costs(forward=100, backward=200, optimizer=60, latency=latency)
    return simulate(lists, costs, rendezvous=True).ratio_to_ideal


@pytest.mark.parametrize("schedule", [PIPEDREAM_2BW, FRESH_2BW, PACI], ids=lambda each: each.name)
@pytest.mark.parametrize("microbatches", [6, 12])
def test_twice_the_warmup_hides_a_latency_below_a_forward(
    schedule: Schedule, microbatches: int
) -> None:
    assert ratio(schedule, extra=0, microbatches=microbatches, latency=40) > 1.2
    # The first stage comes to the update last, and waits for no message of its own.
    assert ratio(schedule, extra=3, microbatches=microbatches, latency=40) == pytest.approx(1)
