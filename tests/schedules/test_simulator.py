"""Schedules on a clock: what they take, and that mistakes in them show."""

import random
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from megatron_async.schedules.actions import Action, Kind
from megatron_async.schedules.interleaved import INTERLEAVED
from megatron_async.schedules.schedule import Pipeline, action_lists
from megatron_async.schedules.simulator import Costs, DeadlockError, Simulation, simulate
from tests.schedules.lists import Lists, find, one_f_one_b, two_version

CALLS = 12
# Slots whose stage boundaries coincide, and slots whose boundaries do not; milliseconds.
SLOTS = [(60.0, 120.0), (80.0, 100.0)]
LAYOUTS = [(2, 1), (2, 2), (4, 3), (4, 4), (4, 8), (8, 7), (8, 8)]


def asynchronous(
    stages: int,
    microbatches: int,
    costs: Costs,
    *,
    rendezvous: bool = False,
    change: Callable[[Lists], None] | None = None,
    **options: Any,
) -> Simulation:
    """PipeDream-2BW on the clock.

    Args:
        change: of its lists.
        options: of the :class:`Pipeline`.
    """
    lists = two_version(stages, [microbatches] * CALLS, **options)
    if change is not None:
        change(lists)
    return simulate(lists, costs, rendezvous=rendezvous)


def synchronous(stages: int, microbatches: int, costs: Costs, chunks: int = 1) -> Simulation:
    counts = [microbatches] * CALLS
    pipeline = Pipeline(stages=stages, deferred=False, chunks=chunks)
    lists = (
        one_f_one_b(stages, counts) if chunks == 1 else action_lists(INTERLEAVED, pipeline, counts)
    )
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
    run = asynchronous(stages, microbatches, costs, rendezvous=rendezvous)
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
        run = asynchronous(stages, microbatches, costs, rendezvous=rng.random() < 0.5)
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
            run = asynchronous(
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
        deferred = asynchronous(stages, microbatches, costs)
        assert deferred.ratio_to_ideal >= 1.0 - 1e-9
        undeferred = asynchronous(stages, microbatches, costs, deferred=False)
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
    assert asynchronous(4, 4, costs, deferred=False).iteration_time == pytest.approx(1080)
    assert asynchronous(4, 4, costs).iteration_time == pytest.approx(720)


@pytest.mark.parametrize(("stages", "microbatches", "chunks"), [(2, 2, 2), (4, 4, 2), (4, 8, 4)])
def test_interleaving_divides_the_bubble_by_the_chunks(
    stages: int, microbatches: int, chunks: int
) -> None:
    run = synchronous(stages, microbatches, Costs(forward=60, backward=120), chunks)
    slots = microbatches + (stages - 1) / chunks
    assert run.iteration_time == pytest.approx(180 * slots)
    assert run.ideal_time == pytest.approx(180 * microbatches)


def complete_after_the_receive(lists: Lists) -> None:
    """Complete each update "before the first forward": behind the receive that comes before it."""
    for actions in lists:
        for i, (action, following) in enumerate(pairwise(list(actions))):
            if (
                action.kind is Kind.COMPLETE_UPDATE
                and following.kind is Kind.SEND_BACKWARD_RECV_FORWARD
            ):
                actions[i], actions[i + 1] = following, action


@pytest.mark.parametrize(("stages", "microbatches"), [(2, 2), (4, 3), (4, 4), (8, 7), (8, 8)])
@pytest.mark.parametrize(("forward", "backward"), SLOTS)
@pytest.mark.parametrize("rendezvous", [False, True])
def test_completion_after_the_receive_is_caught(
    stages: int, microbatches: int, forward: float, backward: float, rendezvous: bool
) -> None:
    """The stages' optimizer steps then wait for each other along the forward chain: each iteration
    takes one step for every stage (but stage 0 where it completes in its own call)."""
    costs = Costs(forward=forward, backward=backward, optimizer=(forward + backward) / 5)
    run = asynchronous(
        stages, microbatches, costs, change=complete_after_the_receive, rendezvous=rendezvous
    )
    assert run.ratio_to_ideal > 1.05
    steps = stages - (microbatches == stages - 1)
    expected = microbatches * (forward + backward) + steps * (forward + backward) / 5
    assert run.iteration_time == pytest.approx(expected)


def wait_at_the_launch(lists: Lists) -> None:
    """Let every stage wait for the total where it launches, instead of where it needs it."""
    for actions in lists:
        for batch in range(CALLS):
            complete = actions.pop(find(actions, Kind.COMPLETE_UPDATE, batch=batch))
            actions.insert(find(actions, Kind.LAUNCH_UPDATE, batch=batch) + 1, complete)


@pytest.mark.parametrize(("stages", "microbatches"), LAYOUTS)
@pytest.mark.parametrize("optimizer", [0.0, 36.0])
@pytest.mark.parametrize("rendezvous", [False, True])
def test_waiting_for_the_total_at_launch_is_caught(
    stages: int, microbatches: int, optimizer: float, rendezvous: bool
) -> None:
    costs = Costs(forward=80, backward=100, optimizer=optimizer)
    run = asynchronous(
        stages, microbatches, costs, change=wait_at_the_launch, rendezvous=rendezvous
    )
    assert run.ratio_to_ideal > 1.15
    # Which is what the undeferred step costs: the batch ends on stage 0 before the next one starts.
    undeferred = asynchronous(stages, microbatches, costs, deferred=False, rendezvous=rendezvous)
    assert run.iteration_time == pytest.approx(undeferred.iteration_time)


def test_waiting_at_launch_hides_only_where_there_is_no_pipeline() -> None:
    costs = Costs(forward=80, backward=100, optimizer=36)
    assert asynchronous(1, 4, costs, change=wait_at_the_launch).ratio_to_ideal == pytest.approx(1.0)


def test_latency_costs_a_little() -> None:
    slow = Costs(forward=60, backward=120, optimizer=36, latency=1.0)
    for rendezvous in (False, True):
        run = asynchronous(4, 4, slow, rendezvous=rendezvous)
        assert 756 < run.iteration_time < 756 + 2 * 8
        assert min(run.idle_shares) > 0


def test_changing_microbatch_counts() -> None:
    counts = [4, 4, 4, 4, 4, 6, 8, 8, 8, 8, 8, 8]
    lists = two_version(4, counts)
    run = simulate(lists, Costs(forward=60, backward=120, optimizer=36))
    assert run.window == (4, 10)
    assert run.ideal_time == pytest.approx((6 + 5 * 8) / 6 * 180 + 36)
    assert run.ratio_to_ideal == pytest.approx(1.0)


def test_events_are_in_order_and_add_up() -> None:
    run = asynchronous(4, 4, Costs(forward=60, backward=120, optimizer=36), deferred=False)
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
    lists = two_version(3, [3] * 4)
    with pytest.raises(
        DeadlockError, match=r"stage 0 in send_f.*; stage 1 in .*recv_forward\(batch 0"
    ):
        simulate(broken(lists, 0, kind), Costs(forward=1, backward=2))


def test_an_update_never_launched_is_a_deadlock() -> None:
    lists = two_version(3, [3] * 4)
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

    lists = two_version(2, [2] * 4)
    apart = [[half for action in actions for half in split(action)] for actions in lists]
    costs = Costs(forward=1, backward=2)
    assert simulate(apart, costs).ratio_to_ideal == pytest.approx(1.0)
    with pytest.raises(DeadlockError, match=r"stage 0 in send_forward.*stage 1 in send_backward"):
        simulate(apart, costs, rendezvous=True)


def test_what_cannot_be_simulated_is_refused() -> None:
    lists = two_version(2, [2] * 3)
    with pytest.raises(ValueError, match="forward has 3 times for 2 stages"):
        simulate(lists, Costs(forward=[1, 2, 3], backward=1))
    with pytest.raises(ValueError, match="must not be negative"):
        simulate(lists, Costs(forward=1, backward=-1))
    with pytest.raises(ValueError, match="at least 4 iterations, got 3"):
        simulate(lists, Costs(forward=1, backward=1)).iteration_time  # noqa: B018
    interleaved = action_lists(INTERLEAVED, Pipeline(stages=2, deferred=False, chunks=2), [2] * 3)
    with pytest.raises(ValueError, match="send asynchronously"):
        simulate(interleaved, Costs(forward=1, backward=1), rendezvous=True)


# The collectives over the data-parallel replicas


@pytest.mark.parametrize("stages", [2, 4])
def test_a_reduction_at_the_end_of_a_batch_takes_its_time(stages: int) -> None:
    costs = Costs(forward=60, backward=120, optimizer=36, reduction=50)
    run = asynchronous(stages, 8, costs)
    assert run.iteration_time == pytest.approx(8 * 180 + 36 + 50)
    # What the stage that has most to do waits for is no work of its own.
    assert run.ideal_time == pytest.approx(8 * 180 + 36)
    assert run.idle_shares == pytest.approx([50 / run.iteration_time] * stages)
    slots = 8 + stages - 1
    flushed = synchronous(stages, 8, costs)
    assert flushed.iteration_time == pytest.approx(slots * 180 + 36 + 50)


def test_on_one_stage_the_update_of_the_batch_before_runs_under_a_reduction() -> None:
    for reduction, exposed in ((20, 36), (50, 50)):
        costs = Costs(forward=60, backward=120, optimizer=36, reduction=reduction)
        assert asynchronous(1, 8, costs).iteration_time == pytest.approx(8 * 180 + exposed)


@pytest.mark.parametrize("stages", [2, 4])
@pytest.mark.parametrize("rendezvous", [False, True])
def test_a_late_reduction_runs_under_the_next_batchs_first_microbatch(
    stages: int, rendezvous: bool
) -> None:
    """On each stage there is a forward and a backward to hide it under."""
    options: dict[str, Any] = {"reduce_late": True, "rendezvous": rendezvous}
    hidden = Costs(forward=60, backward=120, optimizer=36, reduction=180)
    assert asynchronous(stages, 8, hidden, **options).ratio_to_ideal == pytest.approx(1.0)
    longer = replace(hidden, reduction=200)
    run = asynchronous(stages, 8, longer, **options)
    assert run.iteration_time == pytest.approx(8 * 180 + 36 + 20)


@pytest.mark.parametrize("rendezvous", [False, True])
def test_a_gather_ahead_runs_under_half_of_the_room(rendezvous: bool) -> None:
    # p = 2, m = 6: three microbatches between the update and the first use of what it made.
    options: dict[str, Any] = {"gather_ahead": True, "rendezvous": rendezvous}
    hidden = Costs(forward=60, backward=120, optimizer=36, gather=3 * 180)
    assert asynchronous(2, 6, hidden, **options).ratio_to_ideal == pytest.approx(1.0)
    longer = replace(hidden, gather=3 * 180 + 25)
    run = asynchronous(2, 6, longer, **options)
    assert run.iteration_time == pytest.approx(6 * 180 + 36 + 25)


def test_a_gather_of_a_synchronous_schedule_is_not_hidden() -> None:
    costs = Costs(forward=60, backward=120, optimizer=36, gather=40)
    lists = one_f_one_b(4, [8] * CALLS, gather_ahead=True)
    assert simulate(lists, costs).iteration_time == pytest.approx(11 * 180 + 36 + 40)
    # Megatron's step gathers where nothing is said of a gather: in the time of the optimizer.
    assert simulate(one_f_one_b(4, [8] * CALLS), costs).iteration_time == pytest.approx(
        11 * 180 + 36
    )


def test_a_reduction_can_start_no_sooner_than_the_last_backward_ends() -> None:
    lists = two_version(1, [2] * CALLS)
    run = simulate(lists, Costs(forward=1, backward=2, reduction=5))
    finish = next(e for e in run.events[0] if e.action.kind is Kind.FINISH_REDUCTION)
    assert (finish.reached, finish.ended) == (6, 11)
    start = next(e for e in run.events[0] if e.action.kind is Kind.START_REDUCTION)
    assert start.reached == start.ended == 4


def test_negative_times_of_collectives_are_refused() -> None:
    lists = two_version(1, [2] * CALLS)
    for name in ("reduction", "gather", "latency"):
        with pytest.raises(ValueError, match="must not be negative"):
            simulate(lists, Costs(forward=1, backward=1, **{name: -1}))
