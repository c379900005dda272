"""Short ways to make, write and change lists of actions."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from megatron_async.schedules.actions import Action, Kind
from megatron_async.schedules.one_f_one_b import ONE_F_ONE_B
from megatron_async.schedules.pipedream import PIPEDREAM
from megatron_async.schedules.pipedream_2bw import PIPEDREAM_2BW
from megatron_async.schedules.schedule import Call, Pipeline, Schedule, action_lists

__all__ = [
    "Change",
    "Lists",
    "call_of",
    "drop",
    "edit",
    "find",
    "insert",
    "move",
    "one_f_one_b",
    "pipedream",
    "short",
    "two_version",
]

type Lists = list[list[Action]]
type Change = Callable[[Lists], None]

_NAMES = {
    Kind.FORWARD: "F",
    Kind.BACKWARD: "B",
    Kind.LAUNCH_UPDATE: "L",
    Kind.COMPLETE_UPDATE: "C",
    Kind.UPDATE: "U",
}
_COLLECTIVES = {
    Kind.START_REDUCTION: "R",
    Kind.FINISH_REDUCTION: "r",
    Kind.START_GATHER: "G",
    Kind.FINISH_GATHER: "g",
}


def short(actions: Sequence[Action], *, collectives: bool = False) -> str:
    """F, B and the updates only: `F1.0v0` is the forward of batch 1's microbatch 0 on version 0.

    Args:
        actions: a list.
        collectives: with start and finish of a batch's reduction (`R1`, `r1`) and of a version's
            gather (`G2`, `g2`).
    """
    words = []
    for action in actions:
        if action.kind in _NAMES:
            place = f".{action.microbatch}" if action.microbatch >= 0 else ""
            words.append(f"{_NAMES[action.kind]}{action.batch}{place}v{action.version}")
        elif collectives and action.kind in _COLLECTIVES:
            reduces = action.kind in (Kind.START_REDUCTION, Kind.FINISH_REDUCTION)
            number = action.batch if reduces else action.version
            words.append(f"{_COLLECTIVES[action.kind]}{number}")
    return " ".join(words)


def call_of(
    schedule: Schedule,
    *,
    stages: int,
    stage: int,
    batch: int,
    microbatches: int,
    next_microbatches: int | None = None,
    start: int = 0,
    batches_left: int | None = None,
    **options: Any,
) -> list[Action]:
    """What one stage does in one call.

    Args:
        options: of the :class:`Pipeline`.
    """
    return schedule.call(
        Call(
            pipeline=Pipeline(stages=stages, **{"deferred": schedule.deferrable, **options}),
            stage=stage,
            batch=batch,
            microbatches=microbatches,
            next_microbatches=microbatches if next_microbatches is None else next_microbatches,
            start=start,
            batches_left=batches_left,
        )
    )


def two_version(
    stages: int,
    microbatches: Sequence[int],
    *,
    start: int = 0,
    drain: bool = True,
    **options: Any,
) -> Lists:
    """The lists of PipeDream-2BW; ``options`` are those of the :class:`Pipeline`."""
    pipeline = Pipeline(stages=stages, **options)
    return action_lists(PIPEDREAM_2BW, pipeline, microbatches, start=start, drain=drain)


def pipedream(
    stages: int, microbatches: int, batches: int, *, drain: bool = True, **options: Any
) -> Lists:
    """The lists of PipeDream."""
    pipeline = Pipeline(stages=stages, deferred=False, **options)
    return action_lists(PIPEDREAM, pipeline, [microbatches] * batches, drain=drain)


def one_f_one_b(stages: int, microbatches: Sequence[int], **options: Any) -> Lists:
    """The lists of Megatron's 1F1B."""
    return action_lists(
        ONE_F_ONE_B, Pipeline(stages=stages, deferred=False, **options), microbatches
    )


def find(actions: Sequence[Action], kind: Kind, **fields: int) -> int:
    """The place of the first action of a kind, with the given fields."""
    return next(
        i
        for i, action in enumerate(actions)
        if action.kind is kind and all(getattr(action, k) == v for k, v in fields.items())
    )


def drop(kind: Kind, stage: int = 1, **fields: int) -> Change:
    """Leave an action out."""

    def change(lists: Lists) -> None:
        del lists[stage][find(lists[stage], kind, **fields)]

    return change


def edit(kind: Kind, changes: dict[str, Any], stage: int = 1, **fields: int) -> Change:
    """Change fields of an action."""

    def change(lists: Lists) -> None:
        at = find(lists[stage], kind, **fields)
        lists[stage][at] = replace(lists[stage][at], **changes)

    return change


def move(kind: Kind, by: int, stage: int = 1, **fields: int) -> Change:
    """Move an action by so many places."""

    def change(lists: Lists) -> None:
        at = find(lists[stage], kind, **fields)
        lists[stage].insert(at + by, lists[stage].pop(at))

    return change


def insert(action: Action, kind: Kind, stage: int = 1, **fields: int) -> Change:
    """Put an action before another one."""

    def change(lists: Lists) -> None:
        lists[stage].insert(find(lists[stage], kind, **fields), action)

    return change
