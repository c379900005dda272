"""ZB-H1, a synchronous schedule with a third of 1F1B's bubble and 1F1B's memory, to compare with.

A backward is split into the gradient of the input, which the stage before waits for, and that of
the weights, which nobody waits for. Stage s puts the latter s microbatches off, so that every stage
has p microbatches in flight, as many as 1F1B's first one, and fills the draining of the pipeline
with them. The bubble is (p - 1)(t_f + t_B - t_W), where t_B + t_W = t_b.

The flush stays, and so does the step of the optimizer, which waits for the norm over all stages;
the authors' post-validation of it is not modelled. Megatron does not have this schedule.

Source: Qi et al., "Zero Bubble Pipeline Parallelism" (arXiv 2401.10241), section 2.3.
"""

from megatron_async.schedules.actions import COMPUTE, Action, Kind
from megatron_async.schedules.one_f_one_b import (
    synchronous_end,
    synchronous_rule,
    synchronous_warmup,
)
from megatron_async.schedules.schedule import (
    Call,
    Schedule,
)

__all__ = ["ZERO_BUBBLE_H1"]


def _call(call: Call) -> list[Action]:
    """Return what one stage does in one iteration.

    Raises:
        ValueError: m < 1, or a stage outside 0..p-1.
    """
    stage, batch, microbatches = call.stage, call.batch, call.microbatches
    warmup = synchronous_warmup(call)
    actions: list[Action] = []

    def act(kind: Kind, microbatch: int) -> None:
        version = batch if kind in COMPUTE else -1
        actions.append(
            Action(stage=stage, kind=kind, batch=batch, microbatch=microbatch, version=version)
        )

    def forward(microbatch: int) -> None:
        for kind in (Kind.RECV_FORWARD, Kind.FORWARD, Kind.SEND_FORWARD):
            act(kind, microbatch)

    for i in range(warmup):
        forward(i)
    for i in range(microbatches):
        if warmup + i < microbatches:
            forward(warmup + i)
        act(Kind.RECV_BACKWARD, i)
        if i == microbatches - 1:
            actions.append(Action(stage=stage, kind=Kind.START_REDUCTION, batch=batch))
        act(Kind.BACKWARD, i)
        act(Kind.SEND_BACKWARD, i)
        if i >= stage:
            act(Kind.BACKWARD_WEIGHT, i - stage)
    for i in range(max(microbatches - stage, 0), microbatches):
        act(Kind.BACKWARD_WEIGHT, i)
    return actions + synchronous_end(call)


ZERO_BUBBLE_H1 = Schedule(
    name="zb-h1",
    title="ZB-H1",
    help="a synchronous schedule with a split backward and a third of 1F1B's bubble",
    call=_call,
    rule=synchronous_rule,
    asynchronous=False,
    deferrable=False,
    split_backward=True,
)
