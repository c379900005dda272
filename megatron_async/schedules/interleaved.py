"""Megatron's synchronous interleaved 1F1B, to be compared with.

Virtual stage c * p + s is model chunk c of stage s. Each receive stands right before the
computation that needs it and each send right after the one that made it, which is what Megatron's
default (`--overlap-p2p-communication`, asynchronous sends) comes to.

Source: `forward_backward_pipelining_with_interleaving` in
megatron/core/pipeline_parallel/schedules.py.
"""

from megatron_async.schedules.actions import COMPUTE, Action, Kind, check_stage
from megatron_async.schedules.one_f_one_b import synchronous_end, synchronous_rule
from megatron_async.schedules.schedule import (
    Call,
    Pipeline,
    Schedule,
)

__all__ = ["INTERLEAVED"]


def _ahead(pipeline: Pipeline, stage: int, microbatches: int) -> int:
    return 2 * (pipeline.stages - 1 - stage) + (pipeline.chunks - 1) * pipeline.stages


def _least_microbatches(pipeline: Pipeline) -> int:
    return pipeline.stages


def _call(call: Call) -> list[Action]:
    """Return what one stage does in one iteration.

    Raises:
        ValueError: fewer than 2 chunks or stages, or m not a multiple of p (Megatron also takes
            some others; they idle more).
    """
    stages, stage, chunks = call.pipeline.stages, call.stage, call.pipeline.chunks
    batch, microbatches = call.batch, call.microbatches
    check_stage(stages, stage)
    if chunks < 2 or stages < 2:
        raise ValueError(
            f"interleaved 1F1B needs at least 2 stages and 2 model chunks a stage, "
            f"got {stages} stages and {chunks} chunks"
        )
    if microbatches < 1 or microbatches % stages:
        raise ValueError(
            f"interleaved 1F1B needs a multiple of {stages} microbatches (the number of pipeline "
            f"stages), got {microbatches}"
        )
    total = microbatches * chunks
    warmup = min(_ahead(call.pipeline, stage, microbatches), total)
    # Megatron's schedule table: groups of p microbatches, each through all chunks in turn.
    order = [
        (group + offset, chunk)
        for group in range(0, microbatches, stages)
        for chunk in range(chunks)
        for offset in range(stages)
    ]
    actions: list[Action] = []

    def act(kind: Kind, microbatch: int, chunk: int) -> None:
        version = batch if kind in COMPUTE else -1
        actions.append(
            Action(
                stage=stage,
                kind=kind,
                batch=batch,
                microbatch=microbatch,
                version=version,
                chunk=chunk,
            )
        )

    def forward(index: int) -> None:
        microbatch, chunk = order[index]
        for kind in (Kind.RECV_FORWARD, Kind.FORWARD, Kind.SEND_FORWARD):
            act(kind, microbatch, chunk)

    def backward(index: int) -> None:
        microbatch, chunk = order[index]
        act(Kind.RECV_BACKWARD, microbatch, chunks - 1 - chunk)
        if index == total - 1:
            actions.append(Action(stage=stage, kind=Kind.START_REDUCTION, batch=batch))
        act(Kind.BACKWARD, microbatch, chunks - 1 - chunk)
        act(Kind.SEND_BACKWARD, microbatch, chunks - 1 - chunk)

    for index in range(warmup):
        forward(index)
    for index in range(total - warmup):
        forward(warmup + index)
        backward(index)
    for index in range(total - warmup, total):
        backward(index)
    return actions + synchronous_end(call)


INTERLEAVED = Schedule(
    name="interleaved",
    title="Megatron's interleaved 1F1B",
    help="Megatron's synchronous schedule with several model chunks on each stage",
    call=_call,
    rule=synchronous_rule,
    ahead=_ahead,
    least_microbatches=_least_microbatches,
    asynchronous=False,
    deferrable=False,
    interleaved=True,
)
