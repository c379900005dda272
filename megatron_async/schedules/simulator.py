"""Run action lists on a clock: time per iteration, idle time, deadlocks.

Each stage takes its actions one after the other. A forward, a backward and an optimizer step take
the time given for the stage; communication takes only the time that the stage waits in it. No
device, process or network is involved, so the result is exact for these assumptions and says
nothing about contention between stages or between computation and communication.

The waits that cross stages:

- A receive ends when the tensor has arrived, `latency` after it was sent. Sends are buffered, or,
  with `rendezvous`, a transfer begins when both sides have come to it and both wait for its end, as
  with gloo and with NCCL. A combined operation ends when both of its halves have. A receive that is
  posted has been come to when it is posted; a send that nobody waits for is not waited for with
  `rendezvous` either, and the sender goes on.
- `UPDATE` is Megatron's own step: it begins when every stage has come to it (the norm of the
  gradient) and ends when every stage has finished it (the success flag).
- `LAUNCH_UPDATE` waits for nobody, except that stage 0 gathers the other stages' parts, all of
  which were posted before, because stage 0 finishes every batch last. `COMPLETE_UPDATE` waits for
  the total that stage 0 sends back.

Data-parallel replicas do the same at the same time. So a reduction or a gather takes its time from
its start on, beside the computation, and its finish waits for what is left. The gradients are ready
at the end of a batch's last backward, and a reduction can start no sooner.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from megatron_async.schedules.actions import (
    COMPUTE,
    GATHERS,
    REDUCTIONS,
    UNWAITED_SENDS,
    UPDATES,
    Action,
    Kind,
    Transfer,
)

__all__ = ["Costs", "DeadlockError", "Event", "Simulation", "simulate"]


_BACKWARDS = frozenset({Kind.BACKWARD, Kind.BACKWARD_WEIGHT})


class DeadlockError(Exception):
    """Every stage that has not finished waits for another one. The message says for what."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """What the actions take, in one unit of the caller's choice (milliseconds, say).

    `forward` and `backward` are per microbatch, through all model chunks of the stage; `optimizer`
    is per step, `reduction` per batch and `gather` per version. A single number holds for every
    stage; forward, backward and optimizer also take a sequence with one per stage. `latency` is
    that of one message between two stages. Where lists split the backward, each half takes half of
    its time.
    """

    forward: float | Sequence[float]
    backward: float | Sequence[float]
    optimizer: float | Sequence[float] = 0.0
    latency: float = 0.0
    reduction: float = 0.0
    """Of a batch's gradients over the data-parallel replicas."""
    gather: float = 0.0
    """Of a new version's parameters over the data-parallel replicas."""

    def per_stage(self, stages: int) -> list[tuple[float, float, float]]:
        """Return (forward, backward, optimizer) of each stage.

        Raises:
            ValueError: a negative time, or a sequence that has not one entry a stage.
        """
        columns: list[list[float]] = []
        for name in ("forward", "backward", "optimizer"):
            given = getattr(self, name)
            column = list(given) if isinstance(given, Sequence) else [float(given)] * stages
            if len(column) != stages:
                raise ValueError(f"{name} has {len(column)} times for {stages} stages")
            columns.append(column)
        others = (self.latency, self.reduction, self.gather)
        every = [time for column in columns for time in column] + list(others)
        if not all(math.isfinite(time) for time in every):
            raise ValueError("times must be finite")
        if min(every) < 0:
            raise ValueError("times must not be negative")
        return list(zip(*columns, strict=True))


@dataclass(frozen=True, slots=True)
class Event:
    """One action on the clock: waits from `reached` to `started`, works until `stopped`, waits
    until `ended`. Communication only waits."""

    action: Action
    reached: float
    started: float
    stopped: float
    ended: float

    @property
    def busy(self) -> float:
        return self.stopped - self.started

    @property
    def waited(self) -> float:
        return self.ended - self.reached - self.busy


@dataclass(frozen=True)
class Simulation:
    """What every stage did when."""

    events: list[list[Event]]
    """`events[s]`: stage s's, in order."""
    costs: Costs
    chunks: int

    @property
    def stages(self) -> int:
        return len(self.events)

    @property
    def makespan(self) -> float:
        """From the start to the end of the last action, fill and drain included."""
        return max((event.ended for events in self.events for event in events), default=0.0)

    @cached_property
    def batches(self) -> list[int]:
        """The batches that have their update, in order."""
        return [
            event.action.batch
            for event in self.events[0]
            if event.action.kind in (Kind.UPDATE, Kind.LAUNCH_UPDATE)
        ]

    @cached_property
    def window(self) -> tuple[int, int]:
        """Two batches (first, last): the steady state lasts from the end of the one's backwards to
        the end of the other's. The first third of the calls fills the pipeline and settles, the
        last call drains it (with PipeDream the last p - 1 do).

        Raises:
            ValueError: fewer than 3 calls that do not drain.
        """
        undrained = len(self.batches) - self._draining
        if undrained < 3:
            raise ValueError(
                f"a steady state needs at least {3 + self._draining} iterations, got "
                f"{len(self.batches)}: the pipeline is filled in the first and drained in the last"
            )
        return self.batches[(undrained + 1) // 3], self.batches[undrained - 1]

    @property
    def _draining(self) -> int:
        """How many calls at the end are counted as draining: at least one, and all in which stage 0
        forwards nothing any more."""
        compute = [event.action for event in self.events[0] if event.action.kind in COMPUTE]
        last = max((i for i, a in enumerate(compute) if a.kind is Kind.FORWARD), default=-1)
        return max(1, len({action.batch for action in compute[last + 1 :]}) - 1)

    def backward_end(self, stage: int, batch: int) -> float:
        """When the batch's last backward ended on the stage."""
        return max(
            event.ended
            for event in self.events[stage]
            if event.action.kind in _BACKWARDS and event.action.batch == batch
        )

    @cached_property
    def iteration_time(self) -> float:
        """Mean time of an iteration in the steady state."""
        first, last = self.window
        return (self.backward_end(0, last) - self.backward_end(0, first)) / (last - first)

    @cached_property
    def ideal_time(self) -> float:
        """Mean of m (t_f + t_b) + t_opt over the same iterations, for the stage that has most to
        do: no schedule that uses one stage's whole work for each batch is faster."""
        first, last = self.window
        work = [0.0] * self.stages
        for stage, (forward, backward, optimizer) in enumerate(self.costs.per_stage(self.stages)):
            microbatches = sum(
                event.action.kind is Kind.BACKWARD and first < event.action.batch <= last
                for event in self.events[stage]
            )
            work[stage] = microbatches / self.chunks * (forward + backward)
            work[stage] += (last - first) * optimizer
        return max(work) / (last - first)

    @property
    def ratio_to_ideal(self) -> float:
        return self.iteration_time / self.ideal_time if self.ideal_time else float("nan")

    @cached_property
    def idle_shares(self) -> list[float]:
        """For each stage the share of the steady state in which it waits."""
        first, last = self.window
        shares: list[float] = []
        for stage, events in enumerate(self.events):
            begin, end = self.backward_end(stage, first), self.backward_end(stage, last)
            busy = sum(
                max(min(event.stopped, end) - max(event.started, begin), 0.0) for event in events
            )
            shares.append(1.0 - busy / (end - begin) if end > begin else 0.0)
        return shares


def simulate(
    lists: Sequence[Sequence[Action]],
    costs: Costs,
    *,
    rendezvous: bool = False,
) -> Simulation:
    """Run the lists of all stages (`lists[s]` is stage s's) from time 0.

    Args:
        lists: As `validate` accepts them; wrong ones may deadlock here.
        costs: How long everything takes.
        rendezvous: Sends wait for their receiver. Not for interleaved lists, whose sends Megatron
            makes asynchronous.

    Raises:
        DeadlockError: Stages wait for each other.
        ValueError: Times that do not fit, or `rendezvous` with interleaved lists.
    """
    run = _Run(lists, costs, rendezvous=rendezvous)
    run.finish()
    return Simulation(events=run.events, costs=costs, chunks=run.chunks)


class _Run:
    """The clocks. Stages are advanced in turn, each as far as it gets; since what an action waits
    for is fixed, the order in which stages get their turns does not change any time."""

    def __init__(
        self,
        lists: Sequence[Sequence[Action]],
        costs: Costs,
        *,
        rendezvous: bool,
    ) -> None:
        self.lists = lists
        self.stages = len(lists)
        self.chunks = 1 + max((a.chunk for actions in lists for a in actions), default=0)
        self.split = any(a.kind is Kind.BACKWARD_WEIGHT for actions in lists for a in actions)
        if rendezvous and self.chunks > 1:
            raise ValueError("interleaved schedules send asynchronously, without rendezvous")
        self.times = costs.per_stage(self.stages)
        self.latency = costs.latency
        self.reduction = costs.reduction
        self.gather = costs.gather
        self.rendezvous = rendezvous
        self.events: list[list[Event]] = [[] for _ in lists]
        self.clock = [0.0] * self.stages
        self.sends: dict[Transfer, float] = {}
        self.receives: dict[Transfer, float] = {}
        self.arrivals: dict[tuple[Kind, int], dict[int, float]] = {}
        """For the updates: when each stage came to (kind, batch)."""
        self.totals: dict[int, float] = {}
        """When stage 0 had the total of a batch's update."""
        self.backward_ends: dict[tuple[int, int], float] = {}
        """When the last backward of (stage, batch) so far ended."""
        self.gathers: dict[tuple[int, int], float] = {}
        """When the gather of (stage, version) started."""

    def finish(self) -> None:
        moved = True
        while moved:
            moved = False
            for stage, actions in enumerate(self.lists):
                while len(self.events[stage]) < len(actions):
                    action = actions[len(self.events[stage])]
                    event = self._try(stage, action, self.clock[stage])
                    if event is None:
                        break
                    self.events[stage].append(event)
                    self.clock[stage] = event.ended
                    if action.kind in _BACKWARDS:
                        self.backward_ends[stage, action.batch] = event.ended
                    moved = True
        stuck = [
            f"stage {stage} in {actions[len(self.events[stage])]}"
            for stage, actions in enumerate(self.lists)
            if len(self.events[stage]) < len(actions)
        ]
        if stuck:
            raise DeadlockError("stages wait for each other: " + "; ".join(stuck))

    def _try(self, stage: int, action: Action, now: float) -> Event | None:
        """The event of the stage's next action, None if what it waits for is not yet known."""
        forward, backward, optimizer = self.times[stage]
        if action.kind in COMPUTE:
            takes = (forward if action.kind is Kind.FORWARD else backward) / self.chunks
            if self.split and action.kind is not Kind.FORWARD:
                takes /= 2
            return Event(action, now, now, now + takes, now + takes)
        if action.kind in REDUCTIONS or action.kind in GATHERS:
            end = self._collective_end(stage, action, now)
            return Event(action, now, end, end, end)
        if action.kind not in UPDATES:
            return self._communicate(stage, action, now)
        arrivals = self.arrivals.setdefault((action.kind, action.batch), {})
        arrivals.setdefault(stage, now)
        everyone = len(arrivals) == self.stages
        message = self.latency if self.stages > 1 else 0.0
        if action.kind is Kind.UPDATE:
            if not everyone:
                return None
            start = max(arrivals.values()) + message
            end = start + max(step for _, _, step in self.times) + message
            return Event(action, now, start, start + optimizer, end)
        if action.kind is Kind.COMPLETE_UPDATE:
            if action.batch not in self.totals:
                return None
            start = max(now, self.totals[action.batch] + (message if stage else 0.0))
            return Event(action, now, start, start + optimizer, start + optimizer)
        if stage == 0:
            if not everyone:
                return None
            posted = [at for other, at in arrivals.items() if other != 0]
            end = self.totals[action.batch] = max(now, max(posted, default=now) + message)
        else:
            end = now
        return Event(action, now, end, end, end)

    def _collective_end(self, stage: int, action: Action, now: float) -> float:
        """When a stage goes on behind the start or the finish of a data-parallel collective."""
        if action.kind is Kind.START_GATHER:
            self.gathers[stage, action.version] = now
        elif action.kind is Kind.FINISH_REDUCTION:
            return max(now, self.backward_ends[stage, action.batch] + self.reduction)
        elif action.kind is Kind.FINISH_GATHER:
            return max(now, self.gathers[stage, action.version] + self.gather)
        return now

    def _communicate(self, stage: int, action: Action, now: float) -> Event | None:
        posted = action.posted(stages=self.stages)
        if posted is not None:
            self.receives.setdefault(posted, now)
        sent = action.sent(stages=self.stages, chunks=self.chunks)
        received = action.received(stages=self.stages, chunks=self.chunks)
        end = now
        if sent is not None:
            self.sends.setdefault(sent, now)
        if received is not None:
            self.receives.setdefault(received, now)
            if received not in self.sends:
                return None
            begin = self.sends[received]
            if self.rendezvous:
                begin = max(begin, self.receives[received])
            end = max(end, begin + self.latency)
        if sent is not None and self.rendezvous and action.kind not in UNWAITED_SENDS:
            if sent not in self.receives:
                return None
            end = max(end, max(self.sends[sent], self.receives[sent]) + self.latency)
        return Event(action, now, end, end, end)
