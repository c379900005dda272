"""PipeDream-2BW: a gradient that is one update old on every stage, and no pipeline flush.

Batch k runs forward and backward on version max(k - 1, 0), on every stage: two weight versions are
kept. Needs at least p - 1 microbatches a batch.

Source: "Memory-Efficient Pipeline-Parallel DNN Training" (arXiv 2006.09503), section 3.1.
"""

from megatron_async.schedules.actions import Action
from megatron_async.schedules.fresh_2bw import least_microbatches
from megatron_async.schedules.schedule import (
    Call,
    Pipeline,
    Schedule,
    VersionRule,
    fixed_delay,
)
from megatron_async.schedules.unflushed import unflushed_call

__all__ = ["PIPEDREAM_2BW"]

_NAME = "pipedream-2bw"
_RULE = fixed_delay(lambda stage: 1)


def _rule(pipeline: Pipeline, microbatches: int) -> VersionRule:
    return _RULE


def _call(call: Call) -> list[Action]:
    return unflushed_call(call, name=_NAME, rule=_RULE, delayed=lambda microbatches: microbatches)


PIPEDREAM_2BW = Schedule(
    name=_NAME,
    title="PipeDream-2BW",
    help="runs without a pipeline flush, on weights that are one update old",
    call=_call,
    rule=_rule,
    least_microbatches=least_microbatches,
    extra_warmup=True,
)
