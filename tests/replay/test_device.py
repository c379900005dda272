"""The model of the device: each of its rules, and whole schedules against the list simulator."""

from collections.abc import Callable
from typing import Any

import pytest

from megatron_async.replay.commands import Command, Kind
from megatron_async.replay.device import Device, DeviceDeadlock, run
from megatron_async.replay.nccl import MismatchError
from megatron_async.replay.steady import steady_state
from megatron_async.replay.trace import (
    Begin,
    Communication,
    End,
    Item,
    Iteration,
    RecordEvent,
    Synchronize,
    Trace,
    Wait,
    WaitEvent,
)
from megatron_async.schedules import SCHEDULES
from megatron_async.schedules.schedule import Pipeline, action_lists
from megatron_async.schedules.simulator import Costs, simulate
from tests.support.traces import (
    by_lists,
    collective,
    drop,
    exchange_on_host,
    exchange_on_one_communicator,
    kernel,
    message,
    swap,
    trace,
    traces,
)

NOTHING = Costs(forward=0.0, backward=0.0)
ONE = Costs(forward=1.0, backward=2.0)


def computing(*items: Item, action: str = "forward") -> list[Item]:
    """Items whose kernels on stream 0 share the time of an action."""
    return [Begin(action=action, batch=0, microbatch=0), *items, End()]


def commands(device: Device, name: str, rank: int = 0) -> list[Command]:
    """The kernels of a name, or the collectives with such an operation."""

    def named(item: Any) -> bool:
        if isinstance(item, Communication):
            return item.operations[0].name == name
        return getattr(item, "name", "") == name

    return [
        command
        for command in device.ranks[rank].commands
        if command.kind in (Kind.KERNEL, Kind.COLLECTIVE) and named(command.item)
    ]


def only(device: Device, name: str, rank: int = 0) -> Command:
    (found,) = commands(device, name, rank)
    return found


# ------------------------------------------------------------------------------------- queues


def test_a_time_is_spread_over_the_kernels_of_its_action() -> None:
    device = run(
        [
            trace(
                *computing(kernel("f"), kernel("side", stream=1), kernel("f")),
                *computing(kernel("b"), action="backward"),
                kernel("outside"),
                *computing(kernel("step"), action="complete_update"),
            )
        ],
        Costs(forward=1.0, backward=2.0, optimizer=0.5),
    )
    assert [(c.start, c.end) for c in commands(device, "f")] == [(0, 0.5), (0.5, 1)]
    assert only(device, "side").duration == 0
    assert (only(device, "b").start, only(device, "b").end) == (1, 3)
    assert only(device, "outside").end == 3
    assert only(device, "step").end == 3.5


@pytest.mark.parametrize(("connections", "start"), [(1, 1.0), (2, 0.0)])
def test_a_head_that_cannot_start_holds_up_what_is_behind_it(
    connections: int, start: float
) -> None:
    items = [*computing(kernel("f")), kernel("same stream"), kernel("other stream", stream=1)]
    device = run([trace(*items)], ONE, connections=connections)
    assert only(device, "same stream").start == 1
    assert only(device, "other stream").start == start


@pytest.mark.parametrize(("connections", "start"), [(1, 1.0), (3, 0.0)])
def test_a_wait_for_an_event_holds_up_its_queue(connections: int, start: float) -> None:
    items = [
        *computing(kernel("f")),
        RecordEvent(event=1),
        WaitEvent(event=1, stream=1),
        kernel("behind", stream=1),
        kernel("other", stream=2),
    ]
    device = run([trace(*items)], ONE, connections=connections)
    assert only(device, "behind").start == 1
    assert only(device, "other").start == start


def test_what_runs_and_what_is_recorded_hold_nobody_up() -> None:
    items = [*computing(kernel("f")), RecordEvent(event=1), kernel("other", stream=1)]
    assert only(run([trace(*items)], ONE, connections=1), "other").start == 0


def test_streams_share_queues_in_turn() -> None:
    items = [
        *computing(kernel("f")),
        kernel("first"),
        *(kernel(f"stream {n}", stream=n) for n in (1, 2)),
    ]
    device = run([trace(*items)], ONE, connections=2)
    assert only(device, "stream 1").start == 0
    assert only(device, "stream 2").start == 1  # behind stream 0's
    device = run([trace(*items, streams=("0", "2", "1"))], ONE, connections=2)
    assert only(device, "stream 2").start == 0
    assert only(device, "stream 1").start == 1


def test_events_happen_anew_with_each_recording() -> None:
    items = [
        RecordEvent(event=1),
        *computing(kernel("f")),
        WaitEvent(event=1, stream=1),
        kernel("other", stream=1),
    ]
    assert only(run([trace(*items)], ONE), "other").start == 0


# --------------------------------------------------------------------------------------- host


def test_the_host_waits_where_it_synchronises() -> None:
    for synchronise in (
        Synchronize(why="item", stream=0),
        Synchronize(why="device"),
        Synchronize(why="event", event=1),
    ):
        items = [*computing(kernel("f")), RecordEvent(event=1), synchronise, kernel(stream=1)]
        device = run([trace(*items)], ONE)
        assert only(device, "kernel").enqueued == 1
    items = [*computing(kernel("f")), Synchronize(why="stream", stream=1), kernel(stream=1)]
    assert only(run([trace(*items)], ONE), "kernel").enqueued == 0


def test_the_host_is_only_so_many_kernels_ahead() -> None:
    items = [item for _ in range(4) for item in computing(kernel("f"))]
    device = run([trace(*items)], ONE, run_ahead=2)
    # Of two in flight one has started, and makes room.
    assert [command.enqueued for command in commands(device, "f")] == [0, 0, 0, 1]


def test_launches_take_time() -> None:
    items = computing(*(kernel("f") for _ in range(4)))
    device = run([trace(*items)], NOTHING, launch=0.5)
    assert [command.start for command in commands(device, "f")] == [0.5, 1, 1.5, 2]


def test_gloo_blocks_the_host_until_the_other_one_has_come() -> None:
    late = [*computing(kernel("f")), Synchronize(why="item", stream=0)]
    ranks = (0, 1)
    device = run(
        traces(
            [
                *late,
                message(ranks, work=0, send=[1], on_host=True),
                kernel("goes on"),
                Wait(work=0),
            ],
            [message(ranks, work=0, recv=[0], on_host=True), Wait(work=0), kernel("received")],
        ),
        Costs(forward=1.0, backward=2.0, latency=0.25),
    )
    assert only(device, "received", 1).enqueued == 1.25
    assert only(device, "goes on").enqueued == 1
    # Nobody's device takes part.
    assert not commands(device, "send")


# --------------------------------------------------------------------------------------- NCCL


def late(rank: int) -> list[Item]:
    """Rank r comes r milliseconds late."""
    return [item for _ in range(rank) for item in computing(kernel("f"))]


def ends(name: str, delays: tuple[int, ...], *, root: int = -1, latency: float = 0.0) -> list[Any]:
    """When the kernels of one collective end, on ranks that come so much late."""
    ranks = range(len(delays))
    device = run(
        traces(*([*late(delay), collective(name, ranks, work=0, root=root)] for delay in delays)),
        Costs(forward=1.0, backward=2.0, latency=latency),
    )
    return [only(device, name, rank).end for rank in ranks]


@pytest.mark.parametrize("name", ["all_reduce", "all_gather", "reduce_scatter", "all_to_all"])
def test_most_collectives_wait_for_everyone(name: str) -> None:
    assert ends(name, (0, 2, 1)) == [2, 2, 2]
    assert ends(name, (0, 2, 1), latency=0.5) == [2.5, 2.5, 2.5]


def test_a_reduce_is_a_chain_that_begins_behind_the_root() -> None:
    assert ends("reduce", (0, 3, 2, 1), root=0) == [3, 3, 3, 3]
    assert ends("reduce", (0, 1, 2, 3), root=0) == [3, 1, 2, 3]
    assert ends("reduce", (4, 1, 2, 3), root=0) == [4, 1, 2, 3]  # nobody needs the root
    assert ends("reduce", (0, 1, 2, 3), root=1) == [3, 3, 2, 3]
    assert ends("reduce", (0, 0, 0, 0), root=0, latency=1.0) == [4, 1, 2, 3]


def test_a_broadcast_is_a_chain_from_the_root_on() -> None:
    assert ends("broadcast", (3, 0, 1, 2), root=0) == [3, 3, 3, 3]
    assert ends("broadcast", (0, 1, 2, 3), root=0) == [0, 1, 2, 3]
    assert ends("broadcast", (0, 2, 1, 0), root=1) == [2, 2, 2, 2]
    assert ends("broadcast", (0, 0, 0, 0), root=0, latency=1.0) == [1, 2, 3, 4]


def test_a_message_needs_both_sides_and_a_batch_its_last_one() -> None:
    ranks = range(3)
    device = run(
        traces(
            [message(ranks, work=0, send=[1]), message(ranks, work=1, recv=[1])],
            [*late(1), message(ranks, work=0, send=[0, 2], recv=[0])],
            [*late(3), message(ranks, work=0, recv=[1])],
        ),
        ONE,
    )
    assert only(device, "send").end == 1
    # The batch is one kernel, but its messages arrive when both sides have come.
    assert only(device, "recv").end == 1
    assert only(device, "send", 1).end == 3


def test_messages_between_two_ranks_are_matched_in_order() -> None:
    device = run(
        traces(
            [message((0, 1), work=0, send=[1]), *late(1), message((0, 1), work=1, send=[1])],
            [message((0, 1), work=0, recv=[0]), message((0, 1), work=1, recv=[0])],
        ),
        ONE,
    )
    assert [command.end for command in commands(device, "recv", 1)] == [0, 1]


def test_a_communicator_has_a_stream_that_waits_for_the_current_one_and_is_waited_for() -> None:
    ours = [
        *computing(kernel("f")),
        collective("all_reduce", (0, 1), work=0),
        kernel("beside"),
        Wait(work=0),
        kernel("behind"),
    ]
    device = run(traces(ours, [*late(2), collective("all_reduce", (0, 1), work=0)]), ONE)
    assert only(device, "all_reduce").start == 1
    assert only(device, "all_reduce").spun == 1
    assert only(device, "beside").start == 1
    assert only(device, "behind").start == 2


def test_a_synchronous_collective_runs_on_the_current_stream() -> None:
    ours: list[Item] = [
        collective("all_reduce", (0, 1), work=0, asynchronous=False),
        kernel("behind"),
    ]
    device = run(traces(ours, [*late(2), collective("all_reduce", (0, 1), work=0)]), ONE)
    assert only(device, "all_reduce").stream == "0"
    assert only(device, "behind").start == 2


def test_kernels_of_one_communicator_run_one_after_the_other_whatever_their_streams() -> None:
    def both(first: list[Item], second: list[Item]) -> list[Item]:
        return [
            *first,
            collective("all_reduce", (0, 1), work=0),
            *second,
            collective("broadcast", (0, 1), work=1, root=0, asynchronous=False),
        ]

    device = run(traces(both([], []), both(late(2), [])), ONE)
    assert only(device, "broadcast").start == 2


def test_unbatched_messages_run_on_a_communicator_of_the_two_ranks() -> None:
    ranks = (0, 1, 2)
    device = run(
        traces(
            [message(ranks, work=n, recv=[n + 1], batched=False) for n in range(2)],
            [*late(2), message(ranks, work=0, send=[0], batched=False)],
            [message(ranks, work=0, send=[0], batched=False)],
        ),
        ONE,
        connections=8,
    )
    assert [command.end for command in commands(device, "recv")] == [2, 0]


def test_reductions_and_gathers_share_their_time_by_bytes() -> None:
    group = "DATA_PARALLEL_GROUP_WITH_CP"
    items: list[Item] = [
        Iteration(number=0),
        collective("reduce_scatter", (0, 1), work=0, label=group, writes=[(0, 0, 30)]),
        collective("reduce_scatter", (0, 1), work=1, label=group, writes=[(0, 0, 10)]),
        collective("all_gather", (0, 1), work=2, label=group, writes=[(0, 0, 10)]),
        collective("all_reduce", (0, 1), work=3, label="EMBEDDING_GROUP", writes=[(0, 0, 10)]),
    ]
    costs = Costs(forward=1.0, backward=2.0, reduction=4.0, gather=5.0)
    device = run(traces(items, items, stages=1, stage=0), costs)
    assert [c.duration for c in commands(device, "reduce_scatter")] == [3, 1]
    assert only(device, "all_gather").duration == 5
    assert only(device, "all_reduce").duration == 0


# ---------------------------------------------------------------------------------- deadlocks


def crossed(*order: str) -> list[Item]:
    return [collective("all_reduce", (0, 1), work=n, group=group) for n, group in enumerate(order)]


def test_communicators_in_different_orders_deadlock_only_where_one_waits_for_the_other() -> None:
    # Both are issued; with one stream (the current one) the second is held up.
    run(traces(crossed("a", "b"), crossed("b", "a")), ONE, connections=1)
    one_stream = [
        [
            collective("all_reduce", (0, 1), work=n, group=group, asynchronous=False)
            for n, group in enumerate(order)
        ]
        for order in ("ab", "ba")
    ]
    with pytest.raises(DeviceDeadlock) as caught:
        run(traces(*one_stream), ONE, connections=32)
    text = str(caught.value)
    assert "rank 0 (stage 0)" in text
    assert "all_reduce (outside of actions) spins for rank 1" in text
    assert "the circle:" in text


def test_a_host_that_waits_for_a_message_nobody_sends_is_named() -> None:
    with pytest.raises(DeviceDeadlock, match="the host waits for recv of gloo"):
        run(
            traces([message((0, 1), work=0, recv=[1], on_host=True), Wait(work=0)], [kernel()]),
            ONE,
        )
    with pytest.raises(DeviceDeadlock, match=r"the host waits \(item\): kernel .* not been issued"):
        run(
            traces(
                [
                    collective("all_reduce", (0, 1), work=0),
                    Wait(work=0),
                    kernel(),
                    Synchronize(why="item", stream=0),
                ],
                [kernel()],
            ),
            ONE,
        )


# ---------------------------------------------------------------------------- whole schedules


def lists(name: str, stages: int, microbatches: int, calls: int = 8, **settings: Any) -> Any:
    pipeline = Pipeline(stages=stages, deferred=SCHEDULES[name].deferrable, **settings)
    return action_lists(SCHEDULES[name], pipeline, [microbatches] * calls)


def iteration(of: list[Trace], costs: Costs = ONE, connections: int = 1) -> float:
    return steady_state(run(of, costs, connections=connections)).time


@pytest.mark.parametrize("connections", [1, 8, 32])
@pytest.mark.parametrize("name", ["1f1b", "pipedream-2bw", "fresh-2bw"])
@pytest.mark.parametrize(
    "costs",
    [
        ONE,
        Costs(forward=1.0, backward=2.0, optimizer=1.5),
        Costs(forward=[1, 1.2, 1, 1.1], backward=[2, 2.5, 2.2, 2]),
    ],
)
def test_without_collectives_in_between_the_replay_is_the_list_simulation(
    name: str, costs: Costs, connections: int
) -> None:
    actions = lists(name, 4, 8)
    expected = simulate(actions, costs, rendezvous=True)
    state = steady_state(run(by_lists(actions), costs, connections=connections))
    assert state.time == pytest.approx(expected.iteration_time)
    assert state.ideal == pytest.approx(expected.ideal_time)


def test_messages_take_the_time_that_they_take_in_the_list_simulation() -> None:
    actions = lists("pipedream-2bw", 4, 8)
    costs = Costs(forward=1.0, backward=2.0, optimizer=1.5, latency=0.05)
    expected = simulate(actions, costs, rendezvous=True).iteration_time
    assert expected > 25.6
    assert iteration(by_lists(actions), costs) == pytest.approx(expected)


@pytest.mark.parametrize(("stages", "microbatches", "time"), [(4, 8, 28), (8, 32, 108)])
def test_a_reduce_and_a_broadcast_on_one_communicator_hold_one_queue_up(
    stages: int, microbatches: int, time: float
) -> None:
    actions = lists("pipedream-2bw", stages, microbatches, calls=6)
    ideal = 3.0 * microbatches
    on_device = by_lists(actions, exchange_on_one_communicator)
    state = steady_state(run(on_device, ONE, connections=1))
    assert state.time == pytest.approx(time)
    assert state.ideal == ideal
    held = max(state.causes, key=lambda cause: (cause.time, cause.stage))
    assert held.text == (
        "queued behind broadcast (launch_update): reduce (launch_update) waits for stage 1, there "
        "in launch_update"
    )
    assert held.stage == stages - 1
    assert iteration(on_device, connections=32) == pytest.approx(ideal)
    assert iteration(by_lists(actions, exchange_on_host)) == pytest.approx(ideal)


@pytest.mark.parametrize("stages", [2, 3, 4])
def test_a_launch_ahead_of_the_send_deadlocks_with_one_queue(stages: int) -> None:
    actions = lists("pipedream-2bw", stages, 8, reduce_late=True)
    launch_first = by_lists(actions, exchange_on_one_communicator, launch_first=True)
    send_first = by_lists(actions, exchange_on_one_communicator)
    if stages == 2:  # The reduce of the only other stage waits for nobody.
        assert iteration(launch_first) == pytest.approx(24)
    else:
        with pytest.raises(DeviceDeadlock, match=r"broadcast \(launch_update of batch 0\) waits"):
            run(launch_first, ONE, connections=1)
    assert iteration(launch_first, connections=32) == pytest.approx(24)
    assert iteration(send_first) >= 24
    assert iteration(by_lists(actions, exchange_on_host)) == pytest.approx(24)


def gathering(buckets: int, *, behind: bool) -> list[Trace]:
    """Two replicas compute four microbatches an iteration and gather under them: all buckets at
    once, or each behind the microbatch under which the one before it ran."""

    def gather(number: int) -> list[Item]:
        return [
            collective(
                "all_gather",
                (0, 1),
                work=number,
                label="DATA_PARALLEL_GROUP",
                writes=[(0, 0, 10)],
            )
        ]

    items: list[Item] = []
    for batch in range(6):
        items.append(Iteration(number=batch))
        for microbatch in range(4):
            bucket = microbatch if behind else 0
            if microbatch < (buckets if behind else 1):
                for each in range(1 if behind else buckets):
                    items += gather(4 * batch + bucket + each)
            for action in ("forward", "backward"):
                items += [
                    Begin(action=action, batch=batch, microbatch=microbatch),
                    kernel(),
                    kernel(),
                    End(),
                ]
        items += [Wait(work=4 * batch + bucket) for bucket in range(buckets)]
    return traces(items, items, stage=0, stages=1)


def test_gathers_that_are_enqueued_at_once_do_not_overlap_with_one_queue() -> None:
    costs = Costs(forward=1.0, backward=2.0, gather=3.0)
    at_once, one_by_one = (gathering(3, behind=behind) for behind in (False, True))
    state = steady_state(run(at_once, costs, connections=1))
    assert state.time == pytest.approx(12 + 2)  # all but the last bucket's
    assert state.causes[0].text.startswith("queued behind all_gather")
    assert iteration(at_once, costs, connections=32) == pytest.approx(12)
    assert iteration(one_by_one, costs) == pytest.approx(12)
    assert iteration(gathering(1, behind=False), costs) == pytest.approx(12)


def test_a_steady_state_needs_iterations() -> None:
    with pytest.raises(ValueError, match="more than 3 iterations"):
        steady_state(run(by_lists(lists("pipedream-2bw", 2, 4, calls=3)), ONE))


def test_a_missing_receive_is_a_deadlock() -> None:
    of = by_lists(lists("pipedream-2bw", 2, 4))
    of[1] = drop(of[1], lambda item: isinstance(item, Communication), only=7)
    with pytest.raises(DeviceDeadlock):
        run(of, ONE)


def test_different_operations_on_one_communicator_are_named() -> None:
    of = by_lists(lists("pipedream-2bw", 3, 4), exchange_on_one_communicator)

    def is_first(name: str) -> Callable[[Item], bool]:
        return lambda item: isinstance(item, Communication) and item.operations[0].name == name

    of[2] = swap(of[2], is_first("reduce"), is_first("broadcast"))
    with pytest.raises(MismatchError, match="on communicator x of ranks 0, 1, 2, another rank"):
        run(of, ONE)


def test_numbers_are_checked() -> None:
    for wrong in ({"connections": 0}, {"run_ahead": 0}, {"launch": -1.0}):
        with pytest.raises(ValueError, match="1 or more"):
            run([trace(kernel())], ONE, **wrong)
