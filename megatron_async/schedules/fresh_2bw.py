"""fresh-2bw: the speed and the memory of PipeDream-2BW at a fraction of a step of delay.

In batch k the first c microbatches run, forward and backward and on every stage, on version k - 1,
the others on version k; p - 1 <= c <= m. The gradient is (c/m) grad f(W(k-1)) + (1 - c/m) grad
f(W(k)): its mean delay is c/m of an update, and for c = p - 1 that is the share of the time that
the bubble would take. With c = m it is PipeDream-2BW, digit for digit.

Two weight versions suffice: the last use of version k - 1 is the backward of microbatch c - 1 of
batch k, and version k + 1 is made after batch k's last backward. What c has above p - 1 is slack,
in slots of a forward and a backward, for what lies between a batch's last backward and the first
use of the weights made from it: a reduction under the next batch, a gather of the parameters, late
messages.

Source: this package's own; the version rule is that of PipeDream-2BW (arXiv 2006.09503) with
another boundary. A fork of Megatron for AMDP (arXiv 2605.29664) runs forwards on the newest weights
of each stage and calls that 2BW.
"""

from megatron_async.registry import Flag
from megatron_async.schedules.actions import Action
from megatron_async.schedules.schedule import Call, Pipeline, Problem, Schedule, VersionRule
from megatron_async.schedules.unflushed import fewest_delayed, unflushed_call

__all__ = [
    "DELAYED_MICROBATCHES",
    "FRESH_2BW",
    "delayed_microbatches",
    "delayed_notes",
    "delayed_problems",
    "least_microbatches",
]

_NAME = "fresh-2bw"
_FEWEST, _ALL = "fewest", "all"


def _count(text: str) -> int | str:
    return text if text in (_FEWEST, _ALL) else int(text)


DELAYED_MICROBATCHES = Flag(
    name="--delayed-microbatches",
    parse=_count,
    default=_FEWEST,
    metavar="{fewest,N,all}",
    help="How many microbatches of each batch run on the weights before the newest: 'fewest' are "
    "one less than the pipeline stages, and what --pipeline-extra-warmup, --second-grad-buffer and "
    "--overlap-param-gather need; 'all' is the delay of pipedream-2bw.",
    fits=lambda value: isinstance(value, str) or value >= 0,
    takes="fewest, all or a number of microbatches",
)


def _slack(pipeline: Pipeline) -> int:
    """Slots for the gather of the parameters: one, if there is anything to gather."""
    return 1 if pipeline.gather_ahead and pipeline.replicas > 1 else 0


def delayed_microbatches(pipeline: Pipeline, microbatches: int) -> int:
    """Return c, for a batch of m microbatches.

    Args:
        pipeline: the run's, with the flag's value.
        microbatches: m.
    """
    value = pipeline.value(DELAYED_MICROBATCHES)
    if value == _ALL:
        return microbatches
    if value == _FEWEST:
        return min(fewest_delayed(pipeline) + _slack(pipeline), max(microbatches, 1))
    return int(value)


def least_microbatches(pipeline: Pipeline) -> int:
    """Return the smallest m: as many as the first stage runs ahead."""
    return max(pipeline.stages - 1 + pipeline.extra_warmup, 1)


def delayed_problems(pipeline: Pipeline, microbatches: int) -> list[Problem]:
    """Say what is wrong with the flag, for a batch of m microbatches."""
    value = pipeline.value(DELAYED_MICROBATCHES)
    fewest = fewest_delayed(pipeline)
    if isinstance(value, str) or fewest <= value <= microbatches:
        return []
    return [
        Problem(
            flag=DELAYED_MICROBATCHES.name,
            reason=f"{value} of {microbatches} microbatches cannot be what is delayed, at least "
            f"{fewest} have to be ({_reasons(pipeline, slack=0)})",
            remedy=f"Give a number from {fewest} to {microbatches}, fewest or all.",
        )
    ]


def delayed_notes(
    pipeline: Pipeline, microbatches: int, *, delay: float | None = None
) -> list[str]:
    """Say how many microbatches are delayed, and why, for a batch of m.

    Args:
        pipeline: of which there are stages.
        microbatches: m.
        delay: the mean delay in updates, if it is not c/m.
    """
    c = delayed_microbatches(pipeline, microbatches)
    value = pipeline.value(DELAYED_MICROBATCHES)
    if value == _FEWEST:
        # A short batch may have no slot left for the gather.
        why = _reasons(pipeline, slack=max(c - fewest_delayed(pipeline), 0))
    else:
        why = f"{DELAYED_MICROBATCHES.name} {value}"
    late = c / microbatches if delay is None else delay
    note = (
        f"{c} of {microbatches} microbatches of a batch run on the weights before the newest "
        f"({why}): a mean delay of {late:.3g} of an update"
    )
    return [note]


def _reasons(pipeline: Pipeline, *, slack: int) -> str:
    parts = [f"{pipeline.stages - 1} for {pipeline.stages} pipeline stages"]
    if pipeline.extra_warmup:
        parts.append(f"{pipeline.extra_warmup} for --pipeline-extra-warmup")
    if pipeline.reduce_late:
        parts.append("1 for --second-grad-buffer")
    if slack:
        parts.append(f"{slack} for --overlap-param-gather")
    return ", ".join(parts)


def _rule(pipeline: Pipeline, microbatches: int) -> VersionRule:
    c = delayed_microbatches(pipeline, microbatches)

    def version(batch: int, microbatch: int, stage: int) -> int:
        return max(batch - 1, 0) if microbatch < c else batch

    return VersionRule(
        forward=version,
        backward=version,
        kept=lambda stage: 2,
        staleness=lambda stage: c / microbatches,
    )


def _call(call: Call) -> list[Action]:
    pipeline = call.pipeline
    counts = {call.microbatches, call.next_microbatches}
    rules = {count: _rule(pipeline, count) for count in counts}

    def version(batch: int, microbatch: int, stage: int) -> int:
        # Batches behind the next one begin as the next one does.
        count = call.microbatches if batch == call.batch else call.next_microbatches
        return rules[count].forward(batch, microbatch, stage)

    both = VersionRule(
        forward=version,
        backward=version,
        kept=lambda stage: 2,
        staleness=rules[call.microbatches].staleness,
    )
    return unflushed_call(
        call, name=_NAME, rule=both, delayed=lambda count: delayed_microbatches(pipeline, count)
    )


FRESH_2BW = Schedule(
    name=_NAME,
    title="fresh-2bw",
    help="has the speed and the memory of pipedream-2bw, and runs only as many microbatches of "
    "each batch on weights that are one update old as that takes, see --delayed-microbatches",
    call=_call,
    rule=_rule,
    least_microbatches=least_microbatches,
    extra_warmup=True,
    flags=(DELAYED_MICROBATCHES,),
    notes=delayed_notes,
    problems=delayed_problems,
)
