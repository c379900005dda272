"""Schedules on a clock: what they take, and that mistakes in them show."""

import random
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from megatron_async.schedules.actions import (
    Action,
    Kind,
    pipedream_2bw_lists,
    synchronous_lists,
)
from megatron_async.schedules.simulator import Costs, DeadlockError, Simulation, simulate

CALLS = 12
# Slots whose stage boundaries coincide, and slots whose boundaries do not; milliseconds.
SLOTS = [(60.0, 120.0), (80.0, 100.0)]
LAYOUTS = [(2, 1), (2, 2), (4, 3), (4, 4), (4, 8), (8, 7), (8, 8)]


def two_version(stages: int, microbatches: int, costs: Costs, **options: Any) -> Simulation:
    switches = {
        name: options.pop(name) for name in ("rendezvous", "wait_at_launch") if name in options
    }
    lists = pipedream_2bw_lists(
        stages=stages, microbatches=[microbatches] * CALLS, **{"deferred": True, **options}
    )
    return simulate(lists, costs, **switches)


def synchronous(stages: int, microbatches: int, costs: Costs, chunks: int = 1) -> Simulation:
    lists = synchronous_lists(stages=stages, microbatches=[microbatches] * CALLS, chunks=chunks)
    return simulate(lists, costs)


@pytest.mark.parametrize(("stages", "microbatches"), LAYOUTS)
@pytest.mark.parametrize(("forward", "backward"), SLOTS)
@pytest.mark.parametrize("optimizer", [0.0, 36.0])
@pytest.mark.parametrize("rendezvous", [False, True])
def test_deferred_update_leaves_no_idle_time(
    stages: int,
    microbatches: int,
    forward: float,
    backward: float,
    optimizer: float,
    rendezvous: bool,
) -> None:
    costs = Costs(forward=forward, backward=backward, optimizer=optimizer)
    run = two_version(stages, microbatches, costs, rendezvous=rendezvous)
    assert run.iteration_time == pytest.approx(microbatches * (forward + backward) + optimizer)
    assert run.ratio_to_ideal == pytest.approx(1.0)
    assert run.idle_shares == pytest.approx([0.0] * stages, abs=1e-9)


def test_any_times_leave_no_idle_time() -> None:
    rng = random.Random(1)
    for _ in range(60):
        stages = rng.randint(1, 8)
        microbatches = rng.randint(max(stages - 1, 1), 12)
        costs = Costs(
            forward=rng.uniform(1, 100),
            backward=rng.uniform(1, 100),
            optimizer=rng.choice([0.0, rng.uniform(0, 100)]),
        )
        run = two_version(stages, microbatches, costs, rendezvous=rng.random() < 0.5)
        assert run.ratio_to_ideal == pytest.approx(1.0), (stages, microbatches, costs)


@pytest.mark.parametrize(("stages", "microbatches"), [(1, 2), (2, 2), (4, 4), (4, 11), (8, 9)])
@pytest.mark.parametrize("gather_ahead", [False, True])
@pytest.mark.parametrize("reduce_late", [False, True])
def test_moving_the_update_where_there_is_room_leaves_no_idle_time(
    stages: int, microbatches: int, gather_ahead: bool, reduce_late: bool
) -> None:
    for forward, backward in SLOTS:
        costs = Costs(forward=forward, backward=backward, optimizer=36)
        for rendezvous in (False, True):
            run = two_version(
                stages,
                microbatches,
                costs,
                gather_ahead=gather_ahead,
                reduce_late=reduce_late,
                rendezvous=rendezvous,
            )
            assert run.ratio_to_ideal == pytest.approx(1.0)


def test_unequal_stages_are_bounded_by_the_slowest() -> None:
    rng = random.Random(2)
    for _ in range(40):
        stages = rng.randint(2, 6)
        microbatches = rng.randint(stages - 1, 10)

        def times(low: float, stages: int = stages) -> list[float]:
            return [rng.uniform(low, 100) for _ in range(stages)]

        costs = Costs(forward=times(1), backward=times(1), optimizer=times(0))
        deferred = two_version(stages, microbatches, costs)
        assert deferred.ratio_to_ideal >= 1.0 - 1e-9
        undeferred = two_version(stages, microbatches, costs, deferred=False)
        assert undeferred.iteration_time >= deferred.iteration_time - 1e-6
        for stage, idle in enumerate(deferred.idle_shares):
            forward, backward, optimizer = costs.per_stage(stages)[stage]
            work = microbatches * (forward + backward) + optimizer
            assert 1.0 - idle == pytest.approx(work / deferred.iteration_time, rel=0.05)


@pytest.mark.parametrize(("stages", "microbatches"), LAYOUTS)
@pytest.mark.parametrize(("forward", "backward"), SLOTS)
def test_1f1b_takes_m_plus_p_minus_1_slots(
    stages: int, microbatches: int, forward: float, backward: float
) -> None:
    run = synchronous(stages, microbatches, Costs(forward=forward, backward=backward, optimizer=36))
    slots = microbatches + stages - 1
    assert run.iteration_time == pytest.approx(slots * (forward + backward) + 36)
    busy = (microbatches * (forward + backward) + 36) / run.iteration_time
    assert run.idle_shares == pytest.approx([1 - busy] * stages)


def test_known_figures() -> None:
    """p = 4, m = 4, 60 + 120 ms: measured with sleeping stages at 1290, 1120 and 720 ms, printing
    and processes' overhead included."""
    costs = Costs(forward=60, backward=120)
    assert synchronous(4, 4, costs).iteration_time == pytest.approx(1260)
    assert two_version(4, 4, costs, deferred=False).iteration_time == pytest.approx(1080)
    assert two_version(4, 4, costs).iteration_time == pytest.approx(720)


@pytest.mark.parametrize(("stages", "microbatches", "chunks"), [(2, 2, 2), (4, 4, 2), (4, 8, 4)])
def test_interleaving_divides_the_bubble_by_the_chunks(
    stages: int, microbatches: int, chunks: int
) -> None:
    run = synchronous(stages, microbatches, Costs(forward=60, backward=120), chunks)
    slots = microbatches + (stages - 1) / chunks
    assert run.iteration_time == pytest.approx(180 * slots)
    assert run.ideal_time == pytest.approx(180 * microbatches)


@pytest.mark.parametrize(("stages", "microbatches"), [(2, 2), (4, 3), (4, 4), (8, 7), (8, 8)])
@pytest.mark.parametrize(("forward", "backward"), SLOTS)
@pytest.mark.parametrize("rendezvous", [False, True])
def test_completion_after_the_receive_is_caught(
    stages: int, microbatches: int, forward: float, backward: float, rendezvous: bool
) -> None:
    """The stages' optimizer steps then wait for each other along the forward chain: each iteration
    takes one step for every stage (but stage 0 where it completes in its own call)."""
    costs = Costs(forward=forward, backward=backward, optimizer=(forward + backward) / 5)
    run = two_version(
        stages, microbatches, costs, complete_after_receive=True, rendezvous=rendezvous
    )
    assert run.ratio_to_ideal > 1.05
    steps = stages - (microbatches == stages - 1)
    expected = microbatches * (forward + backward) + steps * (forward + backward) / 5
    assert run.iteration_time == pytest.approx(expected)


@pytest.mark.parametrize(("stages", "microbatches"), LAYOUTS)
@pytest.mark.parametrize("optimizer", [0.0, 36.0])
@pytest.mark.parametrize("rendezvous", [False, True])
def test_waiting_for_the_total_at_launch_is_caught(
    stages: int, microbatches: int, optimizer: float, rendezvous: bool
) -> None:
    costs = Costs(forward=80, backward=100, optimizer=optimizer)
    run = two_version(stages, microbatches, costs, wait_at_launch=True, rendezvous=rendezvous)
    assert run.ratio_to_ideal > 1.15
    # Which is what the undeferred step costs: the batch ends on stage 0 before the next one starts.
    undeferred = two_version(stages, microbatches, costs, deferred=False, rendezvous=rendezvous)
    assert run.iteration_time == pytest.approx(undeferred.iteration_time)


def test_waiting_at_launch_hides_only_where_there_is_no_pipeline() -> None:
    costs = Costs(forward=80, backward=100, optimizer=36)
    assert two_version(1, 4, costs, wait_at_launch=True).ratio_to_ideal == pytest.approx(1.0)


def test_latency_costs_a_little() -> None:
    slow = Costs(forward=60, backward=120, optimizer=36, latency=1.0)
    for rendezvous in (False, True):
        run = two_version(4, 4, slow, rendezvous=rendezvous)
        assert 756 < run.iteration_time < 756 + 2 * 8
        assert min(run.idle_shares) > 0


def test_changing_microbatch_counts() -> None:
    counts = [4, 4, 4, 4, 4, 6, 8, 8, 8, 8, 8, 8]
    lists = pipedream_2bw_lists(stages=4, microbatches=counts, deferred=True)
    run = simulate(lists, Costs(forward=60, backward=120, optimizer=36))
    assert run.window == (4, 10)
    assert run.ideal_time == pytest.approx((6 + 5 * 8) / 6 * 180 + 36)
    assert run.ratio_to_ideal == pytest.approx(1.0)


def test_events_are_in_order_and_add_up() -> None:
    run = two_version(4, 4, Costs(forward=60, backward=120, optimizer=36), deferred=False)
    for events in run.events:
        for event, following in pairwise(events):
            assert event.reached <= event.started <= event.stopped <= event.ended
            assert event.ended == following.reached
            assert event.busy + event.waited == pytest.approx(event.ended - event.reached)
    assert run.makespan == max(event.ended for events in run.events for event in events)
    # Megatron's step: nobody leaves it before all have made it.
    ends = {
        event.ended
        for events in run.events
        for event in events
        if event.action.kind is Kind.UPDATE and event.action.batch == 3
    }
    assert len(ends) == 1


def broken(lists: list[list[Action]], stage: int, kind: Kind) -> list[list[Action]]:
    """Without the first action of that kind."""
    at = next(i for i, action in enumerate(lists[stage]) if action.kind is kind)
    return [a[:at] + a[at + 1 :] if s == stage else a for s, a in enumerate(lists)]


@pytest.mark.parametrize("kind", [Kind.SEND_FORWARD_RECV_BACKWARD, Kind.SEND_FORWARD])
def test_a_tensor_never_sent_is_a_deadlock(kind: Kind) -> None:
    lists = pipedream_2bw_lists(stages=3, microbatches=[3] * 4, deferred=True)
    with pytest.raises(
        DeadlockError, match=r"stage 0 in send_f.*; stage 1 in .*recv_forward\(batch 0"
    ):
        simulate(broken(lists, 0, kind), Costs(forward=1, backward=2))


def test_an_update_never_launched_is_a_deadlock() -> None:
    lists = pipedream_2bw_lists(stages=3, microbatches=[3] * 4, deferred=True)
    with pytest.raises(DeadlockError, match=r"stage 0 in launch_update\(batch 0, .*; stage 1 in"):
        simulate(broken(lists, 2, Kind.LAUNCH_UPDATE), Costs(forward=1, backward=2))


def test_two_sends_that_face_each_other_deadlock_only_with_rendezvous() -> None:
    """Sends buffered by the transport hide a crossed order; a rendezvous does not."""

    def split(action: Action) -> list[Action]:
        plain = {"recv_batch": -1, "recv_microbatch": -1, "recv_chunk": -1}
        received = {"batch": action.recv_batch, "microbatch": action.recv_microbatch, **plain}
        halves = {
            Kind.SEND_FORWARD_RECV_BACKWARD: (Kind.SEND_FORWARD, Kind.RECV_BACKWARD),
            Kind.SEND_BACKWARD_RECV_FORWARD: (Kind.SEND_BACKWARD, Kind.RECV_FORWARD),
        }.get(action.kind)
        if halves is None:
            return [action]
        return [
            replace(action, kind=halves[0], **plain),
            replace(action, kind=halves[1], **received),
        ]

    lists = pipedream_2bw_lists(stages=2, microbatches=[2] * 4, deferred=True)
    apart = [[half for action in actions for half in split(action)] for actions in lists]
    costs = Costs(forward=1, backward=2)
    assert simulate(apart, costs).ratio_to_ideal == pytest.approx(1.0)
    with pytest.raises(DeadlockError, match=r"stage 0 in send_forward.*stage 1 in send_backward"):
        simulate(apart, costs, rendezvous=True)


def test_what_cannot_be_simulated_is_refused() -> None:
    lists = pipedream_2bw_lists(stages=2, microbatches=[2] * 3, deferred=True)
    with pytest.raises(ValueError, match="forward has 3 times for 2 stages"):
        simulate(lists, Costs(forward=[1, 2, 3], backward=1))
    with pytest.raises(ValueError, match="must not be negative"):
        simulate(lists, Costs(forward=1, backward=-1))
    with pytest.raises(ValueError, match="at least 4 iterations, got 3"):
        simulate(lists, Costs(forward=1, backward=1)).iteration_time  # noqa: B018
    interleaved = synchronous_lists(stages=2, microbatches=[2] * 3, chunks=2)
    with pytest.raises(ValueError, match="send asynchronously"):
        simulate(interleaved, Costs(forward=1, backward=1), rendezvous=True)
