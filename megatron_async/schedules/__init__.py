"""Pipeline schedules by name.

``default`` is Megatron's own selection and has no entry here. A schedule is three things: the lists
of actions (:mod:`megatron_async.schedules.actions`, for PipeDream ``pipedream_actions``) and the
delay, which need no device, and the runtime that interprets the lists
(:mod:`megatron_async.schedules.pipeline`).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from megatron_async.schedules.pipedream_actions import pipedream_delay

__all__ = ["delay_of", "make_pipeline", "register", "schedule_names"]


@dataclass(frozen=True)
class _Schedule:
    build: Callable[..., Any]
    delay: Callable[[int, int], int]


_SCHEDULES: dict[str, _Schedule] = {}


def register(name: str, build: Callable[..., Any], *, delay: Callable[[int, int], int]) -> None:
    """Add a schedule.

    Args:
        name: what ``--pipeline-schedule`` calls it.
        build: takes what :func:`make_pipeline` passes on.
        delay: from the number of stages and a stage, by how many updates its gradients are stale.

    Raises:
        ValueError: the name is taken.
    """
    if name in _SCHEDULES or name == "default":
        raise ValueError(f"a pipeline schedule named {name!r} exists already")
    _SCHEDULES[name] = _Schedule(build, delay)


def schedule_names() -> list[str]:
    """Return the names that ``--pipeline-schedule`` takes beside ``default``."""
    return sorted(_SCHEDULES)


def make_pipeline(name: str, **kwargs: Any) -> Any:
    """Build the runtime of a schedule.

    Raises:
        ValueError: there is no schedule of that name.
    """
    return _find(name).build(**kwargs)


def delay_of(name: str, *, stages: int, stage: int) -> int:
    """Return by how many updates the gradients of a stage are stale, once training is under way.

    It keeps one weight version more than that.

    Raises:
        ValueError: there is no schedule of that name.
    """
    return _find(name).delay(stages, stage)


def _find(name: str) -> _Schedule:
    if name not in _SCHEDULES:
        raise ValueError(
            f"--pipeline-schedule {name}: no such schedule; there are: default, "
            f"{', '.join(schedule_names())}"
        )
    return _SCHEDULES[name]


def _pipedream_2bw(**kwargs: Any) -> Any:
    # Imported when a run begins: the lists and the names are used where Megatron is not.
    from megatron_async.schedules.pipedream_2bw import PipeDream2BW

    return PipeDream2BW(**kwargs)


def _pipedream(**kwargs: Any) -> Any:
    from megatron_async.schedules.pipedream import PipeDream

    return PipeDream(**kwargs)


register("pipedream-2bw", _pipedream_2bw, delay=lambda stages, stage: 1)
register("pipedream", _pipedream, delay=pipedream_delay)
