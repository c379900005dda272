"""PipeDream with weight stashing: stage s has a delay of p - 1 - s updates.

It is here to be compared with. Notation as in :mod:`megatron_async.schedules.actions`: p stages,
this one is s, m microbatches a batch, w = p - 1 - s. Here w counts batches: stage s forwards a
batch w updates before the batch's own gradient makes one, so that its gradient is w updates old.
The last stage has no delay, so its next forward needs the update, and the update is not deferred.

PipeDream updates after each minibatch. A minibatch is a batch of m microbatches here, whose
gradients are summed: one update a batch, as in training without a delay, with which it is to be
compared. Batches follow each other in 1F1B order, microbatch by microbatch: one microbatch of batch
k + w forward, one of batch k backward. The update closes the call, because the last stage's next
forward needs it; with it closes the pipeline, by p - 1 backwards.

Sources: "PipeDream: Generalized Pipeline Parallelism for DNN Training" (SOSP 2019), section 3.3
(weight stashing); arXiv 2006.09503, section 2, for its delay of p - 1 - s updates.
"""

from megatron_async.schedules.actions import COMPUTE, Action, Kind, warmup_microbatches
from megatron_async.schedules.emulation import EMULATE_PIPELINE_STAGES, emulated_stages
from megatron_async.schedules.schedule import (
    Call,
    Pipeline,
    Schedule,
    VersionRule,
    fixed_delay,
)

__all__ = ["PIPEDREAM", "pipedream_delay"]


def pipedream_delay(stages: int, stage: int) -> int:
    """w: by how many updates the gradients of a stage are stale, and how many batches it runs ahead
    of its own backwards."""
    return warmup_microbatches(stages, stage)


def _rule(pipeline: Pipeline, microbatches: int) -> VersionRule:
    return fixed_delay(lambda stage: pipedream_delay(pipeline.stages, stage))


def _ahead(pipeline: Pipeline, stage: int, microbatches: int) -> int:
    return pipedream_delay(pipeline.stages, stage) * microbatches


def _call(call: Call) -> list[Action]:
    """Return what one stage does in call k.

    Call k runs the microbatches of batch k + w forward, on version k, the newest, and those of
    batch k backward, on the version that they were forwarded on, max(k - w, 0). In between stand
    Megatron's combined transfers, in the order of 1F1B: stage s sends microbatch i of batch k + w
    to stage s + 1 while it receives the gradient of microbatch i of batch k from it. So stage s + 1
    always holds the m inputs of the batch that it forwards in its next call.

    The segment's first call warms up: w whole batches forward, on version 0. What is known not to
    come is left out, so the last w calls drain.

    Raises:
        ValueError: m < 1 or not the same in all batches, a stage outside 0..p-1, no batch left, a
            segment that does not start at batch 0, or a deferred update.
    """
    pipeline, stage, batch, microbatches = call.pipeline, call.stage, call.batch, call.microbatches
    delay = pipedream_delay(pipeline.stages, stage)
    _check(call)
    rule = _rule(pipeline, microbatches)

    def comes(number: int) -> bool:
        return call.batches_left is None or number < batch + call.batches_left

    def act(
        kind: Kind, number: int, microbatch: int, receives: tuple[int, int] | None = None
    ) -> Action:
        recv_batch, recv_microbatch = receives or (-1, -1)
        return Action(
            stage=stage,
            kind=kind,
            batch=number,
            microbatch=microbatch,
            version=rule.forward(number, microbatch, stage) if kind in COMPUTE else -1,
            recv_batch=recv_batch,
            recv_microbatch=recv_microbatch,
            recv_chunk=-1 if receives is None else 0,
        )

    def gather(kind: Kind, version: int) -> None:
        if pipeline.gather_ahead:
            actions.append(Action(stage=stage, kind=kind, batch=version - 1, version=version))

    actions: list[Action] = []
    if call.first:
        for number in filter(comes, range(delay)):
            for i in range(microbatches):
                actions.append(act(Kind.RECV_FORWARD, number, i))
                actions.append(act(Kind.FORWARD, number, i))
                actions.append(act(Kind.SEND_FORWARD, number, i))
        if comes(delay):
            actions.extend(act(Kind.RECV_FORWARD, delay, i) for i in range(microbatches))
    ahead = batch + delay
    for i in range(microbatches):
        if comes(ahead):
            actions.append(act(Kind.FORWARD, ahead, i))
            actions.append(act(Kind.SEND_FORWARD_RECV_BACKWARD, ahead, i, receives=(batch, i)))
        else:
            actions.append(act(Kind.RECV_BACKWARD, batch, i))
        if i == microbatches - 1:
            actions.append(Action(stage=stage, kind=Kind.START_REDUCTION, batch=batch))
        actions.append(act(Kind.BACKWARD, batch, i))
        if comes(ahead + 1):
            receives = (ahead + 1, i)
            actions.append(act(Kind.SEND_BACKWARD_RECV_FORWARD, batch, i, receives=receives))
        else:
            actions.append(act(Kind.SEND_BACKWARD, batch, i))
    actions.append(Action(stage=stage, kind=Kind.FINISH_REDUCTION, batch=batch))
    actions.append(Action(stage=stage, kind=Kind.UPDATE, batch=batch, version=batch + 1))
    # The next call's first forward needs it; nothing is computed in between.
    gather(Kind.START_GATHER, batch + 1)
    gather(Kind.FINISH_GATHER, batch + 1)
    return actions


def _check(call: Call) -> None:
    if call.microbatches < 1:
        raise ValueError(f"a batch needs at least one microbatch, got {call.microbatches}")
    if call.batch < 0 or call.start != 0:
        raise ValueError(
            f"pipedream starts at batch 0, got batch {call.batch} of a segment from {call.start}"
        )
    if call.batches_left is not None and call.batches_left < 1:
        raise ValueError(
            f"batch {call.batch} is no batch of the segment: {call.batches_left} are left"
        )
    if call.pipeline.deferred:
        raise ValueError("--deferred-update: pipedream's last stage has no delay to hide it in")
    if call.pipeline.stages > 1 and not call.last and call.next_microbatches != call.microbatches:
        raise ValueError(
            f"pipedream needs the same number of microbatches in every batch, and after "
            f"{call.microbatches} come {call.next_microbatches}: drop --step-batch-size-schedule"
        )


PIPEDREAM = Schedule(
    name="pipedream",
    title="PipeDream, weight stashing",
    help="stashes weights, so that stage s of p has a delay of p - 1 - s updates, and is there for "
    "comparisons",
    call=_call,
    rule=_rule,
    ahead=_ahead,
    deferrable=False,
    # It would take all of the weight versions, and the batches in flight.
    resumable=False,
    equal_batches=True,
    emulated_stages=emulated_stages,
    flags=(EMULATE_PIPELINE_STAGES,),
)
