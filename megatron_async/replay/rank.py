"""One rank: its host, and the hardware queues of its device.

The rules are those of :mod:`.device`.
"""

from collections import deque

from megatron_async.replay.commands import Bound, Command, HostStop, Kind
from megatron_async.replay.costs import Durations
from megatron_async.replay.hosts import Hosts, HostThread, Post, reason
from megatron_async.replay.nccl import Meetings
from megatron_async.replay.trace import (
    Await,
    Begin,
    Communication,
    End,
    HandOver,
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

__all__ = ["Rank"]


class Rank:
    """One rank: its host and the queues of its device.

    Attributes:
        commands: all that were enqueued, in the host's order.
        blocked: what keeps the host from its next item, if something does.
        thread: of the host, beside the main one.
    """

    def __init__(
        self,
        trace: Trace,
        durations: Durations,
        meetings: Meetings,
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
        self.blocked: HostStop | Post | None = None
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
        self.thread = HostThread(trace, hosts, self._events)
        self._works: dict[int, Command | Post] = {}
        self._in_flight: deque[Command] = deque()
        for stream in trace.streams:
            self._queue(stream)

    @property
    def finished(self) -> bool:
        """Whether everything has been enqueued, issued, and ended."""
        return (
            self._position == len(self.trace.items)
            and not any(self.queues)
            and not self.thread.busy
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
        moved |= self.thread.advance()
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
                if isinstance(work, Post):
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
            case HandOver():
                self.thread.hand_over(item.task, self.host_time)
            case Await():
                return self._await(item)
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
                self.blocked = HostStop(reason(item), command)
                return False
        self.blocked = None
        for command in waited:
            assert command.end is not None
            self._stop_until(command.end, reason(item), command)
        return True

    def _wait_for_host(self, post: Post) -> bool:
        if post.end is None:
            self.blocked = post
            return False
        self.blocked = None
        self._stop_until(post.end, f"waits for {post.item.operations[0].name} of gloo", None)
        return True

    def _await(self, item: Await) -> bool:
        where = f" in {item.where.rpartition(':')[2]}" if item.where else ""
        why = f"waits for another thread{where}"
        end = self.thread.ended.get(item.task)
        if end is None:
            self.blocked = HostStop(why)
            return False
        self.blocked = None
        self._stop_until(end, why, None)
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
        for each in self._meetings.start(command):
            assert isinstance(each, Command)
            assert each.end is not None
            for event in each.followers:
                assert event.start is not None
                event.end = max(event.start, each.end)
        return True
