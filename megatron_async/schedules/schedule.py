"""What a pipeline schedule is: a record of its lists, its weight versions and what it needs.

Everything that depends on the schedule reads the record: the command line and the checks, the
runtime, the weights, the corrections, the checkpoints, the planner, the timeline, the study and the
documentation. A schedule is one file with one record, and adding one is registering it
(:mod:`megatron_async.schedules`). Nothing here needs torch or a device.

Notation as in :mod:`megatron_async.schedules.actions`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from megatron_async.registry import Flag
from megatron_async.schedules.actions import GATHERS, UPDATES, Action, Kind, warmup_microbatches

__all__ = [
    "Call",
    "Pipeline",
    "Problem",
    "Schedule",
    "VersionRule",
    "action_lists",
    "extra_ahead",
    "fixed_delay",
    "made_by_all_stages",
    "settled_calls",
]


@dataclass(frozen=True, kw_only=True)
class Pipeline:
    """What of a run's layout and flags decides on the order of actions; the same on all stages.

    Attributes:
        stages: p.
        deferred: updates are launched at the end of a batch and completed during the next one.
        gather_ahead: the parameters of a new version are gathered under computation
            (``--overlap-param-gather``).
        reduce_late: a batch's gradients are reduced under the next batch
            (``--second-grad-buffer``).
        chunks: model chunks on each stage, above 1 with interleaved stages.
        replicas: data-parallel replicas of each stage.
        extra_warmup: e, how many microbatches more than 1F1B the first stage has in flight, so that
            late messages do not hold it up, at most p - 1; the others see :func:`extra_ahead`.
        flags: the values of the schedule's own flags by their ``dest``.
    """

    stages: int
    deferred: bool = True
    gather_ahead: bool = False
    reduce_late: bool = False
    chunks: int = 1
    replicas: int = 1
    extra_warmup: int = 0
    flags: Mapping[str, Any] = field(default_factory=dict)

    def value(self, flag: Flag) -> Any:
        """Return the value of one of the schedule's own flags."""
        return self.flags.get(flag.dest, flag.default)


@dataclass(frozen=True, kw_only=True)
class Call:
    """One call of the forward-backward function on one stage.

    Attributes:
        pipeline: of the run.
        stage: s.
        batch: k, the batch that the call runs backward, counted from the start of the asynchronous
            segment.
        microbatches: m of batch k.
        next_microbatches: m of batch k + 1.
        start: the batch of the segment's first call. Above 0 in a resumed run: the versions that
            its first batches need are at hand, and no update is pending.
        batches_left: how many batches the segment still has, batch k included; None if its end is
            not in sight.
    """

    pipeline: Pipeline
    stage: int
    batch: int
    microbatches: int
    next_microbatches: int
    start: int = 0
    batches_left: int | None = None

    @property
    def first(self) -> bool:
        """Whether the pipeline is empty at the start of the call."""
        return self.batch == self.start

    @property
    def last(self) -> bool:
        """Whether the pipeline is to be empty at the end of the call."""
        return self.batches_left == 1


@dataclass(frozen=True, kw_only=True)
class Problem:
    """Something that a schedule cannot run with.

    Attributes:
        flag: the flag at fault.
        reason: why; no full stop at the end.
        remedy: what to do instead; a sentence.
    """

    flag: str
    reason: str
    remedy: str

    @property
    def message(self) -> str:
        """On one line."""
        return f"{self.flag}: {self.reason}. {self.remedy}"


@dataclass(frozen=True, kw_only=True)
class VersionRule:
    """Which weight versions the microbatches of a batch use.

    Attributes:
        forward: from a batch k, the index i of a microbatch in it and a stage s, the version that
            the microbatch runs forward on.
        backward: likewise for its backward.
        kept: from a stage, how many versions it holds at once, the newest included. Version v lies
            in buffer v mod kept.
        staleness: from a stage, by how many updates its gradients are late once training is under
            way; a mean over the microbatches of a batch.
    """

    forward: Callable[[int, int, int], int]
    backward: Callable[[int, int, int], int]
    kept: Callable[[int], int]
    staleness: Callable[[int], float]

    def mean_delay(self, batch: int, microbatches: int, stage: int) -> float:
        """By how many updates the gradient of one batch is late: the mean of k - v over its
        microbatches, with v the versions of their forwards and backwards."""
        late = (
            2 * batch - self.forward(batch, i, stage) - self.backward(batch, i, stage)
            for i in range(microbatches)
        )
        return sum(late) / (2 * microbatches)

    def mean_staleness(self, stages: int) -> float:
        """The mean of :attr:`staleness` over the stages."""
        return sum(self.staleness(stage) for stage in range(stages)) / stages


def fixed_delay(delay: Callable[[int], int]) -> VersionRule:
    """Return the rule of a schedule whose stage s uses version max(k - delay(s), 0) for all of
    batch k, forward and backward."""

    def version(batch: int, microbatch: int, stage: int) -> int:
        return max(batch - delay(stage), 0)

    return VersionRule(
        forward=version,
        backward=version,
        kept=lambda stage: delay(stage) + 1,
        staleness=lambda stage: float(delay(stage)),
    )


def extra_ahead(pipeline: Pipeline, stage: int) -> int:
    """e_s: how many microbatches more than w a stage runs ahead, floor(w (e + 1) / p).

    A link makes up for late messages if the stage before it runs two microbatches ahead of the
    stage behind it instead of one: a slot of the two then has room for 2 t_f + 2 t_b instead of
    t_f + t_b and two messages. The e extra microbatches are spread over e of the p - 1 links at
    equal distances: with e + 1 nodes of p / (e + 1) stages each, those between nodes, and with
    e = p - 1 all of them.
    """
    warmup = pipeline.stages - 1 - stage
    return warmup * (pipeline.extra_warmup + 1) // pipeline.stages


def _no_notes(pipeline: Pipeline, microbatches: int) -> list[str]:
    return []


def _no_problems(pipeline: Pipeline, microbatches: int) -> list[Problem]:
    return []


def _ahead_by_warmup(pipeline: Pipeline, stage: int, microbatches: int) -> int:
    return warmup_microbatches(pipeline.stages, stage) + extra_ahead(pipeline, stage)


def _one(pipeline: Pipeline) -> int:
    return 1


def _not_emulated(pipeline: Pipeline) -> int | None:
    return None


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """A pipeline schedule.

    Attributes:
        name: what ``--pipeline-schedule`` calls it.
        title: in tables and pictures.
        help: what it does, to follow its name in ``--help``; no full stop at the end.
        call: what one stage does in one call. Raises ValueError for what it cannot do. When call k
            ends, every stage has version k + 1 or k complete, see :func:`made_by_all_stages`.
        rule: the weight versions, from the pipeline and the number of microbatches of a batch.
        ahead: how many microbatches a stage runs ahead of its own backwards, from the pipeline, the
            stage and the number of microbatches of a batch. An asynchronous schedule has so many in
            flight between two calls. With several model chunks, each counts.
        least_microbatches: of a batch, from the pipeline.
        asynchronous: whether it is one of this package; the others are Megatron's own, which
            ``--pipeline-schedule default`` chooses from, and are here to be compared with.
        deferrable: whether updates can be deferred; they are by default, then.
        resumable: whether a run goes on exactly where it was saved; otherwise it starts afresh from
            the newest weights.
        equal_batches: whether all batches need the same number of microbatches on several stages.
        drifts: whether a microbatch may run backward on newer weights than forward.
        interleaved: whether each stage has several model chunks.
        split_backward: whether a backward is split, see ``Kind.BACKWARD_WEIGHT``.
        emulated_stages: P, if one stage trains with the delays of P of them; else None.
        extra_warmup: whether it can have more microbatches in flight than 1F1B.
        flags: its own.
        notes: what of its choices a run is to be told at its start, from the pipeline and the
            smallest number of microbatches of a batch; no full stop at the end.
        problems: what of the flags cannot be run, likewise.
    """

    name: str
    title: str
    help: str
    call: Callable[[Call], list[Action]]
    rule: Callable[[Pipeline, int], VersionRule]
    ahead: Callable[[Pipeline, int, int], int] = _ahead_by_warmup
    least_microbatches: Callable[[Pipeline], int] = _one
    asynchronous: bool = True
    deferrable: bool = True
    resumable: bool = True
    equal_batches: bool = False
    drifts: bool = False
    interleaved: bool = False
    split_backward: bool = False
    emulated_stages: Callable[[Pipeline], int | None] = _not_emulated
    extra_warmup: bool = False
    flags: tuple[Flag, ...] = ()
    notes: Callable[[Pipeline, int], list[str]] = _no_notes
    problems: Callable[[Pipeline, int], list[Problem]] = _no_problems

    def batches_in_flight(self, pipeline: Pipeline, stage: int, microbatches: int) -> int:
        """How many batches have microbatches in flight on a stage at once."""
        return 1 + -(-self.ahead(pipeline, stage, microbatches) // microbatches)


def action_lists(
    schedule: Schedule,
    pipeline: Pipeline,
    microbatches: Sequence[int],
    *,
    start: int = 0,
    drain: bool = True,
) -> list[list[Action]]:
    """Return each stage's actions over as many calls as there are numbers of microbatches.

    Args:
        schedule: whose lists.
        pipeline: the run's.
        microbatches: m of each batch.
        start: the first batch; above 0 as in a resumed run.
        drain: leave the pipeline empty at the end; otherwise microbatches are in flight, as between
            two iterations.

    Raises:
        ValueError: the schedule cannot run with these numbers; the message says why.
    """
    calls = len(microbatches)
    return [
        [
            action
            for call, count in enumerate(microbatches)
            for action in schedule.call(
                Call(
                    pipeline=pipeline,
                    stage=stage,
                    batch=start + call,
                    microbatches=count,
                    next_microbatches=microbatches[min(call + 1, calls - 1)],
                    start=start,
                    batches_left=calls - call if drain else None,
                )
            )
        ]
        for stage in range(pipeline.stages)
    ]


def made_by_all_stages(schedule: Schedule, call: Call) -> bool:
    """Return whether every stage has the version that batch k makes, complete, when call k ends.

    If not, that before it is the newest one that all of them have.

    Args:
        schedule: whose lists.
        call: the call k, on whatever stage.
    """
    version = call.batch + 1
    for stage in range(call.pipeline.stages):
        kinds = {
            action.kind
            for action in schedule.call(replace(call, stage=stage))
            if action.kind in UPDATES | GATHERS and action.version == version
        }
        made = bool(kinds & {Kind.COMPLETE_UPDATE, Kind.UPDATE})
        if not made or (Kind.START_GATHER in kinds and Kind.FINISH_GATHER not in kinds):
            return False
    return True


def settled_calls(schedule: Schedule, pipeline: Pipeline, microbatches: int) -> int:
    """How many calls have a steady state amid them: stages that run whole batches ahead take as
    many more to fill the pipeline."""
    return 14 + max(
        schedule.batches_in_flight(pipeline, stage, microbatches)
        for stage in range(pipeline.stages)
    )
