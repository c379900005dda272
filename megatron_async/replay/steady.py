"""What the steady state of a replayed run takes, and what held the computation up."""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from megatron_async.replay.commands import Bound, Command, Kind
from megatron_async.replay.costs import compute_stream
from megatron_async.replay.describe import describe
from megatron_async.replay.device import Device
from megatron_async.replay.rank import Rank
from megatron_async.replay.trace import Begin
from megatron_async.schedules.actions import Kind as ActionKind

__all__ = ["Cause", "Spin", "SteadyState", "steady_state"]

_EPSILON = 1e-9


@dataclass(frozen=True, kw_only=True)
class Cause:
    """Why a computing stream stood still."""

    stage: int
    text: str
    time: float
    """Milliseconds of an iteration, the largest of the stage's ranks."""


@dataclass(frozen=True, kw_only=True)
class Spin:
    """A kind of NCCL kernel that waits for peers and holds SMs meanwhile."""

    stage: int
    text: str
    time: float
    """Milliseconds of an iteration, the largest of the stage's ranks."""


@dataclass(frozen=True, kw_only=True)
class SteadyState:
    """The mean of the iterations that neither fill nor drain the pipeline.

    Attributes:
        time: of an iteration, in milliseconds.
        ideal: m (t_f + t_b) + t_opt, of the stage that has most to do.
        causes: why computing streams stood still, the largest first.
        spins: kernels that waited for peers, the largest first.
    """

    time: float
    ideal: float
    causes: list[Cause]
    spins: list[Spin]

    @property
    def ratio(self) -> float:
        """Time over ideal."""
        return self.time / self.ideal if self.ideal else float("nan")


def steady_state(device: Device) -> SteadyState:
    """Look at the steady state of a run.

    As in the list simulator (:class:`~megatron_async.schedules.simulator.Simulation`), it lasts
    from the end of one batch's backwards to that of another's: the first third of the iterations
    fills the pipeline and settles, the last ones drain it.

    Raises:
        ValueError: too few iterations.
    """
    first, last = _window(device.ranks[0])
    count = last - first
    ends = [_backward_ends(rank) for rank in device.ranks]
    work = [0.0] * device.ranks[0].trace.stages
    for stage, (forward, backward, optimizer) in enumerate(device.costs.per_stage(len(work))):
        rank = next(rank for rank in device.ranks if rank.trace.stage == stage)
        backwards = sum(
            action.action == ActionKind.BACKWARD.value and first < action.batch <= last
            for action in _actions(rank)
        )
        work[stage] = (backwards * (forward + backward) + count * optimizer) / count
    causes: dict[tuple[int, str], list[float]] = defaultdict(list)
    spins: dict[tuple[int, str], list[float]] = defaultdict(list)
    stages = {rank.trace.rank: rank.trace.stage for rank in device.ranks}
    for rank, end in zip(device.ranks, ends, strict=True):
        window = end[first], end[last]
        stage = rank.trace.stage
        for found, times in (
            (causes, _stood_still(rank, window, stages)),
            (spins, _spun(rank, window)),
        ):
            sums: dict[str, float] = defaultdict(float)
            for text, time in times:
                sums[text] += time / count
            for text, time in sums.items():
                found[stage, text].append(time)
    return SteadyState(
        time=(ends[0][last] - ends[0][first]) / count,
        ideal=max(work),
        causes=sorted(
            (Cause(stage=s, text=text, time=max(times)) for (s, text), times in causes.items()),
            key=lambda cause: -cause.time,
        ),
        spins=sorted(
            (Spin(stage=s, text=text, time=max(times)) for (s, text), times in spins.items()),
            key=lambda spin: -spin.time,
        ),
    )


def _actions(rank: Rank) -> Iterator[Begin]:
    return (item for item in rank.trace.items if isinstance(item, Begin))


def _window(rank: Rank) -> tuple[int, int]:
    actions = list(_actions(rank))
    backward = [a.batch for a in actions if a.action == ActionKind.BACKWARD.value]
    batches = sorted(set(backward))
    forwards = [i for i, a in enumerate(actions) if a.action == ActionKind.FORWARD.value]
    behind = actions[forwards[-1] + 1 :] if forwards else []
    draining = {a.batch for a in behind if a.action == ActionKind.BACKWARD.value}
    undrained = len(batches) - max(1, len(draining) - 1)
    if undrained < 3:
        raise ValueError(
            f"a steady state needs more than {len(batches)} iterations: the pipeline is filled in "
            "the first and drained in the last"
        )
    return batches[(undrained + 1) // 3], batches[undrained - 1]


def _backward_ends(rank: Rank) -> dict[int, float]:
    ends: dict[int, float] = defaultdict(float)
    for command in rank.commands:
        action = command.action
        if action is not None and action.action == ActionKind.BACKWARD.value:
            assert command.end is not None
            if command.kind is Kind.KERNEL:
                ends[action.batch] = max(ends[action.batch], command.end)
    return ends


def _stood_still(
    rank: Rank, window: tuple[float, float], stages: Mapping[int, int]
) -> Iterator[tuple[str, float]]:
    """(why, how long) for each gap on the computing stream."""
    stream = str(compute_stream(rank.trace))
    ended: float | None = None
    for command in rank.commands:
        if command.stream != stream or command.kind not in (Kind.KERNEL, Kind.COLLECTIVE):
            continue
        assert command.start is not None
        assert command.end is not None
        if ended is not None:
            gap = _overlap(ended, command.start, window)
            if gap > _EPSILON:
                yield _cause(command, stages), gap
        if command.kind is Kind.COLLECTIVE:
            gap = _overlap(command.start, command.start + command.spun, window)
            if gap > _EPSILON:
                yield _end(command, stages), gap
        ended = command.end


def _spun(rank: Rank, window: tuple[float, float]) -> Iterator[tuple[str, float]]:
    for command in rank.commands:
        if command.kind is Kind.COLLECTIVE:
            assert command.start is not None
            time = _overlap(command.start, command.start + command.spun, window)
            if time > _EPSILON:
                yield describe(command), time


def _overlap(begin: float, end: float, window: tuple[float, float]) -> float:
    return max(min(end, window[1]) - max(begin, window[0]), 0.0)


def _cause(command: Command, stages: Mapping[int, int]) -> str:
    """Follow what a command waited for last up to a communication, a kernel or the host."""
    node = command
    held: Command | None = None
    while True:
        by = node.bound_by
        if node.bound is Bound.HOST or by is None:
            stop = node.stopped
            text = "the host was late" if stop is None else f"the host {stop.why}"
            break
        if node.bound is Bound.QUEUE:
            node = by
            if held is None and node.stream != command.stream:
                held = node
            continue
        if by.kind is Kind.RECORD:
            before = by.previous
            if before is None or before.end != by.end:
                node = by
                continue
            by = before
        text = _end(by, stages)
        break
    return text if held is None else f"queued behind {describe(held)}: {text}"


def _end(command: Command, stages: Mapping[int, int]) -> str:
    """Why a kernel ended no sooner."""
    needed = command.needed
    if not isinstance(needed, Command):
        return describe(command)
    stage = stages[needed.rank]
    whom = f"stage {stage}" if stage != stages[command.rank] else "another rank of the stage"
    doing = f", there in {needed.action.action}" if needed.action is not None else ""
    return f"{describe(command)} waits for {whom}{doing}"
