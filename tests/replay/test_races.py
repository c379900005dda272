"""The happens-before check: each of its rules, on traces made by hand."""

import pytest

from megatron_async.replay.races import Race, find_races
from megatron_async.replay.trace import (
    Allocate,
    Begin,
    Communication,
    End,
    Free,
    HostAccess,
    Item,
    Kernel,
    RecordEvent,
    Synchronize,
    Trace,
    UseStream,
    Wait,
    WaitEvent,
)
from tests.support.traces import collective, drop, kernel, message, swap, trace

A, B = 7, 8
"""Storages."""


def races(*items: Item) -> list[Race]:
    return find_races(trace(*items))


def is_wait(item: Item) -> bool:
    return isinstance(item, Wait | WaitEvent)


WRITE = kernel("write", writes=[A])
READ_BESIDE = kernel("read", stream=1, reads=[A])
ORDERED = (RecordEvent(event=1), WaitEvent(event=1, stream=1))


def test_two_streams_are_ordered_by_an_event() -> None:
    assert not races(WRITE, *ORDERED, READ_BESIDE)
    (race,) = races(WRITE, READ_BESIDE)
    assert race.storage == A
    assert race.first.operator == "write"
    assert race.second is not None
    assert race.second.operator == "read"
    assert len(races(READ_BESIDE, WRITE)) == 1
    # Recorded too early, waited for too late, or by another stream.
    assert races(RecordEvent(event=1), WRITE, WaitEvent(event=1, stream=1), READ_BESIDE)
    assert races(WRITE, RecordEvent(event=1), READ_BESIDE, WaitEvent(event=1, stream=1))
    assert races(WRITE, RecordEvent(event=1), WaitEvent(event=1, stream=2), READ_BESIDE)


def test_order_is_transitive() -> None:
    through = (
        RecordEvent(event=1),
        WaitEvent(event=1, stream=2),
        RecordEvent(event=2, stream=2),
        WaitEvent(event=2, stream=1),
    )
    assert not races(WRITE, *through, READ_BESIDE)


def test_one_stream_is_ordered_and_reads_may_be_unordered() -> None:
    assert not races(WRITE, kernel("read", reads=[A]))
    assert not races(kernel("read", reads=[A]), READ_BESIDE)


def test_only_bytes_that_overlap_count() -> None:
    beside = kernel("beside", stream=1, writes=[(A, 50, 60)])
    assert not races(kernel(writes=[(A, 0, 50), (A, 60, 80), (B, 0, 80)]), beside)
    assert races(kernel(writes=[(A, 59, 80)]), beside)


@pytest.mark.parametrize(
    "synchronise",
    [
        Synchronize(why="item", stream=0),
        Synchronize(why="device"),
        Synchronize(why="event", event=1),
    ],
)
def test_what_the_host_has_waited_for_is_behind_everybody(synchronise: Synchronize) -> None:
    assert not races(WRITE, RecordEvent(event=1), synchronise, READ_BESIDE)
    assert races(WRITE, Synchronize(why="stream", stream=2), READ_BESIDE)


def test_a_collective_runs_beside_the_current_stream_until_it_is_waited_for() -> None:
    reduce = collective("all_reduce", (0, 1), work=3, reads=[A], writes=[A])
    read = kernel("read", reads=[A])
    assert not races(WRITE, reduce, Wait(work=3), read)
    (race,) = races(WRITE, reduce, read)
    assert "nccl:g" in race.first.stream
    assert races(WRITE, reduce, Wait(work=3, stream=1), read)
    assert races(kernel("write", stream=1, writes=[A]), reduce, Wait(work=3))
    synchronous = collective(
        "all_reduce", (0, 1), work=3, reads=[A], writes=[A], asynchronous=False
    )
    assert not races(WRITE, synchronous, read)
    # Kernels of one communicator are ordered.
    assert not races(reduce, collective("all_gather", (0, 1), work=4, writes=[A]))


def test_only_what_is_written_must_not_be_read() -> None:
    sent = message((0, 1), work=0, send=[1], reads=[A])
    assert not races(WRITE, sent, kernel("read", reads=[A]))
    assert races(WRITE, sent, kernel("write", writes=[A]))


def backward_and_reduction() -> Trace:
    """Two gradients are accumulated in one bucket, which is reduced and read by the optimizer."""
    return trace(
        Begin(action="backward", batch=0, microbatch=3),
        kernel("first", writes=[(A, 0, 50)]),
        kernel("last", writes=[(A, 50, 100)]),
        collective("reduce_scatter", (0, 1), work=0, reads=[A], writes=[(A, 0, 50)]),
        End(),
        Begin(action="finish_reduction", batch=0),
        Wait(work=0),
        End(),
        Begin(action="launch_update", batch=0),
        kernel("copy", reads=[(A, 0, 50)]),
        End(),
    )


def test_a_reduction_that_starts_too_early_or_is_not_waited_for_is_found() -> None:
    right = backward_and_reduction()
    assert not find_races(right)
    (race,) = find_races(drop(right, is_wait))
    assert race.first.action == "backward(batch 0, microbatch 3)"
    assert race.second is not None
    assert race.second.action == "launch_update(batch 0)"
    early = swap(
        right,
        lambda item: isinstance(item, Kernel) and item.name == "last",
        lambda item: isinstance(item, Communication),
    )
    (race,) = find_races(early)
    assert {race.first.operator, getattr(race.second, "operator", "")} == {
        "reduce_scatter",
        "last",
    }


def test_a_gather_that_is_not_waited_for_is_found() -> None:
    right = trace(
        kernel("step", writes=[(A, 0, 50)]),
        collective("all_gather", (0, 1), work=0, reads=[(A, 0, 50)], writes=[A]),
        Wait(work=0),
        kernel("forward", reads=[(A, 70, 80)]),
    )
    assert not find_races(right)
    assert find_races(drop(right, is_wait))
    assert find_races(swap(right, is_wait, lambda item: isinstance(item, Kernel)))


def test_an_exchange_that_is_not_waited_for_is_found() -> None:
    right = trace(
        collective("broadcast", (0, 1), work=0, root=0, writes=[A]),
        RecordEvent(event=1),
        WaitEvent(event=1, stream=1),
        Wait(work=0, stream=1),
        kernel("copy to host", stream=1, reads=[A], writes=[B]),
        Synchronize(why="copy to host", stream=1),
        HostAccess(name="tolist", reads=((B, 0, 100),)),
    )
    assert not find_races(right)
    assert find_races(drop(right, lambda item: isinstance(item, Wait)))
    assert find_races(drop(right, lambda item: isinstance(item, Synchronize)))


# ----------------------------------------------------------------------------------------- memory

ALLOCATED = (Allocate(storage=A, size=100), WRITE)


def test_memory_is_freed_only_when_other_streams_are_done_with_it() -> None:
    free = Free(storage=A)
    used = (*ORDERED, READ_BESIDE)
    (race,) = races(*ALLOCATED, *used, free)
    assert race.second is None
    assert "freed" in str(race)
    assert not races(*ALLOCATED, free)
    assert not races(*ALLOCATED, *used, UseStream(storage=A, stream=1), free)
    assert races(*ALLOCATED, *used, UseStream(storage=A, stream=2), free)
    back = (RecordEvent(event=2, stream=1), WaitEvent(event=2))
    assert not races(*ALLOCATED, *used, *back, free)
    assert not races(*ALLOCATED, *used, Synchronize(why="stream", stream=1), free)
    # What was allocated for the other stream goes back to that one.
    for_other = (Allocate(storage=A, size=100, stream=1), kernel("write", stream=1, writes=[A]))
    assert not races(*for_other, free)
    assert races(*for_other, RecordEvent(event=1, stream=1), WaitEvent(event=1), WRITE, free)


def test_pytorch_keeps_what_is_communicated_until_it_is_waited_for() -> None:
    free = Free(storage=A)
    reduce = collective("all_reduce", (0, 1), work=0, reads=[A], writes=[A])
    assert not races(*ALLOCATED, reduce, free)
    assert not races(*ALLOCATED, reduce, Wait(work=0), free)
    # A wait lets go of it, and orders the waiting stream alone.
    assert races(*ALLOCATED, reduce, Wait(work=0, stream=1), free)
    # Of sends and receives, the stream is recorded.
    sent = message((0, 1), work=0, send=[1], reads=[A])
    assert not races(*ALLOCATED, sent, Wait(work=0, stream=1), free)


def test_the_next_owner_of_a_storages_memory_has_a_number_of_its_own() -> None:
    assert not races(*ALLOCATED, Free(storage=A), Allocate(storage=B, size=1), kernel(writes=[B]))


def test_the_host_reads_a_copy_only_when_it_has_waited_for_it() -> None:
    copy = kernel("copy to host", reads=[A], writes=[B])
    read = HostAccess(name="tolist", reads=((B, 0, 100),))
    assert not races(copy, RecordEvent(event=1), Synchronize(why="event", event=1), read)
    (race,) = races(copy, RecordEvent(event=1), read)
    assert race.second is not None
    assert race.second.stream == "the host"


def test_the_host_overwrites_memory_only_when_its_copy_is_done() -> None:
    copy = kernel("copy to device", reads=[B], writes=[A])
    write = HostAccess(name="fill_", writes=((B, 0, 100),))
    assert not races(write, copy)
    assert races(copy, write)
    assert not races(copy, Synchronize(why="stream", stream=0), write)


def test_gloo_works_beside_the_host_until_it_is_waited_for() -> None:
    received = message((0, 1), work=0, recv=[1], writes=[B], on_host=True)
    read = HostAccess(name="tolist", reads=((B, 0, 100),))
    assert not races(received, Wait(work=0), read)
    assert races(received, read)
    write = HostAccess(name="fill_", writes=((B, 0, 100),))
    sent = message((0, 1), work=0, send=[1], reads=[B], on_host=True)
    assert races(write, sent, write)
    assert not races(write, sent, Wait(work=0), write)


def test_races_of_one_kind_are_counted() -> None:
    found = races(*(WRITE, READ_BESIDE) * 3)
    # Each read with the write before it, and each further write with the read before it.
    assert [race.count for race in found] == [3, 2]
    assert "(3 times)" in str(found[0])
