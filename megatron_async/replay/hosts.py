"""What hosts do without their device: requests of gloo, and tasks of a thread beside the main one.

The rules are those of :mod:`.device`.
"""

from collections import deque
from collections.abc import Mapping

from megatron_async.replay.commands import Command, HostStop
from megatron_async.replay.nccl import Meetings, Participant
from megatron_async.replay.trace import Communication, Item, Synchronize, Task, Trace, Wait

__all__ = ["HostThread", "Hosts", "Post", "reason"]


class Post(Participant):
    """A request of gloo that a host has made."""

    __slots__ = ("item",)

    def __init__(self, item: Communication, rank: int, now: float) -> None:
        super().__init__(rank, start=now)
        self.item = item


class Hosts:
    """Requests of gloo, between the hosts: when each host has posted its part."""

    def __init__(self, latency: float) -> None:
        self.posts = Meetings(latency)

    def post(self, item: Communication, rank: int, now: float) -> Post:
        post = Post(item, rank, now)
        post.meetings = self.posts.register(item, rank, f"gloo:{item.group}")
        self.posts.start(post)
        return post


class HostThread:
    """The thread that does what the main one leaves to it, one task after the other.

    Args:
        trace: the rank's.
        hosts: of all ranks.
        events: of the device, by number.

    Attributes:
        ended: when each task did.
        blocked: what keeps it from going on, if something does.
    """

    def __init__(self, trace: Trace, hosts: Hosts, events: Mapping[int, Command]) -> None:
        self.ended: dict[int, float] = {}
        self.blocked: HostStop | Post | None = None
        self._rank = trace.rank
        self._hosts = hosts
        self._events = events
        self._tasks = {item.task: item.items for item in trace.items if isinstance(item, Task)}
        self._given: deque[tuple[int, float]] = deque()
        self._works: dict[int, Post] = {}
        self._position = 0
        self._time = 0.0

    @property
    def busy(self) -> bool:
        """Whether there is a task that has not ended."""
        return bool(self._given)

    def hand_over(self, task: int, now: float) -> None:
        """Called by the main thread. A task that had not ended when the recording did is left
        out."""
        if task in self._tasks:
            self._given.append((task, now))

    def advance(self) -> bool:
        """Go on as far as it gets; returns whether anything moved."""
        moved = False
        while self._given:
            task, given = self._given[0]
            if self._position == 0:
                self._time = max(self._time, given)
            items = self._tasks[task]
            while self._position < len(items) and self._take(items[self._position]):
                self._position += 1
                moved = True
            if self._position < len(items):
                break
            self.ended[task] = self._time
            self._given.popleft()
            self._position = 0
            moved = True
        return moved

    def _take(self, item: Item) -> bool:
        self.blocked = None
        match item:
            case Communication():
                self._works[item.work] = self._hosts.post(item, self._rank, self._time)
            case Wait() if item.work in self._works:
                post = self._works[item.work]
                if post.end is None:
                    self.blocked = post
                    return False
                self._time = max(self._time, post.end)
            case Synchronize() if item.event in self._events:
                event = self._events[item.event]
                if event.end is None:
                    self.blocked = HostStop(reason(item), event)
                    return False
                self._time = max(self._time, event.end)
            case _:
                pass  # memory
        return True


def reason(item: Synchronize) -> str:
    """Why the host waits."""
    where = f" in {item.where.rpartition(':')[2]}" if item.where else ""
    return f"waits ({item.why}){where}"
