"""The schedules that can be planned, by name, and their action lists."""

from collections.abc import Sequence

from megatron_async.schedules.actions import Action, pipedream_2bw_lists, synchronous_lists

__all__ = ["TITLES", "build_lists", "delay_of"]

TITLES = {
    "1f1b": "Megatron's 1F1B",
    "interleaved": "Megatron's interleaved 1F1B",
    "pipedream-2bw-undeferred": "PipeDream-2BW, update at the end of the iteration",
    "pipedream-2bw": "PipeDream-2BW, deferred update",
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
    raise ValueError(f"no schedule is named {name!r}; there are: {', '.join(TITLES)}")


def delay_of(name: str) -> int:
    """By how many updates the schedule's gradients are stale."""
    return 1 if name.startswith("pipedream-2bw") else 0
