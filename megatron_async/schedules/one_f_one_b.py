"""Megatron's synchronous 1F1B, to be compared with.

Source: `forward_backward_pipelining_without_interleaving` in
megatron/core/pipeline_parallel/schedules.py.
"""

from megatron_async.schedules.actions import COMPUTE, Action, Kind, warmup_microbatches
from megatron_async.schedules.schedule import (
    Call,
    Pipeline,
    Schedule,
    VersionRule,
    fixed_delay,
)

__all__ = ["ONE_F_ONE_B", "synchronous_end", "synchronous_rule", "synchronous_warmup"]

_RULE = fixed_delay(lambda stage: 0)


def synchronous_rule(pipeline: Pipeline, microbatches: int) -> VersionRule:
    """Nothing is delayed."""
    return _RULE


def synchronous_warmup(call: Call) -> int:
    """Return how many microbatches a stage forwards ahead of its first backward in 1F1B order.

    Raises:
        ValueError: m < 1, or a stage outside 0..p-1.
    """
    if call.microbatches < 1:
        raise ValueError(f"a batch needs at least one microbatch, got {call.microbatches}")
    return min(warmup_microbatches(call.pipeline.stages, call.stage), call.microbatches)


def synchronous_end(call: Call) -> list[Action]:
    """Return how every synchronous iteration ends on a stage."""
    stage, batch = call.stage, call.batch
    actions = [
        Action(stage=stage, kind=Kind.FINISH_REDUCTION, batch=batch),
        Action(stage=stage, kind=Kind.UPDATE, batch=batch, version=batch + 1),
    ]
    if call.pipeline.gather_ahead:
        # Megatron gathers bucket by bucket, ahead of the modules that need them; for the first
        # module of the next forward there is nothing to hide it under.
        actions += [
            Action(stage=stage, kind=kind, batch=batch, version=batch + 1)
            for kind in (Kind.START_GATHER, Kind.FINISH_GATHER)
        ]
    return actions


def _call(call: Call) -> list[Action]:
    """Return what one stage does in one iteration.

    Raises:
        ValueError: m < 1, or a stage outside 0..p-1.
    """
    stage, batch, microbatches = call.stage, call.batch, call.microbatches
    warmup = synchronous_warmup(call)

    def act(kind: Kind, microbatch: int, receives: int | None = None) -> Action:
        return Action(
            stage=stage,
            kind=kind,
            batch=batch,
            microbatch=microbatch,
            version=batch if kind in COMPUTE else -1,
            recv_batch=-1 if receives is None else batch,
            recv_microbatch=-1 if receives is None else receives,
            recv_chunk=-1 if receives is None else 0,
        )

    actions: list[Action] = []

    def backward(microbatch: int) -> None:
        if microbatch == microbatches - 1:
            actions.append(Action(stage=stage, kind=Kind.START_REDUCTION, batch=batch))
        actions.append(act(Kind.BACKWARD, microbatch))

    for i in range(warmup):
        actions.append(act(Kind.RECV_FORWARD, i))
        actions.append(act(Kind.FORWARD, i))
        actions.append(act(Kind.SEND_FORWARD, i))
    steady = microbatches - warmup
    if steady:
        actions.append(act(Kind.RECV_FORWARD, warmup))
    for i in range(steady):
        actions.append(act(Kind.FORWARD, warmup + i))
        actions.append(act(Kind.SEND_FORWARD_RECV_BACKWARD, warmup + i, receives=i))
        backward(i)
        if i == steady - 1:
            actions.append(act(Kind.SEND_BACKWARD, i))
        else:
            actions.append(act(Kind.SEND_BACKWARD_RECV_FORWARD, i, receives=warmup + i + 1))
    for i in range(steady, microbatches):
        actions.append(act(Kind.RECV_BACKWARD, i))
        backward(i)
        actions.append(act(Kind.SEND_BACKWARD, i))
    return actions + synchronous_end(call)


ONE_F_ONE_B = Schedule(
    name="1f1b",
    title="Megatron's 1F1B",
    help="Megatron's synchronous schedule",
    call=_call,
    rule=synchronous_rule,
    asynchronous=False,
    deferrable=False,
)
