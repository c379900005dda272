"""Traces made by hand: of single rules, and of whole action lists without any rank."""

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from megatron_async.replay.trace import (
    Begin,
    Communication,
    End,
    Item,
    Iteration,
    Kernel,
    Operation,
    RecordEvent,
    Synchronize,
    Trace,
    Wait,
)
from megatron_async.schedules.actions import Action, Kind

__all__ = [
    "by_lists",
    "collective",
    "drop",
    "exchange_on_host",
    "exchange_on_one_communicator",
    "kernel",
    "message",
    "swap",
    "trace",
    "traces",
]

SIDE_STREAM = 1


def kernel(name: str = "kernel", *, stream: int = 0, reads: Any = (), writes: Any = ()) -> Kernel:
    """A kernel that reads and writes bytes of storages: (storage, begin, end), or a storage."""
    return Kernel(name=name, stream=stream, reads=_ranges(reads), writes=_ranges(writes))


def _ranges(given: Any) -> Any:
    return tuple((each, 0, 100) if isinstance(each, int) else each for each in given)


def collective(
    name: str,
    ranks: Sequence[int],
    *,
    work: int,
    group: str = "g",
    root: int = -1,
    reads: Any = (),
    writes: Any = (),
    **settings: Any,
) -> Communication:
    """One collective."""
    operation = Operation(name=name, peer=root, reads=_ranges(reads), writes=_ranges(writes))
    return Communication(
        operations=(operation,), group=group, ranks=tuple(ranks), work=work, **settings
    )


def message(
    ranks: Sequence[int],
    *,
    work: int,
    send: Iterable[int] = (),
    recv: Iterable[int] = (),
    group: str = "p2p",
    reads: Any = (),
    writes: Any = (),
    **settings: Any,
) -> Communication:
    """Sends and receives of one launch, by the other sides."""
    operations = [
        *(Operation(name="send", peer=peer, reads=_ranges(reads)) for peer in send),
        *(Operation(name="recv", peer=peer, writes=_ranges(writes)) for peer in recv),
    ]
    return Communication(
        operations=tuple(operations), group=group, ranks=tuple(ranks), work=work, **settings
    )


def trace(*items: Item, rank: int = 0, world: int = 1, **settings: Any) -> Trace:
    """One rank's trace; stage = rank by default."""
    return Trace(
        rank=rank, world=world, items=items, **{"stage": rank, "stages": world, **settings}
    )


def traces(*ranks: Sequence[Item], **settings: Any) -> list[Trace]:
    """The traces of ranks 0, 1, ..."""
    return [
        trace(*items, rank=rank, world=len(ranks), **settings) for rank, items in enumerate(ranks)
    ]


# ---------------------------------------------------------------------------------- mutations


def drop(of: Trace, chosen: Callable[[Item], bool], *, only: int | None = None) -> Trace:
    """Leave items out: all that are chosen, or the n-th of them."""
    positions = [i for i, item in enumerate(of.items) if chosen(item)]
    assert positions, "nothing to drop"
    gone = set(positions if only is None else [positions[only]])
    kept = tuple(item for i, item in enumerate(of.items) if i not in gone)
    return dataclasses.replace(of, items=kept)


def swap(of: Trace, first: Callable[[Item], bool], second: Callable[[Item], bool]) -> Trace:
    """Enqueue the first item that ``first`` chooses right behind the next one of ``second``."""
    items = list(of.items)
    at = next(i for i, item in enumerate(items) if first(item))
    behind = next(i for i in range(at + 1, len(items)) if second(items[i]))
    items.insert(behind, items.pop(at))
    return dataclasses.replace(of, items=tuple(items))


# ------------------------------------------------------------------------------- action lists

type Update = Callable[["_Enqueuer", Action], None]
"""Enqueues what a launch or a completion does."""


class _Enqueuer:
    def __init__(self, stage: int, stages: int) -> None:
        self.stage = stage
        self.stages = stages
        self.everyone = tuple(range(stages))
        self.items: list[Item] = []
        self.works = 0
        self.pending: list[int] = []

    def add(self, *items: Item) -> None:
        self.items += items

    def work(self) -> int:
        self.works += 1
        return self.works

    def kernels(self, count: int = 2) -> None:
        self.add(*(kernel() for _ in range(count)))

    def transfer(self, action: Action) -> None:
        sent = action.sent(stages=self.stages)
        received = action.received(stages=self.stages)
        send = [] if sent is None else [sent.receiver(self.stages)]
        recv = [] if received is None else [received.sender(self.stages)]
        if send or recv:
            work = self.work()
            self.add(
                message(self.everyone, work=work, send=send, recv=recv),
                Wait(work=work),
            )

    def update(self) -> None:
        work = self.work()
        self.add(
            collective("all_reduce", self.everyone, work=work, group="norm", asynchronous=False)
        )
        self.kernels()


def exchange_on_one_communicator(to: _Enqueuer, action: Action) -> None:
    """A reduce towards the first stage and a broadcast from it, on one communicator of NCCL."""
    if action.kind is Kind.LAUNCH_UPDATE:
        to.pending = [to.work(), to.work()]
        gathered, answer = to.pending
        reduce = collective("reduce", to.everyone, work=gathered, group="x", root=0)
        broadcast = collective("broadcast", to.everyone, work=answer, group="x", root=0)
        if to.stage == 0:
            to.add(reduce, Wait(work=gathered), kernel("add"), broadcast)
        else:
            to.add(reduce, broadcast)
    else:
        to.add(
            *(Wait(work=work, stream=SIDE_STREAM) for work in to.pending),
            kernel("copy to host", stream=SIDE_STREAM),
            Synchronize(why="copy to host", stream=SIDE_STREAM),
        )
        to.kernels()


def exchange_on_host(to: _Enqueuer, action: Action) -> None:
    """The numbers are copied behind an event, and sent between the hosts over gloo."""
    if action.kind is Kind.LAUNCH_UPDATE:
        to.pending = [to.work()]
        to.add(kernel("copy to host"), RecordEvent(event=to.pending[0]))
        return
    to.add(Synchronize(why="event", event=to.pending[0]))
    others = [stage for stage in to.everyone if stage]

    def each(peers: list[int], *, wait: bool, **direction: list[int]) -> None:
        for peer in peers:
            work = to.work()
            (name,) = direction
            to.add(message(to.everyone, work=work, group="h", on_host=True, **{name: [peer]}))
            if wait:
                to.add(Wait(work=work))

    if to.stage == 0:
        each(others, wait=True, recv=others)
        each(others, wait=False, send=others)
    else:
        each([0], wait=False, send=[0])
        each([0], wait=True, recv=[0])
    to.kernels()


def by_lists(
    lists: Sequence[Sequence[Action]],
    exchange: Update = exchange_on_host,
    *,
    launch_first: bool = False,
) -> list[Trace]:
    """Make the traces of all stages, with two kernels for each computation.

    Args:
        lists: of the stages.
        exchange: how a deferred update crosses stages.
        launch_first: enqueue a launch ahead of the communication that it follows.
    """
    found: list[Trace] = []
    for stage, actions in enumerate(lists):
        to = _Enqueuer(stage, len(lists))
        if launch_first:
            actions = _launches_first(actions)
        batch = -1
        for action in actions:
            if action.kind is Kind.BACKWARD and action.batch != batch:
                batch = action.batch
                to.add(Iteration(number=batch))
            to.add(
                Begin(action=action.kind.value, batch=action.batch, microbatch=action.microbatch)
            )
            if action.kind in (Kind.FORWARD, Kind.BACKWARD):
                to.kernels()
            elif action.kind in (Kind.LAUNCH_UPDATE, Kind.COMPLETE_UPDATE):
                exchange(to, action)
            elif action.kind is Kind.UPDATE:
                to.update()
            else:
                to.transfer(action)
            to.add(End())
        found.append(trace(*to.items, rank=stage, world=len(lists)))
    return found


def _launches_first(actions: Sequence[Action]) -> list[Action]:
    found = list(actions)
    for i, action in enumerate(actions):
        sends = (Kind.SEND_BACKWARD_RECV_FORWARD, Kind.SEND_BACKWARD)
        if action.kind in sends and actions[i + 1].kind is Kind.FINISH_REDUCTION:
            found[i : i + 3] = [*actions[i + 1 : i + 3], action]
    return found
