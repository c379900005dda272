"""Pipeline schedules by name.

``default`` is Megatron's own selection and has no entry here. A schedule is two things: the lists
of actions (:mod:`megatron_async.schedules.actions`), which need no device, and the runtime that
interprets them.
"""

from collections.abc import Callable
from typing import Any

__all__ = ["make_pipeline", "register", "schedule_names"]

_SCHEDULES: dict[str, Callable[..., Any]] = {}


def register(name: str, build: Callable[..., Any]) -> None:
    """Add a schedule. ``build`` takes what :func:`make_pipeline` passes on.

    Raises:
        ValueError: the name is taken.
    """
    if name in _SCHEDULES or name == "default":
        raise ValueError(f"a pipeline schedule named {name!r} exists already")
    _SCHEDULES[name] = build


def schedule_names() -> list[str]:
    """Return the names that ``--pipeline-schedule`` takes beside ``default``."""
    return sorted(_SCHEDULES)


def make_pipeline(name: str, **kwargs: Any) -> Any:
    """Build the runtime of a schedule.

    Raises:
        ValueError: there is no schedule of that name.
    """
    if name not in _SCHEDULES:
        raise ValueError(
            f"--pipeline-schedule {name}: no such schedule; there are: default, "
            f"{', '.join(schedule_names())}"
        )
    return _SCHEDULES[name](**kwargs)


def _pipedream_2bw(**kwargs: Any) -> Any:
    # Imported when a run begins: the lists and the names are used where Megatron is not.
    from megatron_async.schedules.pipedream_2bw import PipeDream2BW

    return PipeDream2BW(**kwargs)


register("pipedream-2bw", _pipedream_2bw)
