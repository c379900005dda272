"""The schedules that can be planned, by name, and their action lists."""

from collections.abc import Sequence

from megatron_async.schedules import delay_of
from megatron_async.schedules.actions import Action, pipedream_2bw_lists, synchronous_lists
from megatron_async.schedules.pipedream_actions import pipedream_lists

__all__ = ["TITLES", "build_lists", "delays_of", "iterations_to_settle"]

TITLES = {
    "1f1b": "Megatron's 1F1B",
    "interleaved": "Megatron's interleaved 1F1B",
    "pipedream-2bw-undeferred": "PipeDream-2BW, update at the end of the iteration",
    "pipedream-2bw": "PipeDream-2BW, deferred update",
    "pipedream": "PipeDream, weight stashing",
}
"""Name on the command line: name in words."""


def build_lists(
    name: str, *, stages: int, microbatches: int, iterations: int, chunks: int = 2
) -> Sequence[Sequence[Action]]:
    """Return all stages' action lists over some iterations, from the filling of the pipeline to its
    draining.

    Raises:
        ValueError: no such schedule, or it cannot run with these numbers; the message says why.
    """
    counts = [microbatches] * iterations
    match name:
        case "1f1b":
            return synchronous_lists(stages=stages, microbatches=counts)
        case "interleaved":
            return synchronous_lists(stages=stages, microbatches=counts, chunks=chunks)
        case "pipedream-2bw" | "pipedream-2bw-undeferred":
            deferred = name == "pipedream-2bw"
            return pipedream_2bw_lists(stages=stages, microbatches=counts, deferred=deferred)
        case "pipedream":
            return pipedream_lists(stages=stages, microbatches=microbatches, batches=iterations)
    raise ValueError(f"no schedule is named {name!r}; there are: {', '.join(TITLES)}")


def delays_of(name: str, *, stages: int) -> list[int]:
    """By how many updates each stage's gradients are stale."""
    if not name.startswith("pipedream"):
        return [0] * stages
    schedule = name.removesuffix("-undeferred")
    return [delay_of(schedule, stages=stages, stage=stage) for stage in range(stages)]


def iterations_to_settle(name: str, *, stages: int) -> int:
    """How many iterations have a steady state amid them, for any number of stages."""
    return 16 + (stages if name == "pipedream" else 0)
