"""A schedule that is wrong on purpose: to see that a misplaced completion is noticed."""

import dataclasses
import itertools

from megatron_async.schedules.actions import Action, Kind
from megatron_async.schedules.pipedream_2bw import PIPEDREAM_2BW
from megatron_async.schedules.schedule import Call, Schedule

__all__ = ["misplaced_schedule"]


def misplaced_schedule() -> Schedule:
    """PipeDream-2BW, but an update is completed after the receive that follows, "before the first
    forward": the stages' optimizer steps then queue along the chain of forwards."""
    return dataclasses.replace(
        PIPEDREAM_2BW,
        name="misplaced-2bw",
        title="2BW, update completed after the receive (wrong)",
        help="is wrong on purpose",
        call=_call,
        # The receive that it is misplaced behind is Megatron's combined one.
        extra_warmup=False,
    )


def _call(call: Call) -> list[Action]:
    actions = PIPEDREAM_2BW.call(call)
    for i, (action, following) in enumerate(itertools.pairwise(actions)):
        if (
            action.kind is Kind.COMPLETE_UPDATE
            and following.kind is Kind.SEND_BACKWARD_RECV_FORWARD
        ):
            actions[i], actions[i + 1] = following, action
            break
    return actions
