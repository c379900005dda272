"""1F1B without a flush between batches: the order that several asynchronous schedules share.

Megatron calls the forward-backward function once per iteration. The pipeline's state (saved inputs
and outputs, the received next input) lives on between the calls, so call k forwards the first w
microbatches of batch k + 1 and runs the backwards of batch k. Only the first call warms up, only
the last one drains.

What differs between schedules is how many microbatches of each batch, c of its m, run on the
version before the newest (are *delayed*), and with it where an update has to be complete. The
microbatch that first needs version k + 1, which batch k's gradient makes, is the one that comes c
microbatches after the start of batch k + 1. So the update of batch k is completed right after
backward c - w - 1 of call k + 1 and before the communication that follows, which is the latest
place where no other stage can be waiting for this one: behind the receive that follows, "before
the first forward", the stages' steps would queue along the chain of forwards. Where c = w, already
the call's first forward needs the version, and the update is completed at the end of call k.

Notation as in :mod:`megatron_async.schedules.actions`.

Source: "Memory-Efficient Pipeline-Parallel DNN Training" (arXiv 2006.09503), section 3.1, for the
order of forwards and backwards; the deferred update is this package's own.
"""

from collections.abc import Callable

from megatron_async.schedules.actions import COMPUTE, Action, Kind, warmup_microbatches
from megatron_async.schedules.schedule import Call, Pipeline, VersionRule

__all__ = ["completed_after", "unflushed_call"]


def unflushed_call(
    call: Call, *, name: str, rule: VersionRule, delayed: Callable[[int], int]
) -> list[Action]:
    """Return what one stage does in a call.

    Args:
        call: the call.
        name: of the schedule, for messages.
        rule: the weight versions of all batches.
        delayed: c, from the number of microbatches of a batch; from p - 1 to m.

    Raises:
        ValueError: m < p - 1 (or < p with a second gradient buffer), c out of range, a stage
            outside 0..p-1, or a negative batch.
    """
    pipeline, stage, batch = call.pipeline, call.stage, call.batch
    stages, microbatches = pipeline.stages, call.microbatches
    ahead = warmup_microbatches(stages, stage)
    following = microbatches if call.last else call.next_microbatches
    _check(call, (microbatches, following), name=name, delayed=delayed)

    def locate(index: int) -> tuple[int, int]:
        """The batch and microbatch that are `index` microbatches after the start of batch k."""
        if index < microbatches:
            return batch, index
        if index < microbatches + following:
            return batch + 1, index - microbatches
        return batch + 2, index - microbatches - following

    def act(kind: Kind, index: int, receives: int | None = None) -> Action:
        number, microbatch = locate(index)
        recv_batch, recv_microbatch = (-1, -1) if receives is None else locate(receives)
        version = -1
        if kind in COMPUTE:
            uses = rule.forward if kind is Kind.FORWARD else rule.backward
            version = uses(number, microbatch, stage)
        return Action(
            stage=stage,
            kind=kind,
            batch=number,
            microbatch=microbatch,
            version=version,
            recv_batch=recv_batch,
            recv_microbatch=recv_microbatch,
            recv_chunk=-1 if receives is None else 0,
        )

    actions: list[Action] = []

    def first_use(index: int) -> int | None:
        """The version that the forward of `index` is the first one on, if it was made in this
        segment and has to be gathered."""
        if not pipeline.gather_ahead or index == 0:
            return None
        before, version = (rule.forward(*locate(each), stage) for each in (index - 1, index))
        return version if before < version and version > call.start else None

    def finish_gather(version: int | None) -> None:
        if version is not None:
            actions.append(_gather(Kind.FINISH_GATHER, stage, version))

    def forward(index: int) -> None:
        if call.first or index > ahead:  # else the end of the call before has it
            finish_gather(first_use(index))
        actions.append(act(Kind.FORWARD, index))

    def step(kind: Kind, number: int) -> None:
        if pipeline.gather_ahead and number == batch and not call.first and call.last:
            # The newest version need not have been used before the next one is made.
            finish = _gather(Kind.FINISH_GATHER, stage, batch)
            if finish not in actions and delayed(microbatches) > ahead:
                actions.append(finish)
        actions.append(_update(kind, stage, number))
        if pipeline.gather_ahead:
            actions.append(_gather(Kind.START_GATHER, stage, number + 1))

    def launch(number: int) -> None:
        actions.append(Action(stage=stage, kind=Kind.FINISH_REDUCTION, batch=number))
        actions.append(_update(Kind.LAUNCH_UPDATE, stage, number))

    pending = pipeline.deferred and not call.first
    complete_at = completed_after(pipeline, stage, delayed(microbatches))
    if call.first:
        for index in range(ahead):
            actions.append(act(Kind.RECV_FORWARD, index))
            forward(index)
            actions.append(act(Kind.SEND_FORWARD, index))
        if not (call.last and ahead >= microbatches):
            actions.append(act(Kind.RECV_FORWARD, ahead))
    for i in range(microbatches):
        index = ahead + i
        if call.last and index >= microbatches:
            actions.append(act(Kind.RECV_BACKWARD, i))
        else:
            forward(index)
            actions.append(act(Kind.SEND_FORWARD_RECV_BACKWARD, index, receives=i))
        if i == microbatches - 1:
            actions.append(Action(stage=stage, kind=Kind.START_REDUCTION, batch=batch))
        actions.append(act(Kind.BACKWARD, i))
        if pipeline.reduce_late and i == 0 and not call.first:
            launch(batch - 1)
        if pending and i == complete_at:
            step(Kind.COMPLETE_UPDATE, batch - 1)
        if call.last and index + 1 >= microbatches:
            actions.append(act(Kind.SEND_BACKWARD, i))
        else:
            actions.append(act(Kind.SEND_BACKWARD_RECV_FORWARD, i, receives=index + 1))
    # What the next call's first forward needs; nothing is computed in between.
    closing = None if call.last else first_use(ahead + microbatches)
    made_before = closing is not None and closing <= batch
    if not pipeline.deferred:
        actions.append(Action(stage=stage, kind=Kind.FINISH_REDUCTION, batch=batch))
    elif call.last or not pipeline.reduce_late:
        launch(batch)
    if made_before:
        finish_gather(closing)
    if not pipeline.deferred:
        step(Kind.UPDATE, batch)
    elif call.last or completed_after(pipeline, stage, delayed(following)) < 0:
        step(Kind.COMPLETE_UPDATE, batch)
    if not made_before:
        finish_gather(closing)
    if call.last and pipeline.gather_ahead:
        finish_gather(batch + 1)
    return actions


def completed_after(pipeline: Pipeline, stage: int, delayed: int) -> int:
    """Return the backward after which the update of the batch before is completed; negative if that
    is before the call's first.

    Without gathers under computation that is the latest place. With them it is earlier by half of
    the slots that no stage's total can be late for, so that the new parameters are gathered under
    computation.

    Args:
        pipeline: the run's.
        stage: s.
        delayed: c of the running batch.
    """
    latest = delayed - warmup_microbatches(pipeline.stages, stage) - 1
    # Stage 0's total is known to all when stage 0 has launched; so much later is `latest` there.
    room = delayed - pipeline.stages + (0 if pipeline.reduce_late else 1)
    return latest - ((room + 1) // 2 if pipeline.gather_ahead and room > 0 else 0)


def _check(
    call: Call, counts: tuple[int, int], *, name: str, delayed: Callable[[int], int]
) -> None:
    stages = call.pipeline.stages
    least = max(stages - 1, 1)
    for count in counts:
        if count < least:
            raise ValueError(
                f"{name} with {stages} pipeline stages needs at least {least} microbatches in "
                f"every batch, got {count}: a microbatch can only be forwarded one batch ahead"
            )
        if not stages - 1 <= delayed(count) <= count:
            raise ValueError(
                f"{name} with {stages} pipeline stages and {count} microbatches runs from "
                f"{stages - 1} to {count} of them on the version before the newest, got "
                f"{delayed(count)}"
            )
        if call.pipeline.reduce_late and delayed(count) < stages:
            raise ValueError(
                f"launching the update after the next call's first backward needs at least "
                f"{stages} microbatches on the version before the newest with {stages} pipeline "
                f"stages, got {delayed(count)}"
            )
    if call.batch < call.start or call.start < 0:
        raise ValueError(f"batch {call.batch} is not in a segment that starts at {call.start}")


def _update(kind: Kind, stage: int, batch: int) -> Action:
    return Action(stage=stage, kind=kind, batch=batch, version=batch + 1)


def _gather(kind: Kind, stage: int, version: int) -> Action:
    return Action(stage=stage, kind=kind, batch=version - 1, version=version)
