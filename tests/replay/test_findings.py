"""Faults on GPUs that reading has found, looked for in a recorded run; each is caught if put back.

What one hardware queue makes of the exchange over NCCL, and of a launch ahead of the send, is in
test_device.py.
"""

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

import pytest

from megatron_async.replay.counts import host_waits
from megatron_async.replay.device import run
from megatron_async.replay.races import find_races
from megatron_async.replay.steady import SteadyState, steady_state
from megatron_async.replay.trace import (
    Allocate,
    Begin,
    Communication,
    End,
    Free,
    HandOver,
    Item,
    Iteration,
    Synchronize,
    Task,
    Trace,
    Wait,
)
from megatron_async.schedules.simulator import Costs
from tests.replay.recorded import REPLICAS, STAGES
from tests.support.traces import collective

LIMIT = 1.03
"""Of the ideal time, for what is to cost nothing."""


def state(of: Sequence[Trace], connections: int = 1, **costs: float) -> SteadyState:
    return steady_state(run(of, Costs(forward=1.0, backward=2.0, **costs), connections=connections))


def edited(
    of: Sequence[Trace], change: Callable[[Trace, Item], Sequence[Item] | None]
) -> list[Trace]:
    """Traces with items replaced: None leaves one as it is."""
    found = []
    for trace in of:
        items: list[Item] = []
        for item in trace.items:
            instead = change(trace, item)
            items += [item] if instead is None else instead
        found.append(dataclasses.replace(trace, items=tuple(items)))
    return found


def is_a(item: Item, name: str) -> bool:
    return isinstance(item, Communication) and item.operations[0].name == name


@pytest.mark.parametrize("connections", [1, 8, 32])
def test_nothing_but_messages_between_stages_holds_computation_up(
    recorded: list[Trace], connections: int
) -> None:
    assert state(recorded, connections).ratio <= LIMIT


# ----------------------------------------------------------------------- the exchange of numbers


def in_actions(trace: Trace) -> Iterator[tuple[str, Item]]:
    """Each item with the name of the action that it belongs to, "" between actions."""
    action = ""
    for item in trace.items:
        if isinstance(item, Begin):
            action = item.action
        elif isinstance(item, End):
            action = ""
        else:
            yield action, item


def crossing(of: Sequence[Trace]) -> set[str]:
    """What an update has in flight between stages on the device."""
    found = set()
    for trace in of:
        for action, item in in_actions(trace):
            if (
                isinstance(item, Communication)
                and action in ("launch_update", "complete_update")
                and not item.on_host
                and len({rank // REPLICAS for rank in item.ranks}) > 1
            ):
                found.add(item.operations[0].name)
    return found


def test_an_updates_numbers_travel_on_the_host(recorded: list[Trace]) -> None:
    assert crossing(recorded) == {"all_reduce"}  # the tied embedding's gradient
    for trace in recorded:
        tasks = [item for item in trace.items if isinstance(item, Task)]
        assert len(tasks) >= 4
        for task in tasks:
            assert isinstance(task.items[0], Synchronize)  # the copy to the host is there
            assert all(each.on_host for each in task.items if isinstance(each, Communication))

    def over_nccl(trace: Trace, item: Item) -> list[Item] | None:
        if not isinstance(item, HandOver):
            return None
        column = range(trace.rank % REPLICAS, trace.world, REPLICAS)
        gathered = collective(
            "reduce", column, work=10_000 + item.task, group=f"x{column[0]}", root=column[0]
        )
        return [item, gathered]

    assert crossing(edited(recorded, over_nccl)) == {"all_reduce", "reduce"}


def test_numbers_are_read_when_their_copy_is_there(recorded: list[Trace]) -> None:
    def early(trace: Trace, item: Item) -> list[Item] | None:
        if not isinstance(item, Task):
            return None
        late = tuple(each for each in item.items if not isinstance(each, Synchronize))
        return [dataclasses.replace(item, items=late)]

    for trace in edited(recorded, early):
        assert any("copy to host writes" in str(race) for race in find_races(trace))


def test_the_sums_are_read_when_the_other_thread_has_ended(recorded: list[Trace]) -> None:
    def unawaited(trace: Trace, item: Item) -> list[Item] | None:
        return [] if type(item).__name__ == "Await" else None

    for trace in edited(recorded, unawaited)[REPLICAS:]:  # the first stage adds them up itself
        assert any("Exchange.wait" in str(race) for race in find_races(trace))


# ------------------------------------------------------------------------- kernels that wait


def test_the_tied_gradients_sum_is_the_only_kernel_of_an_update_that_waits(
    recorded: list[Trace],
) -> None:
    def waiting(of: Sequence[Trace]) -> set[tuple[int, str]]:
        return {
            (spin.stage, spin.text)
            for spin in state(of, 32).spins
            if "update" in spin.text or "gather" in spin.text or "reduction" in spin.text
        }

    assert waiting(recorded) == {(STAGES - 1, "all_reduce (launch_update)")}

    def over_nccl(trace: Trace, item: Item) -> list[Item] | None:
        if not isinstance(item, HandOver):
            return None
        column = range(trace.rank % REPLICAS, trace.world, REPLICAS)
        answer = collective(
            "broadcast", column, work=10_000 + item.task, group=f"x{column[0]}", root=column[0]
        )
        return [item, answer]

    assert (STAGES - 1, "broadcast (launch_update)") in waiting(edited(recorded, over_nccl))


# ----------------------------------------------------------------------- data-parallel collectives


def apart(trace: Trace, item: Item) -> list[Item] | None:
    """Each bucket's gather for itself, as Megatron dispatches them."""
    if not is_a(item, "all_gather"):
        return None
    assert isinstance(item, Communication)
    (operation,) = item.operations
    assert len(operation.writes) > 2
    return [
        dataclasses.replace(
            item,
            work=item.work if i == len(operation.writes) - 1 else 100_000 * (i + 1) + item.work,
            operations=(dataclasses.replace(operation, writes=(writes,)),),
        )
        for i, writes in enumerate(operation.writes)
    ]


def test_gathers_are_one_kernel_that_holds_no_queue_up(recorded: list[Trace]) -> None:
    for trace in recorded:
        gathers = [item for item in trace.items if is_a(item, "all_gather")]
        versions = [i for i in trace.items if isinstance(i, Begin) and i.action == "start_gather"]
        assert len(gathers) == len(versions) > 0
    without, gathering = state(recorded).time, state(recorded, gather=2.0).time
    assert gathering == pytest.approx(without)
    assert state(edited(recorded, apart), gather=2.0).time > without + 0.1


def at_the_end(trace: Trace) -> Trace:
    """All of a stage's gradients reduced at once, behind the last backward."""
    items: list[Item] = []
    held: list[Communication] = []
    for item in trace.items:
        if is_a(item, "reduce_scatter"):
            assert isinstance(item, Communication)
            held.append(item)
            continue
        if held and isinstance(item, Wait):
            items += held
            held = []
        items.append(item)
    return dataclasses.replace(trace, items=tuple(items))


def test_every_stage_reduces_bucket_by_bucket(recorded: list[Trace]) -> None:
    for trace in recorded:
        iterations = sum(isinstance(item, Iteration) for item in trace.items)
        reductions = [item for item in trace.items if is_a(item, "reduce_scatter")]
        assert len(reductions) >= 3 * iterations
    late = [at_the_end(trace) if trace.stage > 0 else trace for trace in recorded]
    assert state(recorded, 32, reduction=1.0).time < state(late, 32, reduction=1.0).time - 0.1


# ------------------------------------------------------------------------- the device's memory


BLOCK = 512
"""Bytes: sizes are rounded up to a multiple of it (kMinBlockSize, c10/core/AllocatorConfig.h),
so that a few bytes more at a time, as a log line may have under way, fit into what is there."""


def asked_for(of: Sequence[Trace]) -> set[int]:
    """The iterations in which the allocator has no freed block of the wanted size, and so asks the
    device, which waits for all that runs."""
    found = set()
    for trace in of:
        iteration = -1
        sizes: dict[int, int] = {}
        free: Counter[int] = Counter()
        for item in trace.items:
            match item:
                case Iteration():
                    iteration = item.number
                case Allocate():
                    size = -(-item.size // BLOCK) * BLOCK
                    if free[size]:
                        free[size] -= 1
                    else:
                        found.add(iteration)
                    sizes[item.storage] = size
                case Free() if item.storage in sizes:
                    free[sizes.pop(item.storage)] += 1
    return found


def test_memory_is_asked_for_in_the_first_two_iterations_alone(recorded: list[Trace]) -> None:
    assert asked_for(recorded) == {0, 1}

    def late(trace: Trace, item: Item) -> list[Item] | None:
        """A buffer that is made when the fourth batch's update is launched, and kept."""
        if not (isinstance(item, Begin) and item.action == "launch_update" and item.batch == 3):
            return None
        return [item, Allocate(storage=1_000_000, size=12_345)]

    assert asked_for(edited(recorded, late)) - {0, 1}

    def leaking(trace: Trace, item: Item) -> list[Item] | None:
        """The copies of the gradients are made anew for each batch, and kept."""
        if not (isinstance(item, Begin) and item.action == "launch_update"):
            return None
        return [item, Allocate(storage=1_000_000 + item.batch, size=4096)]

    assert len(asked_for(edited(recorded, leaking))) > 2


def of_updates(of: Sequence[Trace]) -> dict[tuple[int, ...], set[str]]:
    """The communicators of the device that updates use, by their ranks, with what made them."""
    found: dict[tuple[int, ...], set[str]] = {}
    for trace in of:
        for action, item in in_actions(trace):
            if isinstance(item, Communication) and not item.on_host and "update" in action:
                found.setdefault(item.ranks, set()).add(item.label or item.group)
    return found


def test_an_update_has_one_communicator_of_its_own(recorded: list[Trace]) -> None:
    def own(of: Sequence[Trace]) -> list[tuple[int, ...]]:
        return [
            ranks
            for ranks, labels in of_updates(of).items()
            for label in labels
            if not label.endswith(("_GROUP", "_GROUP_WITH_CP"))
        ]

    # Rank n of the first and of the last stage, for the tied embedding's gradient.
    assert sorted(own(recorded)) == [(n, n + REPLICAS) for n in range(REPLICAS)]

    def unshared(trace: Trace, item: Item) -> list[Item] | None:
        """Each stage's sums run on a communicator of the update's own."""
        if not (isinstance(item, Communication) and item.label.startswith("TENSOR_AND_DATA")):
            return None
        return [dataclasses.replace(item, group=f"own {item.group}", label="")]

    assert len(own(edited(recorded, unshared))) == REPLICAS + STAGES


# ------------------------------------------------------------------------------ the host


def test_the_host_waits_for_its_device_at_log_lines_alone(recorded: list[Trace]) -> None:
    def others(of: Sequence[Trace]) -> set[str]:
        return {
            each.text.rpartition(" in ")[2]
            for each in host_waits(of)
            if not each.text.endswith((" in training_log", ".elapsed"))
        }

    assert others(recorded) == set()

    def checked(trace: Trace, item: Item) -> list[Item] | None:
        if not (isinstance(item, Begin) and item.action == "backward"):
            return None
        return [Synchronize(why="item", stream=0, where="rerun.py:validate_result"), item]

    assert others(edited(recorded, checked)) == {"validate_result"}
