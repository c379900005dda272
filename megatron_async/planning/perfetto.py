"""A timeline as a file that Perfetto (https://ui.perfetto.dev) and chrome://tracing open.

The format is the JSON of the *Trace Event Format*: complete events (``ph`` "X") with their start
``ts`` and duration ``dur`` in microseconds, a process ``pid`` for each run that is drawn, a thread
``tid`` for each stage, and metadata events (``ph`` "M") that name them.

Perfetto colours a slice by its name without the digits, so the weight version stands there as a
letter: versions 0, 1, 2 are a, b, c. chrome://tracing takes the colour ``cname``.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_async.schedules.actions import COMPUTE, UPDATES, Kind
from megatron_async.schedules.simulator import Simulation

__all__ = ["Slice", "events", "slices", "write"]

_COLOURS = (
    "thread_state_running",
    "rail_response",
    "rail_animation",
    "rail_load",
    "cq_build_passed",
    "vsync_highlight_color",
    "thread_state_iowait",
)
"""Of the versions in turn; names that the trace viewer knows."""
_WAIT = "grey"
_UPDATE = "black"
_LETTERS = {Kind.FORWARD: "F", Kind.BACKWARD: "B", Kind.BACKWARD_WEIGHT: "W"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Slice:
    """What a stage does, or waits for, from one time to another.

    Attributes:
        stage: s.
        kind: the action.
        started: milliseconds from the start of the timeline.
        stopped: likewise.
        waits: whether the time is waited; otherwise it is worked.
        batch: as of an :class:`~megatron_async.schedules.actions.Action`, like the rest.
        microbatch: -1 where none is meant.
        version: -1 where none is meant.
        chunk: of the model, on this stage.
    """

    stage: int
    kind: Kind
    started: float
    stopped: float
    waits: bool
    batch: int
    microbatch: int = -1
    version: int = -1
    chunk: int = 0


def slices(run: Simulation) -> Iterator[Slice]:
    """What a simulated run works and waits for; what takes no time is left out."""
    for stage, happened in enumerate(run.events):
        for event in happened:
            action = event.action
            for started, stopped, waits in (
                (event.reached, event.started, True),
                (event.started, event.stopped, False),
                (event.stopped, event.ended, True),
            ):
                if stopped > started:
                    yield Slice(
                        stage=stage,
                        kind=action.kind,
                        started=started,
                        stopped=stopped,
                        waits=waits,
                        batch=action.batch,
                        microbatch=action.microbatch,
                        version=action.version,
                        chunk=action.chunk,
                    )


def events(runs: Sequence[tuple[str, Sequence[Slice]]]) -> list[dict[str, Any]]:
    """Return the trace's events, those of a stage in the order of their starts.

    Args:
        runs: the name of each timeline, and what happened in it.
    """
    found: list[dict[str, Any]] = []
    for process, (name, happened) in enumerate(runs):
        found.append(_named("process_name", process, 0, name=name))
        for stage in sorted({each.stage for each in happened}):
            found.append(_named("thread_name", process, stage, name=f"stage {stage}"))
            found.append(_named("thread_sort_index", process, stage, sort_index=stage))
        ordered = sorted(happened, key=lambda each: (each.stage, each.started))
        found += [_complete(process, each) for each in ordered]
    return found


def write(path: Path, runs: Sequence[tuple[str, Sequence[Slice]]]) -> None:
    """Write a trace file, see :func:`events`."""
    trace = {"traceEvents": events(runs), "displayTimeUnit": "ms"}
    path.write_text(json.dumps(trace), encoding="utf-8")


def _named(event: str, process: int, thread: int, **arguments: Any) -> dict[str, Any]:
    return {"ph": "M", "name": event, "pid": process, "tid": thread, "ts": 0, "args": arguments}


def _complete(process: int, each: Slice) -> dict[str, Any]:
    arguments = {"batch": each.batch}
    for name in ("microbatch", "version"):
        if (value := getattr(each, name)) >= 0:
            arguments[name] = value
    if each.chunk:
        arguments["chunk"] = each.chunk
    if each.waits:
        category, colour = "wait", _WAIT
        name = f"wait: {each.kind.value}"
    elif each.kind in COMPUTE:
        category, colour = "compute", _COLOURS[each.version % len(_COLOURS)]
        letters = _LETTERS[each.kind]
        if each.chunk % 2:
            letters = letters.lower()
        name = f"{letters}{each.microbatch}"
        if each.version >= 0:
            name += f" {_letters(each.version)}"
    else:
        category, colour = ("update" if each.kind in UPDATES else "other"), _UPDATE
        name = each.kind.value
    return {
        "ph": "X",
        "name": name,
        "cat": category,
        "ts": each.started * 1e3,
        "dur": (each.stopped - each.started) * 1e3,
        "pid": process,
        "tid": each.stage,
        "cname": colour,
        "args": arguments,
    }


def _letters(version: int) -> str:
    """0 is a, 25 z, 26 aa: as columns of a table are numbered."""
    letters = ""
    number = version + 1
    while number:
        number, letter = divmod(number - 1, 26)
        letters = chr(ord("a") + letter) + letters
    return letters
