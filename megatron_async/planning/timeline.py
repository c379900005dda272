"""`megatron-async timeline`: draw what every stage does when, as text or as a picture."""

import argparse
import csv
import math
import shutil
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TextIO

from megatron_async.planning import perfetto
from megatron_async.planning.candidates import (
    Candidate,
    add_schedule_flags,
    candidate,
    candidates,
    check_counts,
    pipeline_of,
)
from megatron_async.planning.replayed import replayed_slices
from megatron_async.replay.device import DeviceDeadlock
from megatron_async.replay.device import run as run_on_device
from megatron_async.replay.nccl import MismatchError
from megatron_async.replay.trace import TraceError, read_all
from megatron_async.schedules import RECOMMENDED
from megatron_async.schedules.actions import COMPUTE, Kind
from megatron_async.schedules.cost_flags import add_cost_flags, costs_of
from megatron_async.schedules.schedule import settled_calls
from megatron_async.schedules.simulator import Event, Simulation, simulate

__all__ = ["draw_png", "draw_text", "main"]

_LETTERS = {
    Kind.FORWARD: "F",
    Kind.BACKWARD: "B",
    Kind.BACKWARD_WEIGHT: "W",
    Kind.UPDATE: "U",
    Kind.COMPLETE_UPDATE: "U",
}
_BACKGROUNDS = (24, 94, 22, 90, 52, 58)
"""Colours of the batches in the terminal's palette of 256, in turn."""
_QUEUES = 8
"""CUDA_DEVICE_MAX_CONNECTIONS by default."""
_BLOCK = 3
"""Columns of the shortest block: a letter and up to two digits."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command. Returns the exit code; wrong arguments leave through argparse."""
    parser = _parser()
    args = parser.parse_args(argv)
    if args.trace is not None:
        return _replay(parser, args)
    if args.stages is None or args.microbatches is None:
        parser.error("--stages and --microbatches are needed, or --trace")
    every = "all" in args.schedule
    drawn = candidates() if every else [candidate(n) for n in dict.fromkeys(args.schedule)]
    costs = costs_of(args)
    runs: list[tuple[Candidate, Simulation]] = []
    steady: dict[str, Simulation] = {}
    try:
        if not min(args.forward_ms, args.backward_ms) > 0:
            raise ValueError("--forward-ms and --backward-ms must be positive")
        if args.png is not None and args.png.suffix not in (".png", ".pdf", ".svg"):
            raise ValueError(f"--png: {args.png} ends in none of .png, .pdf and .svg")
        check_counts(args, "stages", "iterations")
        if args.width is not None:
            check_counts(args, "width")
        for each in drawn:
            pipeline = pipeline_of(each, args)
            settled = settled_calls(each.schedule, pipeline, args.microbatches)
            for iterations in (args.iterations, max(args.iterations, settled)):
                lists = each.lists(pipeline, microbatches=args.microbatches, iterations=iterations)
                steady[each.name] = simulate(lists, costs)
                if iterations == args.iterations:
                    runs.append((each, steady[each.name]))
    except ValueError as error:
        if len(drawn) == 1 or "--" in str(error):
            parser.error(str(error))
        parser.error(f"{error} (leave it out with --schedule)")
    colour = args.color == "always" or (args.color == "auto" and sys.stdout.isatty())
    width = args.width or shutil.get_terminal_size((120, 24)).columns
    for each, run in runs:
        print(_caption(each, steady[each.name], args))
        draw_text(run, sys.stdout, width=width, colour=colour)
        print()
    interleaved = any(each.schedule.interleaved for each in drawn)
    split = any(each.schedule.split_backward for each in drawn)
    print(
        "F forward, B backward, each with its microbatch; U optimizer step; . idle"
        + ("; f, b of every second model chunk" if interleaved else "")
        + ("; W gradients of the weights, of a split backward" if split else "")
        + ("; colours are batches" if colour else "")
    )
    if args.png:
        captions = [_caption(each, steady[each.name], args) for each, _ in runs]
        draw_png([run for _, run in runs], captions, args.png)
        print(f"wrote {args.png}")
    if args.perfetto:
        perfetto.write(args.perfetto, [(c.title, list(perfetto.slices(run))) for c, run in runs])
        print(f"wrote {args.perfetto}: open it at https://ui.perfetto.dev")
    if args.csv:
        _write_csv(runs, args.csv)
        print(f"wrote {args.csv}")
    return 0


def _replay(parser: argparse.ArgumentParser, args: argparse.Namespace) -> int:
    """Write what a recorded run would do on a device with eight hardware queues."""
    if args.perfetto is None:
        parser.error("--trace needs --perfetto FILE")
    try:
        device = run_on_device(read_all(args.trace), costs_of(args), connections=_QUEUES)
    except (TraceError, DeviceDeadlock, MismatchError, ValueError) as error:
        parser.error(f"{args.trace}: {error}")
    perfetto.write(args.perfetto, [(str(args.trace), list(replayed_slices(device)))])
    print(f"wrote {args.perfetto}: open it at https://ui.perfetto.dev")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="megatron-async timeline",
        description="Draw the timeline of a pipeline schedule by simulating its action lists. "
        "Nothing is trained.",
    )
    parser.add_argument("--stages", type=int, help="pipeline stages p")
    parser.add_argument("--microbatches", type=int, help="microbatches per batch m")
    parser.add_argument(
        "--trace",
        type=Path,
        metavar="DIR",
        help="instead: what a run recorded with --cpu --log-enqueues DIR; needs --perfetto",
    )
    names = [each.name for each in candidates()]
    parser.add_argument(
        "--schedule",
        nargs="+",
        choices=[*names, "all"],
        default=[RECOMMENDED],
        metavar="NAME",
        help=f"one or more of {', '.join(names)}, or all (default: {RECOMMENDED})",
    )
    parser.add_argument("--iterations", type=int, default=3, help="iterations to draw (default 3)")
    add_cost_flags(parser)
    parser.add_argument("--chunks", type=int, default=2, help="model chunks of interleaved 1F1B")
    parser.add_argument(
        "--overlap-param-gather", action="store_true", help="gather under computation"
    )
    parser.add_argument(
        "--second-grad-buffer", action="store_true", help="reduce under the next batch"
    )
    add_schedule_flags(parser)
    parser.add_argument("--png", type=Path, metavar="FILE", help="also draw it as a picture")
    parser.add_argument(
        "--perfetto", type=Path, metavar="FILE", help="also write a trace for ui.perfetto.dev"
    )
    parser.add_argument("--csv", type=Path, metavar="FILE", help="also write the events as CSV")
    parser.add_argument("--width", type=int, help="columns of text (default: the terminal's)")
    parser.add_argument("--color", choices=("auto", "always", "never"), default="auto")
    return parser


def _caption(drawn: Candidate, run: Simulation, args: argparse.Namespace) -> str:
    caption = (
        f"{drawn.title}: {run.iteration_time:.4g} ms per iteration in the steady state, "
        f"{run.ratio_to_ideal:.3f} of the ideal"
    )
    if not drawn.schedule.asynchronous:
        return caption
    rule = drawn.schedule.rule(pipeline_of(drawn, args), args.microbatches)
    return f"{caption}; gradients {rule.mean_staleness(args.stages):.3g} of an update late"


def _drawn(event: Event) -> bool:
    return event.action.kind in _LETTERS and event.busy > 0


def draw_text(run: Simulation, out: TextIO, *, width: int, colour: bool) -> None:
    """Write one row for each stage, in as many panels below each other as the width needs.

    Columns are so wide that the shortest forward or backward takes three, as long as a block's
    ends can be rounded to columns; the optimizer step gets at least one.
    """
    shortest = min(
        event.busy for events in run.events for event in events if event.action.kind in COMPUTE
    )
    scale = _BLOCK / shortest
    length = math.ceil(run.makespan * scale)
    rows = [_row(events, scale, length) for events in run.events]
    label = len(f"stage {run.stages - 1} ")
    panel = max(width - label, 10)
    for begin in range(0, length, panel):
        if begin:
            print(file=out)
        for stage, (text, batches) in enumerate(rows):
            end = min(begin + panel, length)
            line = text[begin:end]
            if colour:
                line = _coloured(line, batches[begin:end])
            print(f"{f'stage {stage}':<{label}}{line}".rstrip(), file=out)


def _row(events: Sequence[Event], scale: float, length: int) -> tuple[str, list[int]]:
    """The characters of a stage, and for each the batch it belongs to (-1: idle)."""
    text, batches = ["."] * length, [-1] * length
    for event in filter(_drawn, events):
        begin = min(round(event.started * scale), length - 1)
        end = min(max(round(event.stopped * scale), begin + 1), length)
        action = event.action
        label = _LETTERS[action.kind] + (str(action.microbatch) if action.microbatch >= 0 else "")
        if action.chunk % 2:
            label = label.lower()
        block = label[: end - begin].ljust(end - begin, "-" if action.kind is Kind.FORWARD else "=")
        text[begin:end] = block
        batches[begin:end] = [action.batch] * (end - begin)
    return "".join(text), batches


def _coloured(text: str, batches: Sequence[int]) -> str:
    pieces: list[str] = []
    for index, character in enumerate(text):
        batch = batches[index]
        if index == 0 or batch != batches[index - 1]:
            pieces.append("\x1b[0m")
            if batch >= 0:
                pieces.append(f"\x1b[97;48;5;{_BACKGROUNDS[batch % len(_BACKGROUNDS)]}m")
        pieces.append(character)
    return "".join(pieces) + "\x1b[0m"


def draw_png(runs: Sequence[Simulation], captions: Sequence[str], path: Path) -> None:
    """Write one panel for each simulation, all on one time axis.

    Batches have colours, forwards are light and backwards dark, the optimizer step is black, where
    it takes time; white is idle time.
    """
    # Imported here: drawing text must not need it, and it takes a second.
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    longest = max(run.makespan for run in runs)
    height = sum(0.32 * run.stages + 0.75 for run in runs)
    figure, axes = pyplot.subplots(
        len(runs),
        1,
        figsize=(14, height + 0.5),
        sharex=True,
        squeeze=False,
        height_ratios=[run.stages + 1 for run in runs],
    )
    palette = matplotlib.colormaps["tab10"]
    for axis, run, caption in zip(axes[:, 0], runs, captions, strict=True):
        for stage, events in enumerate(run.events):
            for event in filter(_drawn, events):
                action = event.action
                compute = action.kind in COMPUTE
                forward = action.kind is Kind.FORWARD
                colour = palette(action.batch % 10) if compute else "black"
                axis.broken_barh(
                    [(event.started, event.busy)],
                    (stage - 0.45, 0.9),
                    facecolor=colour,
                    alpha=0.45 if forward else 1.0,
                    edgecolor="white",
                    linewidth=0.5,
                )
                if compute and event.busy > longest / 150:
                    axis.text(
                        event.started + event.busy / 2,
                        stage,
                        str(action.microbatch),
                        ha="center",
                        va="center",
                        fontsize=7,
                        color="black" if forward else "white",
                    )
        axis.set_title(caption, fontsize=9, loc="left")
        axis.set_yticks(range(run.stages), [f"stage {stage}" for stage in range(run.stages)])
        axis.set_ylim(run.stages - 0.5, -0.5)
        axis.set_xlim(0, longest)
        axis.tick_params(labelsize=8)
        for side in ("top", "right"):
            axis.spines[side].set_visible(False)
    legend = "time (ms); colour: batch, light: forward, dark: backward"
    if any(
        _drawn(event) and event.action.kind not in COMPUTE
        for run in runs
        for events in run.events
        for event in events
    ):
        legend += ", black: optimizer step"
    axes[-1, 0].set_xlabel(legend, fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def _write_csv(runs: Sequence[tuple[Candidate, Simulation]], path: Path) -> None:
    columns = ("stage", "kind", "batch", "microbatch", "chunk", "version")
    times = ("reached", "started", "stopped", "ended")
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["schedule", *columns, *times])
        for drawn, run in runs:
            for events in run.events:
                for event in events:
                    what = {**asdict(event.action), "kind": event.action.kind.value}
                    when = (getattr(event, column) for column in times)
                    writer.writerow([drawn.name, *(what[column] for column in columns), *when])
