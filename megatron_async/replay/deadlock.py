"""Who waits for whom, when no rank can go on."""

from collections.abc import Sequence

from megatron_async.replay.commands import Command, HostStop, Kind
from megatron_async.replay.describe import describe
from megatron_async.replay.hosts import Post
from megatron_async.replay.rank import Rank
from megatron_async.replay.trace import Communication

__all__ = ["explain"]

type _Node = tuple[int, int]
"""(rank, number of a queue), -1 for its host, -2 for the thread beside the main one."""
_HOST = -1
_THREAD = -2


def explain(ranks: Sequence[Rank]) -> list[str]:
    """Return a line for each host and each queue that cannot go on, and the circle among them."""
    found = _Explanation(ranks)
    lines = [
        found.line((rank.trace.rank, number))
        for rank in ranks
        for number in (_HOST, _THREAD, *range(len(rank.queues)))
        if found.stuck(rank, number)
    ]
    circle = found.circle()
    if circle:
        lines += ["the circle:", *(f"  {found.line(node)}" for node in circle)]
    return lines or ["a communication at the end of the trace has no counterpart"]


class _Explanation:
    def __init__(self, ranks: Sequence[Rank]) -> None:
        self.ranks = ranks

    @staticmethod
    def stuck(rank: Rank, number: int) -> bool:
        if number == _HOST:
            return rank.next_item is not None
        if number == _THREAD:
            return rank.thread.busy
        return bool(rank.queues[number])

    def line(self, node: _Node) -> str:
        rank = self.ranks[node[0]]
        who = f"rank {node[0]} (stage {rank.trace.stage})"
        if node[1] in (_HOST, _THREAD):
            name = "the host" if node[1] == _HOST else "the host's other thread"
            blocked = self._blocked(node)
            if blocked is None:
                return f"{who}: {name} has come to its end"
            if isinstance(blocked, HostStop):
                of = f": {self._ended(blocked.of)}" if blocked.of is not None else ""
                return f"{who}: {name} {blocked.why}{of}"
            operation = blocked.item.operations[0]
            return f"{who}: {name} waits for {operation.name} of gloo"
        head = rank.queues[node[1]][0]
        behind = len(rank.queues[node[1]]) - 1
        return (
            f"{who}: queue {node[1]}, {behind} commands behind its head: "
            f"{describe(head, numbers=True)} waits: {self._ended(self._awaited(head))}"
        )

    def _blocked(self, node: _Node) -> HostStop | Post | None:
        rank = self.ranks[node[0]]
        return rank.blocked if node[1] == _HOST else rank.thread.blocked

    def _awaited(self, command: Command) -> Command | None:
        """What a command at the head of a queue waits for."""
        for other in (command.event, command.previous, command.communicator):
            if other is not None and other.end is None:
                return other
        return None

    def _ended(self, command: Command | None) -> str:
        """Why a command has not ended."""
        if command is None:
            return "nothing"
        if command.start is None:
            return f"{describe(command, numbers=True)} has not been issued"
        running = self._running(command)
        if running is None:
            return f"{describe(command, numbers=True)} runs"
        peers = sorted({rank for m in running.meetings for rank in m.missing_for(running.rank)})
        text = f"{describe(running, numbers=True)} spins for rank "
        return text + ", ".join(map(str, peers))

    @staticmethod
    def _running(command: Command) -> Command | None:
        """The collective that a command, which has been issued, waits for."""
        if command.kind is Kind.RECORD:
            return command.previous
        return command if command.kind is Kind.COLLECTIVE else None

    def circle(self) -> list[_Node]:
        """Follow what the first stuck node waits for, until a node comes again."""
        start = next(
            (
                (rank.trace.rank, number)
                for rank in self.ranks
                for number in (*range(len(rank.queues)), _HOST, _THREAD)
                if self.stuck(rank, number)
            ),
            None,
        )
        path: list[_Node] = []
        node = start
        while node is not None and node not in path:
            path.append(node)
            node = self._next(node)
        return [] if node is None else path[path.index(node) :]

    def _next(self, node: _Node) -> _Node | None:
        rank = self.ranks[node[0]]
        if node[1] in (_HOST, _THREAD):
            blocked = self._blocked(node)
            if isinstance(blocked, HostStop):
                if blocked.of is not None:
                    return self._behind(blocked.of)
                return (node[0], _THREAD) if rank.thread.busy else None
            if blocked is None:
                return None
            missing = [p for m in blocked.meetings for p in m.missing_for(blocked.rank)]
            if not missing:
                return None
            busy = node[1] == _THREAD and self.ranks[missing[0]].thread.busy
            return missing[0], _THREAD if busy else _HOST
        if not rank.queues[node[1]]:
            return None
        awaited = self._awaited(rank.queues[node[1]][0])
        return None if awaited is None else self._behind(awaited)

    def _behind(self, command: Command) -> _Node | None:
        """Where the reason is that a command has not ended."""
        if command.start is None:
            return self._place(command.rank, command)
        running = self._running(command)
        if running is None:
            return None
        for meeting in running.meetings:
            for peer in meeting.missing_for(running.rank):
                for number, queue in enumerate(self.ranks[peer].queues):
                    if any(meeting in each.meetings for each in queue if _meets(each)):
                        return peer, number
                return peer, _HOST
        return None

    def _place(self, rank: int, command: Command) -> _Node | None:
        for number, queue in enumerate(self.ranks[rank].queues):
            if command in queue:
                return rank, number
        return None


def _meets(command: Command) -> bool:
    return command.kind is Kind.COLLECTIVE and isinstance(command.item, Communication)
