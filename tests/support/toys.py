"""A schedule and a correction as a package of one's own would add them, each with a flag.

A training script calls :func:`register` before it trains. Neither is in megatron_async, which knows
of them by the registries alone.
"""

from dataclasses import replace
from typing import Any

from megatron_async import corrections, schedules
from megatron_async.corrections.correction import Correction, Settings
from megatron_async.registry import Flag
from megatron_async.schedules.actions import COMPUTE, Action
from megatron_async.schedules.one_f_one_b import ONE_F_ONE_B
from megatron_async.schedules.schedule import (
    Call,
    Pipeline,
    Schedule,
    VersionRule,
    fixed_delay,
)

__all__ = ["DAMPING", "LATE", "SHARE", "UPDATES", "register"]

UPDATES = Flag(
    name="--late-updates",
    parse=int,
    default=2,
    metavar="N",
    help="By how many updates the gradients of --pipeline-schedule late are late.",
    fits=lambda updates: updates >= 0,
    takes="a number of updates, 0 or more",
)


def _rule(pipeline: Pipeline, microbatches: int) -> VersionRule:
    updates = int(pipeline.value(UPDATES))
    return fixed_delay(lambda stage: updates)


def _call(call: Call) -> list[Action]:
    """1F1B with a flush in each iteration, on weights that are so many updates old."""
    rule = _rule(call.pipeline, call.microbatches)
    return [
        replace(action, version=rule.forward(action.batch, action.microbatch, action.stage))
        if action.kind in COMPUTE
        else action
        for action in ONE_F_ONE_B.call(call)
    ]


LATE = Schedule(
    name="late",
    title="1F1B on old weights",
    help="runs 1F1B on weights that are some updates old, see --late-updates",
    call=_call,
    rule=_rule,
    deferrable=False,
    # A checkpoint holds two versions.
    resumable=False,
    flags=(UPDATES,),
)

SHARE = Flag(
    name="--damping-share",
    parse=float,
    default=0.5,
    metavar="S",
    help="The share of each update that --delay-correction damping makes.",
    fits=lambda share: 0.0 < share <= 1.0,
    takes="a number above 0 and at most 1",
)


def _damping(optimizer: Any, settings: Settings) -> Any:
    import torch

    from megatron_async.corrections.base import STATE_PREFIX, DelayCorrection

    class Damping(DelayCorrection):
        """x_{k+1} = x_k - s U_k."""

        def __init__(self) -> None:
            super().__init__(optimizer, state_keys=[f"{STATE_PREFIX}before"])

        def before(self, parameters: list[torch.Tensor]) -> None:
            torch._foreach_copy_(self.buffers(self.state_keys[0], parameters), parameters)

        def after(self, parameters: list[torch.Tensor]) -> None:
            for p, start in zip(
                parameters, self.buffers(self.state_keys[0], parameters), strict=True
            ):
                p.lerp_(start, 1.0 - settings[SHARE.dest])

    return Damping()


DAMPING = Correction(
    name="damping",
    summary="makes a share of each update, see --damping-share",
    build=_damping,
    settings=(SHARE,),
    any_delay=True,
)


def register() -> None:
    """Let the command line know both."""
    schedules.register(LATE)
    corrections.register(DAMPING)
