"""When an NCCL kernel ends: it spins until the peers that it needs have started theirs.

- All-reduce, all-gather, reduce-scatter, all-to-all: when all ranks of the group have started.
- Broadcast: a chain from the root on, in ring order. A rank needs those before it.
- Reduce: a chain that begins behind the root (root + 1, root + 2, ...) and ends at the root. A rank
  needs those before it, so the one behind the root waits for nobody.
- Gather and scatter: sends to the root, or from it.
- Send and receive: when the other side has started. Several in one kernel progress independently,
  and the kernel ends with the last of them.

Source: NVIDIA/nccl, src/device/{reduce,broadcast,sendrecv}.h; see docs/replay.md.
"""

from collections import defaultdict
from dataclasses import dataclass, field

from megatron_async.replay.trace import Communication, Operation

__all__ = ["Meeting", "Meetings", "MismatchError", "Participant"]

_ONE_TO_ONE = ("send", "recv")


class MismatchError(Exception):
    """The ranks of a communicator enqueue different operations; on a GPU they would hang, or take
    each other's data. The message says which."""


class Participant:
    """What one rank does in communications that are launched together.

    Attributes:
        rank: global rank.
        start: when it started; None until then.
        end: when it had ended.
        duration: what it takes once all that it needs have started.
        needed: of those that it waited for, the one that came last; None if none came later.
        meetings: the communications.
    """

    __slots__ = ("duration", "end", "meetings", "needed", "rank", "start")

    def __init__(self, rank: int, *, start: float | None = None) -> None:
        self.rank = rank
        self.start = start
        self.end: float | None = None
        self.duration = 0.0
        self.needed: Participant | None = None
        self.meetings: list[Meeting] = []


@dataclass(slots=True)
class Meeting:
    """One communication and the kernels that have started so far."""

    name: str
    """Of the operation."""
    ranks: tuple[int, ...]
    """In the order of the chain, if there is one."""
    chain: bool = False
    started: dict[int, Participant] = field(default_factory=dict)

    def missing_for(self, rank: int) -> list[int]:
        """Ranks that have to start theirs before the kernel of ``rank`` can end."""
        needed = self.ranks
        if self.chain:
            needed = self.ranks[: self.ranks.index(rank)]
        return [each for each in needed if each not in self.started]


class Meetings:
    """All communication between the ranks.

    Args:
        latency: of one message.
    """

    def __init__(self, latency: float) -> None:
        self._latency = latency
        self._counts: dict[tuple[str, int, str], int] = defaultdict(int)
        self._meetings: dict[tuple[str, int], Meeting] = {}
        self._pairs: dict[tuple[str, int, int, int], Meeting] = {}

    def register(self, item: Communication, rank: int, communicator: str) -> list[Meeting]:
        """Return the meetings of a communication of ``rank``; called in the order of its calls.

        Raises:
            MismatchError: another rank has another operation in this place.
        """
        operation = item.operations[0]
        if operation.name in _ONE_TO_ONE:
            return [self._pair(each, rank, communicator) for each in item.operations]
        number = self._count(communicator, rank, "collective")
        meeting = self._meetings.get((communicator, number))
        if meeting is None:
            meeting = self._meetings[communicator, number] = _meeting(operation, item.ranks)
        if meeting.name != operation.name:
            raise MismatchError(
                f"rank {rank} enqueues {operation.name} as operation {number} on communicator "
                f"{communicator} of ranks {', '.join(map(str, item.ranks))}, another rank "
                f"{meeting.name}"
            )
        return [meeting]

    def _pair(self, operation: Operation, rank: int, communicator: str) -> Meeting:
        sends = operation.name == "send"
        source, target = (rank, operation.peer) if sends else (operation.peer, rank)
        number = self._count(communicator, rank, f"{operation.name} {operation.peer}")
        key = (communicator, source, target, number)
        return self._pairs.setdefault(key, Meeting(name="message", ranks=(source, target)))

    def _count(self, communicator: str, rank: int, what: str) -> int:
        number = self._counts[communicator, rank, what]
        self._counts[communicator, rank, what] = number + 1
        return number

    def start(self, kernel: Participant) -> list[Participant]:
        """A kernel has started; return those whose end is known by that."""
        for meeting in kernel.meetings:
            meeting.started[kernel.rank] = kernel
        waiting = {
            id(each): each
            for meeting in kernel.meetings
            for each in meeting.started.values()
            if each.end is None
        }
        return [each for each in waiting.values() if self._try_end(each)]

    def _try_end(self, kernel: Participant) -> bool:
        """Give a kernel that has started its end, if that is known."""
        assert kernel.start is not None
        last, needed, hops = kernel.start, None, 1
        for meeting in kernel.meetings:
            if meeting.missing_for(kernel.rank):
                return False
            if len(meeting.ranks) == 1:
                hops = 0
                continue
            ready, of, path = self._ready(kernel, meeting)
            if ready > last:
                last, needed = ready, of
            hops = max(hops, path)
        kernel.end = last + hops * self._latency + kernel.duration
        kernel.needed = needed
        return True

    def _ready(
        self, kernel: Participant, meeting: Meeting
    ) -> tuple[float, Participant | None, int]:
        """When all that a kernel needs has started, whose came last, and over how many messages."""
        peers = list(meeting.ranks)
        if meeting.chain:
            peers = peers[: peers.index(kernel.rank) + 1]
        times = {rank: meeting.started[rank].start or 0.0 for rank in peers}
        last = max(peers, key=times.__getitem__)
        hops = len(peers) - peers.index(last) if meeting.chain else 1
        of = meeting.started[last]
        return times[last], (None if of is kernel else of), hops


def _meeting(operation: Operation, ranks: tuple[int, ...]) -> Meeting:
    if operation.name in ("broadcast", "reduce") and operation.peer in ranks:
        root = ranks.index(operation.peer)
        begin = root if operation.name == "broadcast" else root + 1
        return Meeting(operation.name, (*ranks[begin:], *ranks[:begin]), chain=True)
    return Meeting(operation.name, ranks)
