"""A model of the device: all ranks' traces, run together on a clock.

The host of a rank enqueues its items as far ahead as nothing blocks it, and at most ``run_ahead``
kernels. Streams are assigned to hardware queues, round robin in the order of their first use. A
queue issues its items in the order in which they were enqueued: one at its head that cannot start
yet, since the item before it in its stream has not ended or an event has not happened, holds
everything behind it up. What has been issued runs, and no longer blocks the queue. NCCL's kernels
end as :mod:`.nccl` says.

Nothing here chooses: each time follows from others, so that the order in which ranks are advanced
does not matter. If none can be advanced, they wait for each other.

docs/replay.md has the source of each rule.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from megatron_async.replay.costs import Durations
from megatron_async.replay.nccl import Meeting, Meetings
from megatron_async.replay.trace import (
    Begin,
    Communication,
    End,
    Item,
    Iteration,
    Kernel,
    RecordEvent,
    Synchronize,
    Trace,
    Wait,
    WaitEvent,
    communicator,
)
from megatron_async.schedules.simulator import Costs

__all__ = ["Bound", "Command", "Device", "DeviceDeadlock", "HostStop", "Kind", "Rank", "run"]


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


class Command:
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
        "duration",
        "end",
        "enqueued",
        "event",
        "followers",
        "item",
        "iteration",
        "kind",
        "meetings",
        "needed",
        "previous",
        "rank",
        "start",
        "stopped",
        "stream",
    )

    def __init__(self, rank: "Rank", kind: Kind, stream: str, item: Item) -> None:
        self.rank = rank.trace.rank
        self.kind = kind
        self.stream = stream
        self.item = item
        self.action = rank.action
        self.iteration = rank.iteration
        self.enqueued = rank.host_time
        self.stopped = rank.host_stop
        self.duration = 0.0
        self.start: float | None = None
        self.end: float | None = None
        self.event: Command | None = None
        self.previous: Command | None = None
        self.bound = Bound.HOST
        self.bound_by: Command | None = None
        self.communicator: Command | None = None
        self.needed: Command | None = None
        self.meetings: list[Meeting[Command]] = []
        self.followers: list[Command] = []
        """Events that happen when it ends."""

    @property
    def spun(self) -> float:
        """How long a collective waited for its peers."""
        if self.start is None or self.needed is None or self.needed.start is None:
            return 0.0
        return max(self.needed.start - self.start, 0.0)


class DeviceDeadlock(Exception):
    """Ranks wait for each other; the message says who for what.

    Attributes:
        lines: one for each rank that cannot go on, then the circle if there is one.
    """

    def __init__(self, lines: Sequence[str]) -> None:
        self.lines = list(lines)
        super().__init__("\n".join(lines))


@dataclass(frozen=True)
class Device:
    """What all ranks' devices did."""

    ranks: list["Rank"]
    costs: Costs


def run(
    traces: Sequence[Trace],
    costs: Costs,
    *,
    connections: int = 8,
    run_ahead: int = 1024,
    launch: float = 0.0,
) -> Device:
    """Run the traces of all ranks, rank 0's first.

    Args:
        traces: of one run.
        costs: what actions take, in milliseconds; a forward's, backward's and optimizer step's time
            is spread over its kernels.
        connections: hardware queues of each device.
        run_ahead: how many kernels the host may have enqueued that have not been issued.
        launch: what the host takes to launch a kernel, in milliseconds.

    Raises:
        DeviceDeadlock: ranks wait for each other.
        ValueError: a number that makes no sense.
    """
    if connections < 1 or run_ahead < 1 or launch < 0:
        raise ValueError("connections and run_ahead are 1 or more, launch is not negative")
    meetings: Meetings[Command] = Meetings(costs.latency)
    hosts = Hosts(costs.latency)
    ranks = [
        Rank(
            trace,
            Durations(trace, costs),
            meetings,
            hosts,
            connections=connections,
            run_ahead=run_ahead,
            launch=launch,
        )
        for trace in traces
    ]
    moved = True
    while moved:
        moved = False
        for rank in ranks:
            while rank.advance():
                moved = True
    if not all(rank.finished for rank in ranks):
        from megatron_async.replay.deadlock import explain

        raise DeviceDeadlock(explain(ranks))
    return Device(ranks=ranks, costs=costs)


class Hosts:
    """Requests of gloo, between the hosts: when each host has posted its part."""

    def __init__(self, latency: float) -> None:
        self._latency = latency
        self.posts: Meetings[_Post] = Meetings(latency)

    def post(self, item: Communication, rank: int, now: float) -> "_Post":
        post = _Post(rank=rank, start=now, item=item)
        post.meetings = self.posts.register(item, rank, f"gloo:{item.group}")
        for each in self.posts.start(post, post.meetings):
            self.posts.try_end(each, each.meetings)
        return post


@dataclass(slots=True, eq=False)
class _Post:
    rank: int
    start: float | None
    item: Communication
    end: float | None = None
    duration: float = 0.0
    needed: "_Post | None" = None
    meetings: list[Meeting["_Post"]] = None  # type: ignore[assignment]


class Rank:
    """One rank: its host and the queues of its device.

    Attributes:
        commands: all that were enqueued, in the host's order.
        blocked: what keeps the host from its next item, if something does.
    """

    def __init__(
        self,
        trace: Trace,
        durations: Durations,
        meetings: Meetings[Command],
        hosts: Hosts,
        *,
        connections: int,
        run_ahead: int,
        launch: float,
    ) -> None:
        self.trace = trace
        self.commands: list[Command] = []
        self.host_time = 0.0
        self.host_stop: HostStop | None = None
        self.blocked: HostStop | _Post | None = None
        self.action: Begin | None = None
        self.iteration = -1
        self.queues: list[deque[Command]] = [deque() for _ in range(connections)]
        self._durations = durations
        self._meetings = meetings
        self._hosts = hosts
        self._run_ahead = run_ahead
        self._launch = launch
        self._position = 0
        self._issued: list[Command | None] = [None] * connections
        """The last one that each queue has issued."""
        self._queue_of: dict[str, int] = {}
        self._last_kernel: dict[str, Command] = {}
        """Of each stream: the last kernel."""
        self._last: dict[str, Command] = {}
        """Of each stream: the last command."""
        self._last_on: dict[str, Command] = {}
        """Of each communicator."""
        self._events: dict[int, Command] = {}
        self._works: dict[int, Command | _Post] = {}
        self._in_flight: deque[Command] = deque()
        for stream in trace.streams:
            self._queue(stream)

    @property
    def finished(self) -> bool:
        """Whether everything has been enqueued, issued, and ended."""
        return (
            self._position == len(self.trace.items)
            and not any(self.queues)
            and all(last.end is not None for last in self._last_kernel.values())
        )

    @property
    def next_item(self) -> Item | None:
        """What the host comes to next."""
        items = self.trace.items
        return items[self._position] if self._position < len(items) else None

    def advance(self) -> bool:
        """Go on as far as the host, and then the queues, get. Returns whether anything moved."""
        moved = False
        items, durations = self.trace.items, self._durations
        while self._position < len(items) and self._take(
            items[self._position], durations.of(self._position)
        ):
            self._position += 1
            moved = True
        for number in range(len(self.queues)):
            moved |= self._issue(number)
        return moved

    # The host

    def _take(self, item: Item, duration: float) -> bool:
        """Let the host do one item; False if it is blocked."""
        match item:
            case Kernel():
                return self._kernel(item, duration)
            case Communication():
                return self._communicate(item, duration)
            case Wait():
                work = self._works.get(item.work)
                if isinstance(work, _Post):
                    return self._wait_for_host(work)
                if work is not None:
                    self._enqueue(Kind.WAIT, str(item.stream), item, event=work)
            case RecordEvent():
                self._events[item.event] = self._enqueue(Kind.RECORD, str(item.stream), item)
            case WaitEvent():
                event = self._events.get(item.event)
                if event is not None:
                    self._enqueue(Kind.WAIT, str(item.stream), item, event=event)
            case Synchronize():
                return self._synchronize(item)
            case Begin():
                self.action = item
            case End():
                self.action = None
            case Iteration():
                self.iteration = item.number
            case _:
                pass  # memory
        return True

    def _kernel(self, item: Item, duration: float) -> bool:
        if not self._room():
            return False
        self.host_time += self._launch
        assert isinstance(item, Kernel)
        self._enqueue(Kind.KERNEL, str(item.stream), item, duration=duration)
        return True

    def _communicate(self, item: Communication, duration: float) -> bool:
        if item.on_host:
            self._works[item.work] = self._hosts.post(item, self.trace.rank, self.host_time)
            return True
        if not self._room():
            return False
        self.host_time += self._launch
        name = communicator(item, self.trace.rank)
        stream = str(item.stream)
        if item.asynchronous:
            event = self._enqueue(Kind.RECORD, stream, item)
            stream = f"nccl:{name}"
            self._enqueue(Kind.WAIT, stream, item, event=event)
        kernel = self._enqueue(Kind.COLLECTIVE, stream, item, duration=duration)
        kernel.communicator = self._last_on.get(name)
        self._last_on[name] = kernel
        kernel.meetings = self._meetings.register(item, self.trace.rank, name)
        if item.asynchronous:
            self._works[item.work] = self._enqueue(Kind.RECORD, stream, item)
        return True

    def _room(self) -> bool:
        """Whether one more kernel may be enqueued now, and the time from which on it may."""
        in_flight = self._in_flight
        while len(in_flight) >= self._run_ahead:
            start = in_flight[0].start
            if start is None:
                self.blocked = HostStop("is as many kernels ahead as it may be", in_flight[0])
                return False
            self._stop_until(start, "is as many kernels ahead as it may be", in_flight.popleft())
        self.blocked = None
        return True

    def _synchronize(self, item: Synchronize) -> bool:
        if item.event >= 0:
            event = self._events.get(item.event)
            waited = [] if event is None else [event]
        else:
            streams = list(self._last) if item.stream < 0 else [str(item.stream)]
            waited = [
                last[stream]
                for stream in streams
                for last in (self._last, self._last_kernel)
                if stream in last
            ]
        for command in waited:
            if command.end is None:
                self.blocked = HostStop(_reason(item), command)
                return False
        self.blocked = None
        for command in waited:
            assert command.end is not None
            self._stop_until(command.end, _reason(item), command)
        return True

    def _wait_for_host(self, post: _Post) -> bool:
        if post.end is None:
            self.blocked = post
            return False
        self.blocked = None
        self._stop_until(post.end, f"waits for {post.item.operations[0].name} of gloo", None)
        return True

    def _stop_until(self, time: float, why: str, command: Command | None) -> None:
        if time > self.host_time:
            self.host_time = time
            self.host_stop = HostStop(why, command)

    # The queues

    def _queue(self, stream: str) -> int:
        return self._queue_of.setdefault(stream, len(self._queue_of) % len(self.queues))

    def _enqueue(
        self,
        kind: Kind,
        stream: str,
        item: Item,
        *,
        duration: float = 0.0,
        event: Command | None = None,
    ) -> Command:
        command = Command(self, kind, stream, item)
        command.duration = duration
        command.event = event
        command.previous = self._last_kernel.get(stream)
        if kind is Kind.KERNEL or kind is Kind.COLLECTIVE:
            self._last_kernel[stream] = command
            self._in_flight.append(command)
        self._last[stream] = command
        self.commands.append(command)
        self.queues[self._queue(stream)].append(command)
        return command

    def _issue(self, number: int) -> bool:
        queue = self.queues[number]
        moved = False
        while queue and self._start(queue[0], self._issued[number]):
            self._issued[number] = queue.popleft()
            moved = True
        return moved

    def _start(self, command: Command, ahead: Command | None) -> bool:
        """Issue the command at the head of a queue; False if it has to wait still."""
        kind, previous = command.kind, command.previous
        time, bound, by = command.enqueued, Bound.HOST, None
        if ahead is not None:
            assert ahead.start is not None
            if ahead.start > time:
                time, bound, by = ahead.start, Bound.QUEUE, ahead
        if kind is Kind.RECORD:
            # Behind the last kernel of its stream, but it holds nobody up.
            command.start, command.bound, command.bound_by = time, bound, by
            if previous is None:
                command.end = time
            elif previous.end is not None:
                command.end = max(time, previous.end)
            else:
                previous.followers.append(command)
            return True
        if kind is Kind.WAIT:
            event = command.event
            assert event is not None
            if event.end is None:
                return False
            if event.end > time:
                time, bound, by = event.end, Bound.EVENT, event
            command.start = command.end = time
            command.bound, command.bound_by = bound, by
            return True
        if previous is not None:
            if previous.end is None:
                return False
            if previous.end > time:
                time, bound, by = previous.end, Bound.STREAM, previous
        before = command.communicator
        if before is not None:
            if before.end is None:
                return False
            if before.end > time:
                time, bound, by = before.end, Bound.COMMUNICATOR, before
        command.start, command.bound, command.bound_by = time, bound, by
        if kind is Kind.KERNEL:
            command.end = time + command.duration
            return True
        for each in self._meetings.start(command, command.meetings):
            if self._meetings.try_end(each, each.meetings):
                assert each.end is not None
                for event in each.followers:
                    assert event.start is not None
                    event.end = max(event.start, each.end)
        return True


def _reason(item: Synchronize) -> str:
    where = f" in {item.where.rpartition(':')[2]}" if item.where else ""
    return f"waits ({item.why}){where}"
