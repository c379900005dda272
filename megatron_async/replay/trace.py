"""What the host of one rank enqueues, in its order, as plain data, and the file that it is kept in.

A trace is a header and a list of items. Kernels, events and waits name the stream that they are
enqueued on; a communication names the stream that is current when it is called. What runs on it
follows from the rules of PyTorch's NCCL process group, see docs/replay.md.

The file is JSON lines, one file for each rank: the header, then one line an item, its kind under
``is``, defaults left out.
"""

import json
from collections.abc import Iterable, Iterator
from dataclasses import MISSING, Field, dataclass, fields
from pathlib import Path
from typing import Any

__all__ = [
    "Allocate",
    "Await",
    "Begin",
    "Communication",
    "End",
    "Free",
    "HandOver",
    "HostAccess",
    "Item",
    "Iteration",
    "Kernel",
    "Operation",
    "Range",
    "RecordEvent",
    "Synchronize",
    "Task",
    "Trace",
    "TraceError",
    "UseStream",
    "Wait",
    "WaitEvent",
    "communicator",
    "decode",
    "encode",
    "header",
    "read",
    "read_all",
    "trace_path",
    "write",
]

FORMAT = 1

type Range = tuple[int, int, int]
"""(number of the storage, first byte, byte behind the last). A view with gaps counts as a whole."""


class TraceError(Exception):
    """A trace that cannot be read; the message says which, and why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernel:
    """One kernel (or copy) on the device."""

    name: str
    stream: int = 0
    reads: tuple[Range, ...] = ()
    writes: tuple[Range, ...] = ()
    where: str = ""
    """The function that launched it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """One operation of a :class:`Communication`."""

    name: str
    """``all_reduce``, ``all_gather``, ``reduce_scatter``, ``all_to_all``, ``broadcast``,
    ``reduce``, ``gather``, ``scatter``, ``barrier``, ``send`` or ``recv``."""
    peer: int = -1
    """Global rank: the root of a broadcast, reduce, gather or scatter; the other side of a send or
    recv; else -1."""
    reads: tuple[Range, ...] = ()
    writes: tuple[Range, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Communication:
    """What is launched together: one kernel of NCCL, or one request of gloo."""

    operations: tuple[Operation, ...]
    group: str
    """Name of the process group, the same on all of its ranks."""
    ranks: tuple[int, ...]
    """Global ranks of the group, in its order."""
    label: str = ""
    """What the group was made for, as far as its maker said."""
    stream: int = 0
    """The stream that is current at the call."""
    work: int = -1
    """Number of what the call returned, for :class:`Wait`."""
    asynchronous: bool = True
    """Whether it runs on the communicator's own stream, or on the current one."""
    batched: bool = True
    """Of sends and receives: whether they run on the group's communicator, or on one that belongs
    to the two ranks."""
    on_host: bool = False
    """Whether gloo was asked for: it runs between the hosts, and a wait blocks the host."""
    where: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wait:
    """``Work.wait``: the stream waits for the end of a communication; with gloo the host does."""

    work: int
    stream: int = 0
    where: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordEvent:
    """An event is recorded. Each recording has a number of its own."""

    event: int
    stream: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitEvent:
    """A stream waits for an event."""

    event: int
    stream: int = 0
    where: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Synchronize:
    """The host waits: for a stream, an event, or (neither given) the whole device."""

    why: str
    """What made it wait: ``item``, ``copy to device``, ``event`` and so on."""
    stream: int = -1
    event: int = -1
    where: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Allocate:
    """Device memory is allocated; the allocator gives it back to the stream that is current."""

    storage: int
    size: int
    stream: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Free:
    """The last reference to a storage is gone; the allocator may hand out its memory again."""

    storage: int


@dataclass(frozen=True, slots=True, kw_only=True)
class UseStream:
    """``Tensor.record_stream``: the memory is not handed out again before the stream has come to
    where it stands when the storage is freed."""

    storage: int
    stream: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class HostAccess:
    """The host itself reads or writes memory that copies from or to the device use."""

    name: str
    reads: tuple[Range, ...] = ()
    writes: tuple[Range, ...] = ()
    where: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class HandOver:
    """The host leaves a task to another thread, which does its tasks in turn."""

    task: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Await:
    """The host waits for the end of a task that it left to another thread."""

    task: int
    where: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Begin:
    """An action of the schedule's lists begins; it lasts up to the next :class:`End`."""

    action: str
    batch: int = -1
    microbatch: int = -1
    version: int = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class End:
    """The action ends."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Iteration:
    """A training iteration begins; 0 is the first."""

    number: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """What another thread of the host did between a :class:`HandOver` and its end.

    Where it stands in the trace says nothing about the time.
    """

    task: int
    items: tuple[Communication | Wait | Synchronize | HostAccess, ...]


type Item = (
    Kernel
    | Communication
    | Wait
    | RecordEvent
    | WaitEvent
    | Synchronize
    | Allocate
    | Free
    | UseStream
    | HostAccess
    | HandOver
    | Task
    | Await
    | Begin
    | End
    | Iteration
)

_KINDS: dict[str, type[Any]] = {
    "kernel": Kernel,
    "communication": Communication,
    "wait": Wait,
    "record": RecordEvent,
    "wait_event": WaitEvent,
    "synchronize": Synchronize,
    "allocate": Allocate,
    "free": Free,
    "use_stream": UseStream,
    "host_access": HostAccess,
    "hand_over": HandOver,
    "task": Task,
    "await": Await,
    "begin": Begin,
    "end": End,
    "iteration": Iteration,
}
_NAMES = {kind: name for name, kind in _KINDS.items()}
_FIELDS: dict[type[Any], list[Field[Any]]] = {
    kind: list(fields(kind)) for kind in (*_KINDS.values(), Operation)
}


@dataclass(frozen=True, kw_only=True)
class Trace:
    """What one rank enqueued.

    Attributes:
        rank: global rank.
        world: number of ranks.
        stage: its pipeline stage.
        stages: p.
        streams: the streams that were in use before the first item, in the order of their first
            use: numbers of torch's, ``nccl:`` and what :func:`communicator` says of NCCL's.
        items: in the order in which they were enqueued.
    """

    rank: int
    world: int
    stage: int = 0
    stages: int = 1
    streams: tuple[str, ...] = ()
    items: tuple[Item, ...] = ()


def communicator(item: Communication, rank: int) -> str:
    """Name the NCCL communicator that a communication of ``rank`` runs on; each has a stream.

    Sends and receives outside of a batch run on a communicator of the two ranks (in
    ProcessGroupNCCL::pointToPoint, unless communicators are made eagerly).
    """
    if item.batched:
        return item.group
    low, high = sorted((rank, item.operations[0].peer))
    return f"{item.group}:{low}-{high}"


def encode(item: Item | Operation) -> dict[str, Any]:
    """Return an item as what JSON can hold."""
    kind = type(item)
    name = _NAMES.get(kind)
    record: dict[str, Any] = {} if name is None else {"is": name}
    for field in _FIELDS[kind]:
        value = getattr(item, field.name)
        if value == field.default and field.default is not MISSING:
            continue
        if field.name in ("operations", "items"):
            value = [encode(each) for each in value]
        record[field.name] = value
    return record


def decode(record: dict[str, Any]) -> Item:
    """The inverse of :func:`encode`.

    Raises:
        KeyError: the kind is unknown.
        TypeError: a field is missing or unknown.
    """
    record = dict(record)
    kind = _KINDS[record.pop("is")]
    if kind is Communication:
        record["operations"] = tuple(
            Operation(**_with_tuples(each)) for each in record["operations"]
        )
    if kind is Task:
        record["items"] = tuple(map(decode, record["items"]))
    item: Item = kind(**_with_tuples(record))
    return item


def _with_tuples(record: dict[str, Any]) -> dict[str, Any]:
    for name in ("reads", "writes"):
        if name in record:
            record[name] = tuple(tuple(each) for each in record[name])
    if "ranks" in record:
        record["ranks"] = tuple(record["ranks"])
    return record


def trace_path(directory: Path, rank: int) -> Path:
    """Where a rank's trace is."""
    return directory / f"rank{rank:05d}.jsonl"


def header(trace: Trace) -> dict[str, Any]:
    """Return the first line of a file."""
    return {
        "format": FORMAT,
        "rank": trace.rank,
        "world": trace.world,
        "stage": trace.stage,
        "stages": trace.stages,
        "streams": trace.streams,
    }


def write(trace: Trace, directory: Path) -> Path:
    """Write a trace and return its file."""
    directory.mkdir(parents=True, exist_ok=True)
    path = trace_path(directory, trace.rank)
    with path.open("w", encoding="utf-8") as file:
        for record in (header(trace), *map(encode, trace.items)):
            file.write(json.dumps(record, separators=(",", ":")) + "\n")
    return path


def read(path: Path) -> Trace:
    """Read one rank's trace.

    Raises:
        TraceError: the file is broken, or of another version of this package.
    """
    with path.open(encoding="utf-8") as file:
        lines = _lines(path, file)
        try:
            first = next(lines)
        except StopIteration:
            raise TraceError(
                f"{path} is empty: the run ended before its first iteration."
            ) from None
        if first.pop("format", None) != FORMAT:
            raise TraceError(f"{path} is of another version of megatron_async: record it again.")
        items: list[Item] = []
        for number, record in enumerate(lines, start=2):
            try:
                items.append(decode(record))
            except (KeyError, TypeError) as error:
                raise TraceError(f"{path}, line {number}: {error}") from error
    first["streams"] = tuple(first["streams"])
    return Trace(items=tuple(items), **first)


def _lines(path: Path, file: Iterable[str]) -> Iterator[dict[str, Any]]:
    for number, line in enumerate(file, start=1):
        try:
            yield json.loads(line)
        except json.JSONDecodeError as error:
            raise TraceError(f"{path}, line {number}: {error}") from error


def read_all(directory: Path) -> list[Trace]:
    """Read the traces of all ranks of a run, rank 0's first.

    Raises:
        TraceError: there is none, one is missing, or one is broken.
    """
    paths = sorted(directory.glob("rank*.jsonl"))
    if not paths:
        raise TraceError(f"{directory} has no rank*.jsonl: write them with --cpu --log-enqueues.")
    traces = [read(path) for path in paths]
    if [trace.rank for trace in traces] != list(range(traces[0].world)):
        raise TraceError(
            f"{directory} has {len(traces)} files of a run of {traces[0].world} ranks."
        )
    return traces
