"""How long until a loss: the time of an iteration and the iterations that a schedule needs.

Asynchronous schedules make an iteration shorter, and the delay of their gradients makes more
iterations necessary. This joins the two: seconds per iteration with stages that sleep instead of
computing (see paced.py), and the iterations of real trainings on real text that reach the loss
which synchronous training has after N iterations.

What is held equal:

- The data. Every batch has the same sequences in every run, of whichever schedule and number m of
  microbatches. With more microbatches each is smaller, and takes less time in proportion: a batch
  takes a stage --batch-ms, a third of it forward. (On a GPU small microbatches are less efficient;
  that would speak for few of them, which is where bubbles are large.) An optimizer's step takes
  the same for every m.
- The initial weights.
- The learning rate is constant behind a warm-up. So a run's first n iterations are a run of n
  iterations, and one training shows all of them; with a rate that decays to the end each length
  would need a run of its own. The rate is the same for all schedules, the best one in synchronous
  training if several are given.
- Losses are training losses, smoothed over iterations n / 1.25 to 1.25 n; what a batch adds in the
  synchronous run is subtracted in all runs. An asynchronous schedule computes a batch's loss on the
  weights before the newest, up to one iteration late, which counts against it. The corrections'
  time is taken for part of the optimizer's step.

Time to loss = iterations until the smooth curve is down at the loss x seconds per iteration. It is
also given over N iterations without a bubble, the least that synchronous training can take.

The two halves, `times` and `curves`, keep their results in --output and go on where they were
stopped; `report` joins what is there. Times want an idle machine, curves do not mind.
"""

import argparse
import dataclasses
import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy
from support.jobs import JobError
from support.loss_curves import OPTIMIZERS, Pair, Training, find, train
from support.modes import MODES
from support.options import add_common
from support.pace import Pace, ideal_ms
from support.report import Spread, print_table, progress, write_csv
from support.smoothing import Curve, reached, without_batches

from megatron_async.study.config import ConfigError
from megatron_async.study.launch import LaunchError
from megatron_async.study.runner import RunError
from megatron_async.tools.data import DataError

_PARTS = ("times", "curves", "report")
_BASELINE = "1f1b"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Compared:
    """A mode: its title, and whose time an iteration takes."""

    title: str
    paced: str


_MODES = {
    _BASELINE: Compared(title="Megatron 1F1B", paced="1f1b"),
    "2bw": Compared(title="2BW", paced="2bw"),
    "2bw-corrected": Compared(title="2BW + correction", paced="2bw"),
    "fresh-2bw": Compared(title="fresh-2bw", paced="fresh-2bw"),
    "fresh-2bw-corrected": Compared(title="fresh-2bw + correction", paced="fresh-2bw"),
    "paci": Compared(title="PACI", paced="paci"),
}


def main() -> int:
    args = _parse()
    with tempfile.TemporaryDirectory(prefix="megatron-async-time-to-loss-") as scratch:
        if args.output is None:
            args.output = Path(scratch) if args.quick else Path("runs/time-to-loss")
        try:
            return _main(args)
        except (JobError, ConfigError, DataError, LaunchError, RunError) as error:
            progress(str(error))
            return 1


def _main(args: argparse.Namespace) -> int:
    training = Training(
        stages=args.stages,
        microbatches=tuple(args.microbatches),
        iterations=round(args.longer * args.train_iters),
        batch=args.batch,
        layers=args.layers,
        hidden_size=args.hidden_size,
        sequence=args.seq_length,
        warmup=args.warmup_iters,
        optimizer=args.optimizer,
        learning_rates=tuple(args.learning_rates or [OPTIMIZERS[args.optimizer][1]]),
        seeds=tuple(args.seeds),
        dataset=args.dataset,
    )
    paces = {m: _pace(m, args) for m in args.microbatches}
    if "times" in args.parts:
        _measure(paces, args)
    if "curves" in args.parts and not train(training, args.output, jobs=args.jobs):
        progress("not all runs came to their end; start it again to go on")
        return 1
    if "report" in args.parts:
        return _report(training, paces, args)
    return 0


def _pace(microbatches: int, args: argparse.Namespace) -> Pace:
    return Pace(
        stages=args.stages,
        microbatches=microbatches,
        forward_ms=args.batch_ms / 3 / microbatches,
        backward_ms=args.batch_ms * 2 / 3 / microbatches,
        optimizer_ms=args.optimizer_ms,
        iterations=args.iterations,
        timeout=args.timeout,
    )


# Times


def _measure(paces: dict[int, Pace], args: argparse.Namespace) -> None:
    """Measure what was not measured yet; each repeat all modes in turn."""
    for repeat in range(args.repeats):
        for m, pace in paces.items():
            for name in dict.fromkeys(mode.paced for mode in _MODES.values()):
                path = args.output / "times" / _file_name(name, pace, repeat + 1)
                if path.exists():
                    continue
                progress(f"repeat {repeat + 1} of {args.repeats}, m = {m}: {MODES[name].title} ...")
                seconds = MODES[name].run(pace).seconds
                path.parent.mkdir(parents=True, exist_ok=True)
                document = {"mode": name, **dataclasses.asdict(pace), "seconds": seconds}
                path.write_text(json.dumps(document, indent=1), encoding="utf-8")
                progress(f"    {seconds:.3f} s per iteration")


def _file_name(name: str, pace: Pace, number: int | str) -> str:
    """Of a measurement: all that it depends on, and the number of the repeat."""
    numbers = (pace.stages, pace.microbatches, pace.forward_ms, pace.backward_ms)
    settings = "-".join(f"{each:g}" for each in (*numbers, pace.optimizer_ms, pace.iterations))
    return f"{name}-{settings}-{number}.json"


def _times(name: str, pace: Pace, output: Path) -> list[float]:
    """The seconds per iteration of all repeats that are there."""
    files = sorted((output / "times").glob(_file_name(name, pace, "*")))
    return [json.loads(path.read_text(encoding="utf-8"))["seconds"] for path in files]


# Both together


def _report(training: Training, paces: dict[int, Pace], args: argparse.Namespace) -> int:
    found = find(training, args.output)
    if not any(name == _BASELINE for name, _ in found):
        progress("there is no synchronous curve: run the part `curves` with these settings first")
        return 1
    rows: list[dict[str, Any]] = []
    curves: dict[tuple[str, int], list[Pair]] = {}
    for m, pace in paces.items():
        for name, mode in _MODES.items():
            seconds = _times(mode.paced, pace, args.output)
            if not seconds:
                progress(f"{mode.title}, m = {m}: there is no time; run the part `times`")
                continue
            curves[name, m] = [_smooth(pair) for pair in found.get((name, m), {}).values()]
            rows.append(_row(name, pace, seconds, curves[name, m], args))
    _compare(rows)
    _print(rows, training, args)
    if args.csv:
        write_csv(args.csv, rows)
    if args.png:
        _draw(rows, curves, args)
    return 0


def _smooth(pair: Pair) -> Pair:
    """Both curves, without the noise of their common batches."""
    reference = without_batches(pair.reference, pair.reference)
    if not numpy.isfinite(pair.losses).all():
        return Pair(losses=numpy.full(len(reference), numpy.inf), reference=reference)
    return Pair(losses=without_batches(pair.losses, pair.reference), reference=reference)


def _row(
    name: str, pace: Pace, seconds: list[float], curves: list[Pair], args: argparse.Namespace
) -> dict[str, Any]:
    n, paced = args.train_iters, MODES[_MODES[name].paced]
    needed = [reached(each.losses, each.reference[n - 1]) for each in curves]
    gaps = [each.losses[n - 1] - each.reference[n - 1] for each in curves]
    row = {
        "mode": name,
        "stages": pace.stages,
        "microbatches": pace.microbatches,
        "optimizer": args.optimizer,
        "train_iters": n,
        "seeds": len(curves),
        "mean_delay": paced.mean_delay(pace),
        "repeats": len(seconds),
        "iteration_seconds": statistics.median(seconds),
        "ratio_to_ideal": 1e3 * statistics.median(seconds) / ideal_ms(paced, pace),
        "gap": statistics.mean(gaps) if gaps else None,
        "iterations_to_loss": None,
    }
    if needed and None not in needed:
        counts = Spread.of([each for each in needed if each is not None])
        factor = row["iteration_seconds"]
        row |= {
            "iterations_to_loss": counts.median,
            "iterations_to_loss_low": counts.low,
            "iterations_to_loss_high": counts.high,
            "seconds_to_loss": counts.median * factor,
            "share_of_bubble_free": 1e3 * counts.median * factor / (n * ideal_ms(paced, pace)),
        }
    return row


def _compare(rows: list[dict[str, Any]]) -> None:
    """Add the gain over the baseline with the same number of microbatches."""
    base = {row["microbatches"]: row for row in rows if row["mode"] == _BASELINE}
    for row in rows:
        other = base.get(row["microbatches"])
        if other is not None and "seconds_to_loss" in row and "seconds_to_loss" in other:
            row["gain"] = other["seconds_to_loss"] / row["seconds_to_loss"]


def _print(rows: list[dict[str, Any]], training: Training, args: argparse.Namespace) -> None:
    print(
        f"\nTime to the loss of synchronous training after N = {args.train_iters} iterations, "
        f"p = {args.stages}, {args.optimizer}, {len(training.seeds)} seed(s); a batch takes a "
        f"stage {args.batch_ms:g} ms, an optimizer's step {args.optimizer_ms:g} ms\n"
    )
    table = [["m", "mode", "delay", "s per iteration", "of ideal", "loss gap at N"]]
    table[0] += ["seeds", "iterations", "s to the loss", "of bubble-free", "gain over 1F1B"]
    for row in rows:
        found = row["iterations_to_loss"]
        longest = f"> {training.iterations}" if row["seeds"] else "-"
        table.append(
            [
                str(row["microbatches"]),
                _MODES[row["mode"]].title,
                f"{row['mean_delay']:.3g}",
                f"{row['iteration_seconds']:.3f}",
                f"{row['ratio_to_ideal']:.3f}",
                "-" if row["gap"] is None else f"{row['gap']:+.4f}",
                str(row["seeds"]),
                longest if found is None else f"{found:.0f}",
                "-" if found is None else f"{row['seconds_to_loss']:.0f}",
                "-" if found is None else f"{row['share_of_bubble_free']:.3f}",
                f"{row['gain']:.3f}" if "gain" in row else "-",
            ]
        )
    print_table(table)
    known = [row for row in rows if "seconds_to_loss" in row]
    if known:
        best = min(known, key=lambda row: row["seconds_to_loss"])
        print(
            f"\nSoonest: {_MODES[best['mode']].title}, m = {best['microbatches']}, "
            f"{best['seconds_to_loss']:.0f} s"
        )


def _draw(
    rows: list[dict[str, Any]],
    curves: dict[tuple[str, int], list[Pair]],
    args: argparse.Namespace,
) -> None:
    """Time to loss over m, and loss over time with the fewest microbatches."""
    from matplotlib.figure import Figure  # without pyplot: no display is looked for

    figure = Figure(figsize=(12, 5), layout="constrained")
    left, right = figure.subplots(1, 2)
    fewest = min(args.microbatches)
    for index, (name, mode) in enumerate(_MODES.items()):
        own = [row for row in rows if row["mode"] == name]
        points = [row for row in own if "share_of_bubble_free" in row]
        style: dict[str, Any] = {"color": f"C{index}", "label": mode.title}
        left.plot(
            [row["microbatches"] for row in points],
            [row["share_of_bubble_free"] for row in points],
            marker="o",
            **style,
        )
        losses: list[Curve] = [each.losses for each in curves.get((name, fewest), [])]
        seconds = [row["iteration_seconds"] for row in own if row["microbatches"] == fewest]
        if losses and seconds:
            mean = numpy.mean(losses, axis=0)
            start = min(args.warmup_iters, len(mean) // 4)
            times = [seconds[0] * n / 3600 for n in range(start + 1, len(mean) + 1)]
            right.plot(times, mean[start:], **style)
    left.axhline(1.0, color="black", linestyle="--", linewidth=1)
    left.set_xlabel("microbatches m")
    left.set_ylabel("time to loss over N bubble-free iterations")
    left.set_xticks(args.microbatches, [str(m) for m in args.microbatches])
    left.legend(fontsize=8)
    right.set_xlabel(f"hours, m = {fewest}")
    right.set_ylabel("training loss, smooth (nats a byte)")
    for axes in (left, right):
        axes.grid(alpha=0.3)
    figure.suptitle(
        f"Time to the loss of synchronous training, p = {args.stages}, {args.optimizer}",
        fontsize=11,
    )
    figure.savefig(args.png, dpi=130)
    progress(f"wrote {args.png}")


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "parts", nargs="*", metavar="PART", help="some of times, curves, report (default: all)"
    )
    parser.add_argument(
        "--output",
        type=Path,
        metavar="DIR",
        help="what is measured and trained (default runs/time-to-loss)",
    )
    parser.add_argument("--stages", type=int, default=4, help="pipeline stages p (default 4)")
    parser.add_argument(
        "--microbatches",
        type=int,
        nargs="+",
        default=[4, 6, 12, 24],
        help="numbers m (default 4 6 12 24)",
    )
    parser.add_argument(
        "--batch-ms",
        type=float,
        default=7200.0,
        help="m (t_f + t_b), the same for all m (default 7200; slots of 300 ms with m = 24)",
    )
    parser.add_argument("--optimizer-ms", type=float, default=60.0, help="t_opt (default 60)")
    parser.add_argument(
        "--train-iters", type=int, default=2000, help="N (default 2000)", metavar="N"
    )
    parser.add_argument(
        "--longer",
        type=float,
        default=1.5,
        metavar="F",
        help="every run has F N iterations (default 1.5)",
    )
    parser.add_argument("--warmup-iters", type=int, default=100, help="default 100")
    parser.add_argument("--batch", type=int, default=24, help="sequences a batch (default 24)")
    parser.add_argument("--layers", type=int, default=4, help="default 4")
    parser.add_argument("--hidden-size", type=int, default=64, help="default 64")
    parser.add_argument("--seq-length", type=int, default=64, help="in bytes (default 64)")
    parser.add_argument("--optimizer", choices=OPTIMIZERS, default="muon", help="default muon")
    parser.add_argument(
        "--learning-rates",
        type=float,
        nargs="+",
        metavar="LR",
        help="one, or several to choose from; by default "
        + ", ".join(f"{rate:g} for {name}" for name, (_, rate) in OPTIMIZERS.items()),
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[1], help="default 1")
    parser.add_argument(
        "--jobs", type=int, default=2, help="runs of one rank at a time (default 2)"
    )
    add_common(parser, iterations=3, repeats=1)
    args = parser.parse_args()
    args.dataset = {"package": "torch"}
    if args.quick:
        args.stages, args.microbatches, args.layers, args.hidden_size = 2, [2], 2, 32
        args.batch, args.batch_ms, args.optimizer_ms, args.iterations = 4, 300.0, 30.0, 2
        args.train_iters, args.warmup_iters, args.repeats = 20, 5, 1
        args.dataset = "stdlib"
    args.parts = args.parts or list(_PARTS)
    unknown = set(args.parts) - set(_PARTS)
    if unknown:
        parser.error(
            f"there is no part {', '.join(sorted(unknown))}; there are: {', '.join(_PARTS)}"
        )
    for m in args.microbatches:
        if args.batch % m:
            parser.error(f"a batch of {args.batch} sequences has no {m} equal microbatches")
        if m < max(args.stages - 1, 1):
            parser.error(f"{args.stages} stages need at least {args.stages - 1} microbatches")
    if args.layers % args.stages:
        parser.error(f"{args.stages} stages need a multiple of {args.stages} layers")
    args.microbatches = sorted(set(args.microbatches))
    return args


if __name__ == "__main__":
    sys.exit(main())
