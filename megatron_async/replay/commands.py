"""The commands in a device's hardware queues."""

from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from megatron_async.replay.nccl import Participant
from megatron_async.replay.trace import Begin, Item, Trace

__all__ = ["Bound", "Command", "HostStop", "Kind", "Owner"]


class Kind(Enum):
    """What a command in a queue is."""

    KERNEL = "kernel"
    COLLECTIVE = "collective"
    RECORD = "record"
    WAIT = "wait"


class Bound(Enum):
    """What a command waited for last, before it could be issued."""

    HOST = "host"
    """The host, which enqueued it."""
    QUEUE = "queue"
    """The command ahead of it in its queue."""
    STREAM = "stream"
    """The one before it in its stream."""
    EVENT = "event"
    """An event."""
    COMMUNICATOR = "communicator"
    """The kernel before it on its communicator."""


@dataclass(frozen=True, slots=True)
class HostStop:
    """What the host was last blocked by."""

    why: str
    of: "Command | None" = None


class Owner(Protocol):
    """The rank that enqueues a command, as it stands then."""

    trace: Trace
    action: Begin | None
    iteration: int
    host_time: float
    host_stop: HostStop | None


class Command(Participant):
    """One entry of a hardware queue.

    Attributes:
        start: when it was issued; None until then.
        end: when it had ended; of an event, when it had happened.
        bound: what it waited for last, and which command that was.
        needed: of a collective: the peer's kernel that came last, None if none came later.
    """

    __slots__ = (
        "action",
        "bound",
        "bound_by",
        "communicator",
        "enqueued",
        "event",
        "followers",
        "item",
        "iteration",
        "kind",
        "previous",
        "stopped",
        "stream",
    )

    def __init__(self, owner: Owner, kind: Kind, stream: str, item: Item) -> None:
        super().__init__(owner.trace.rank)
        self.kind = kind
        self.stream = stream
        self.item = item
        self.action = owner.action
        self.iteration = owner.iteration
        self.enqueued = owner.host_time
        self.stopped = owner.host_stop
        self.event: Command | None = None
        self.previous: Command | None = None
        self.bound = Bound.HOST
        self.bound_by: Command | None = None
        self.communicator: Command | None = None
        self.followers: list[Command] = []
        """Events that happen when it ends."""

    @property
    def spun(self) -> float:
        """How long a collective waited for its peers."""
        if self.start is None or self.needed is None or self.needed.start is None:
            return 0.0
        return max(self.needed.start - self.start, 0.0)
