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

from collections.abc import Sequence
from dataclasses import dataclass

from megatron_async.replay.costs import Durations
from megatron_async.replay.deadlock import explain
from megatron_async.replay.hosts import Hosts
from megatron_async.replay.nccl import Meetings
from megatron_async.replay.rank import Rank
from megatron_async.replay.trace import Trace
from megatron_async.schedules.simulator import Costs

__all__ = ["Device", "DeviceDeadlock", "run"]


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

    ranks: list[Rank]
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
        MismatchError: ranks enqueue different operations on a communicator.
        ValueError: a number that makes no sense.
    """
    if connections < 1 or run_ahead < 1 or launch < 0:
        raise ValueError("connections and run_ahead are 1 or more, launch is not negative")
    meetings = Meetings(costs.latency)
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
        raise DeviceDeadlock(explain(ranks))
    return Device(ranks=ranks, costs=costs)
