"""The happens-before check: are all accesses to one storage ordered?

As torch.cuda._sanitizer does it, and with its bookkeeping of streams: an access races with an
earlier one of another stream, one of the two a write, if no event, wait or synchronisation of the
host orders them. Beyond it, storages have ranges; collectives are seen, which run on streams of
their own; the host's own accesses to memory that copies use are seen; and memory that is freed has
to be done with before its next owner can write to it.
"""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field

from torch.cuda._sanitizer import StreamSynchronizations

from megatron_async.replay.trace import (
    Allocate,
    Await,
    Begin,
    Communication,
    End,
    Free,
    HandOver,
    HostAccess,
    Item,
    Iteration,
    Kernel,
    Range,
    RecordEvent,
    Synchronize,
    Task,
    Trace,
    UseStream,
    Wait,
    WaitEvent,
    communicator,
)

__all__ = ["Place", "Race", "find_races"]

_HOST = -1
"""The host among the streams."""
_THREAD = -2
"""The host's thread beside the main one."""
_HOSTS = (_HOST, _THREAD)
_FIRST_COMMUNICATOR = 1_000_000
"""Numbers of streams that are not torch's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where an access is."""

    operator: str
    stream: str
    action: str
    """With its batch and microbatch; empty outside of actions."""
    iteration: int
    where: str
    writes: bool

    def __str__(self) -> str:
        verb = "writes" if self.writes else "reads"
        action = f" in {self.action}" if self.action else ""
        where = f" ({self.where})" if self.where else ""
        return f"{self.operator} {verb} on {self.stream}{action}, iteration {self.iteration}{where}"


@dataclass(frozen=True, kw_only=True)
class Race:
    """Two accesses that nothing orders, or memory that is freed too early."""

    rank: int
    storage: int
    first: Place
    second: Place | None
    """None if the storage is freed while ``first`` may not have happened."""
    count: int = 1
    """How many there are of these two operators in these two actions."""

    def __str__(self) -> str:
        times = f" ({self.count} times)" if self.count > 1 else ""
        if self.second is None:
            return (
                f"rank {self.rank}: memory is freed while this may still use it{times}: "
                f"{self.first}"
            )
        return f"rank {self.rank}: unordered{times}: {self.first}; {self.second}"


@dataclass(slots=True)
class _Access:
    number: int
    place: Place
    protected: bool
    """Whether the memory is kept until the stream has come to it: PyTorch records the stream of
    sends and receives, and keeps a collective's tensors until it is waited for."""
    work: int = -1


@dataclass(slots=True)
class _Storage:
    stream: int = 0
    """The one that it was allocated for."""
    used_by: set[int] = field(default_factory=set)
    """Streams named to ``record_stream``."""
    accesses: dict[int, dict[tuple[int, int, bool], _Access]] = field(
        default_factory=lambda: defaultdict(dict)
    )
    """By stream and (first byte, byte behind the last, whether it writes): the last one."""


def find_races(trace: Trace) -> list[Race]:
    """Return the races of one rank, each kind once, in the order of their first occurrence."""
    return _Check(trace).run()


class _Check:
    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self.syncs = StreamSynchronizations()
        self.host = _HOST
        """The thread that does what is looked at."""
        for host in _HOSTS:
            self.syncs.create_stream(host)
        self.tasks = {item.task: item for item in trace.items if isinstance(item, Task)}
        self.storages: dict[int, _Storage] = defaultdict(_Storage)
        self.names: dict[str, int] = {}
        self.number = 0
        self.works: dict[int, Communication] = {}
        self.waited: set[int] = set()
        self.action: Begin | None = None
        self.iteration = 0
        self.found: dict[tuple[str, ...], Race] = {}

    def run(self) -> list[Race]:
        for item in self.trace.items:
            self.step(item)
        return list(self.found.values())

    def step(self, item: Item) -> None:
        match item:
            case Kernel():
                self.enqueue(item.stream)
                self.access(item.stream, item.name, item.where, item.reads, item.writes)
            case Communication():
                self.communicate(item)
            case Wait():
                self.wait(item)
            case RecordEvent():
                self.syncs.record_state(item.event, self.known(item.stream))
            case WaitEvent():
                self.syncs.stream_wait_for_event(self.known(item.stream), item.event)
            case Synchronize() if self.host == _THREAD:
                self.syncs.stream_wait_for_event(_THREAD, item.event)
            case Synchronize():
                if item.event >= 0:
                    self.syncs.all_streams_wait_for_event(item.event)
                elif item.stream >= 0:
                    self.syncs.all_streams_wait_for_stream(item.stream)
                else:
                    self.syncs.sync_all_streams()
            case HandOver():
                self.hand_over(item.task)
            case Await():
                self.syncs.all_streams_wait_for_event(_task_event(item.task, end=True))
            case HostAccess():
                self.enqueue(self.host)
                self.access(self.host, item.name, item.where, item.reads, item.writes)
            case Allocate():
                self.storages[item.storage] = _Storage(stream=item.stream)
            case Free():
                self.free(item.storage)
            case UseStream():
                self.storages[item.storage].used_by.add(item.stream)
            case Begin():
                self.action = item
            case End():
                self.action = None
            case Iteration():
                self.iteration = item.number

    def known(self, stream: int) -> int:
        if stream not in self.syncs.current_sync_states:
            self.syncs.create_stream(stream)
        return stream

    def enqueue(self, stream: int) -> None:
        """What is enqueued comes behind all that the host has done so far."""
        self.number += 1
        self.syncs.update_seq_num(stream, self.number)
        if stream not in _HOSTS:
            host = self.syncs.current_sync_states[_HOST]
            self.syncs.current_sync_states[stream][_HOST] = host.get(_HOST, -1)

    def hand_over(self, task: int) -> None:
        """The thread's accesses are behind what the host has done, and beside what it does next."""
        if task not in self.tasks:
            return  # The recording ended before it.
        self.syncs.record_state(_task_event(task, end=False), _HOST)
        self.syncs.stream_wait_for_event(_THREAD, _task_event(task, end=False))
        self.host = _THREAD
        for item in self.tasks[task].items:
            self.step(item)
        self.host = _HOST
        self.syncs.record_state(_task_event(task, end=True), _THREAD)

    def communicate(self, item: Communication) -> None:
        self.works[item.work] = item
        if item.asynchronous:
            kind = "gloo" if item.on_host else "nccl"
            stream = self.named(f"{kind}:{communicator(item, self.trace.rank)}")
            before = self.event(item.work, end=False)
            self.syncs.record_state(before, self.host if item.on_host else self.known(item.stream))
            self.syncs.stream_wait_for_event(stream, before)
            self.syncs.delete_event(before)
        else:
            stream = item.stream
        self.enqueue(stream)
        for each in item.operations:
            one_to_one = each.name in ("send", "recv")
            self.access(
                stream,
                each.name,
                item.where,
                each.reads,
                each.writes,
                protected=one_to_one or item.on_host,
                work=item.work if item.asynchronous else -1,
            )
        self.syncs.record_state(self.event(item.work, end=True), stream)

    def wait(self, item: Wait) -> None:
        of = self.works.get(item.work)
        if of is None:
            return  # launched before the first iteration
        self.waited.add(item.work)
        event = self.event(item.work, end=True)
        if of.on_host and self.host == _THREAD:
            self.syncs.stream_wait_for_event(_THREAD, event)
        elif of.on_host:
            self.syncs.all_streams_wait_for_event(event)
        else:
            self.syncs.stream_wait_for_event(self.known(item.stream), event)

    @staticmethod
    def event(work: int, *, end: bool) -> int:
        """Numbers that are not those of recorded events."""
        return -(2 * work + (2 if end else 1))

    def named(self, name: str) -> int:
        stream = self.names.setdefault(name, _FIRST_COMMUNICATOR + len(self.names))
        return self.known(stream)

    def access(
        self,
        stream: int,
        operator: str,
        where: str,
        reads: tuple[Range, ...],
        writes: tuple[Range, ...],
        *,
        protected: bool = False,
        work: int = -1,
    ) -> None:
        for ranges, is_write in ((reads, False), (writes, True)):
            if not ranges:
                continue
            place = Place(
                operator=operator,
                stream=self.name_of(stream),
                action=_describe(self.action),
                iteration=self.iteration,
                where=where,
                writes=is_write,
            )
            access = _Access(self.number, place, protected, work)
            for number, begin, end in ranges:
                storage = self.storages[number]
                for before in self.conflicts(storage, stream, begin, end, writes=is_write):
                    self.report(number, before.place, place)
                storage.accesses[stream][begin, end, is_write] = access

    def conflicts(
        self, storage: _Storage, stream: int, begin: int, end: int, *, writes: bool
    ) -> Iterator[_Access]:
        for other, accesses in storage.accesses.items():
            if other == stream:
                continue
            for (first, last, wrote), access in accesses.items():
                if (
                    first < end
                    and begin < last
                    and (writes or wrote)
                    and not self.syncs.is_ordered_after(stream, access.number, other)
                ):
                    yield access

    def free(self, number: int) -> None:
        storage = self.storages.pop(number, None)
        if storage is None:
            return
        for other, accesses in storage.accesses.items():
            if other == storage.stream or other in _HOSTS or other in storage.used_by:
                continue
            for access in accesses.values():
                kept = access.protected or (access.work >= 0 and access.work not in self.waited)
                if not kept and not self.syncs.is_ordered_after(
                    storage.stream, access.number, other
                ):
                    self.report(number, access.place, None)

    def report(self, storage: int, first: Place, second: Place | None) -> None:
        key = tuple(
            text
            for place in (first, second)
            if place is not None
            for text in (place.operator, place.action.partition("(")[0], place.where)
        )
        known = self.found.get(key)
        self.found[key] = Race(
            rank=self.trace.rank,
            storage=storage if known is None else known.storage,
            first=first if known is None else known.first,
            second=second if known is None else known.second,
            count=1 if known is None else known.count + 1,
        )

    def name_of(self, stream: int) -> str:
        if stream in _HOSTS:
            return "the host" if stream == _HOST else "another thread of the host"
        if stream < _FIRST_COMMUNICATOR:
            return f"stream {stream}"
        return next(name for name, number in self.names.items() if number == stream)


def _task_event(task: int, *, end: bool) -> int:
    """Numbers that are those of no event and no work."""
    return -(1 << 40) - (2 * task + (1 if end else 0))


def _describe(action: Begin | None) -> str:
    if action is None:
        return ""
    parts = [f"batch {action.batch}"] if action.batch >= 0 else []
    if action.microbatch >= 0:
        parts.append(f"microbatch {action.microbatch}")
    return f"{action.action}({', '.join(parts)})"
