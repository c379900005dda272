"""PACI: one copy of the weights, updated in place while microbatches are in flight.

Every forward and every backward runs on the newest weights of its stage. A microbatch that is in
flight when an update is made runs forward on one version and backward on the next; all others are
fresh. Its order of actions is that of fresh-2bw: the update of batch k is complete right before the
stage's first forward that would need it there, so that of each batch the first c microbatches run
forward on version k - 1, and of these the first c - a backward as well, with a the number that the
stage runs ahead. A gradient whose forward and backward differ is not the gradient of any loss; what
drifts are at most c of m microbatches by one update.

On one stage that emulates P (``--emulate-pipeline-stages``) each microbatch has its backward right
after its forward, both versions are kept, and the layers of a stage run backward on the newer one
where their stage would.

No second copy of the weights is kept. An evaluation or a checkpoint completes the update that is
pending, so that microbatches in flight then run backward on the version made by it. A resumed run
forwards anew, on the newest weights.

Source: PACI (arXiv 2606.07881), which updates each stage right after the batch's last backward
there and lets a stage's progress be limited by its neighbours alone; the deferral by which
gradients are clipped by the norm over all stages, and with it the fixed drift, is this package's
own.
"""

from megatron_async.schedules.actions import Action, warmup_microbatches
from megatron_async.schedules.emulation import (
    EMULATE_PIPELINE_STAGES,
    as_emulated,
    emulated_stages,
)
from megatron_async.schedules.fresh_2bw import (
    DELAYED_MICROBATCHES,
    delayed_microbatches,
    delayed_notes,
    delayed_problems,
    least_microbatches,
)
from megatron_async.schedules.schedule import (
    Call,
    Pipeline,
    Problem,
    Schedule,
    VersionRule,
    extra_ahead,
)
from megatron_async.schedules.unflushed import unflushed_call

__all__ = ["PACI"]

_NAME = "paci"


def _rule(pipeline: Pipeline, microbatches: int) -> VersionRule:
    c = delayed_microbatches(as_emulated(pipeline), microbatches)

    def ahead(stage: int) -> int:
        return warmup_microbatches(pipeline.stages, stage) + extra_ahead(pipeline, stage)

    def forward(batch: int, microbatch: int, stage: int) -> int:
        return max(batch - 1, 0) if microbatch < c else batch

    def backward(batch: int, microbatch: int, stage: int) -> int:
        return max(batch - 1, 0) if microbatch < c - ahead(stage) else batch

    if _emulates(pipeline):
        # The stage's own actions; what drifts of the emulated ones is no matter of their order.
        return VersionRule(
            forward=forward,
            backward=forward,
            kept=lambda stage: 2,
            staleness=lambda stage: c / microbatches,
        )
    return VersionRule(
        forward=forward,
        backward=backward,
        kept=lambda stage: 1,
        staleness=lambda stage: (2 * c - ahead(stage)) / (2 * microbatches),
    )


def _emulates(pipeline: Pipeline) -> bool:
    return as_emulated(pipeline).stages != pipeline.stages


def _made_ahead(pipeline: Pipeline) -> int:
    """How many microbatches before the c-th the update has to be complete on one stage: a backward
    of the first emulated stage needs it so much before the c-th forward."""
    return as_emulated(pipeline).stages - pipeline.stages


def _call(call: Call) -> list[Action]:
    pipeline = call.pipeline
    rules = {count: _rule(pipeline, count) for count in (call.microbatches, call.next_microbatches)}

    def of(batch: int) -> VersionRule:
        return rules[call.microbatches if batch == call.batch else call.next_microbatches]

    both = VersionRule(
        forward=lambda batch, i, stage: of(batch).forward(batch, i, stage),
        backward=lambda batch, i, stage: of(batch).backward(batch, i, stage),
        kept=rules[call.microbatches].kept,
        staleness=rules[call.microbatches].staleness,
    )

    def delayed(count: int) -> int:
        return delayed_microbatches(as_emulated(pipeline), count) - _made_ahead(pipeline)

    return unflushed_call(call, name=_NAME, rule=both, delayed=delayed)


def _problems(pipeline: Pipeline, microbatches: int) -> list[Problem]:
    problems = delayed_problems(as_emulated(pipeline), microbatches)
    if pipeline.gather_ahead:
        problems.append(
            Problem(
                flag="--overlap-param-gather",
                reason="the only copy of the weights would be computed on while it is gathered",
                remedy="Drop it.",
            )
        )
    if not pipeline.deferred:
        problems.append(
            Problem(
                flag="--no-deferred-update",
                reason="which microbatches drift follows from where the deferred update is made",
                remedy="Drop it.",
            )
        )
    return problems


def _notes(pipeline: Pipeline, microbatches: int) -> list[str]:
    whole = as_emulated(pipeline)

    delay = _rule(whole, microbatches).mean_staleness(whole.stages)
    return delayed_notes(whole, microbatches, delay=delay)


def _least_microbatches(pipeline: Pipeline) -> int:
    return least_microbatches(as_emulated(pipeline))


PACI = Schedule(
    name=_NAME,
    title="PACI",
    help="keeps one copy of the weights and updates it in place, so that the microbatches in "
    "flight run backward on newer weights than forward",
    call=_call,
    rule=_rule,
    least_microbatches=_least_microbatches,
    # In flight are microbatches that have seen a version that nobody keeps.
    resumable=False,
    drifts=True,
    emulated_stages=emulated_stages,
    extra_warmup=True,
    flags=(DELAYED_MICROBATCHES, EMULATE_PIPELINE_STAGES),
    notes=_notes,
    problems=_problems,
)
