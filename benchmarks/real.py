"""Real computation on two CPU ranks: how much of the possible gain does 2BW reach?

Pipeline of two stages, each on a core of its own, with a GPT so large that computation dominates;
Megatron's 1F1B against PipeDream-2BW, for several numbers of microbatches, in one run. The possible
gain is

    ((m + p - 1) tau + t_opt) / (m tau + t_opt),

with the slot tau (forward and backward of one microbatch on the slower stage) and the optimizer's
own time t_opt (norm, clipping and step, on the rank that waits for no other), measured in the same
jobs. All figures are medians: over microbatches or iterations in a job, then over the repeats.

The formula takes every slot for equally long. Where cores share a memory bus or a clock budget, a
slot takes longer while the other core computes, too, and 1F1B's bubbles speed up its other stages.
So each mode's own slot is printed beside it, and the time per iteration is compared with m slots of
that mode and an optimizer step, too (`bubble_free`): what no bubble at all would give.
Nothing sleeps; run it on an otherwise idle machine.
"""

import argparse
import statistics
import sys
from typing import Any

from support.jobs import SKIPPED, JobError, Measurement, run_job
from support.options import add_common, add_model, model_flags
from support.report import Spread, print_table, progress, write_bars, write_csv

_STAGES = 2
_MODES: dict[str, tuple[str, ...]] = {
    "1f1b": (),
    "2bw-undeferred": ("--pipeline-schedule", "pipedream-2bw", "--no-deferred-update"),
    "2bw": ("--pipeline-schedule", "pipedream-2bw"),
    "2bw-corrected": (
        *("--pipeline-schedule", "pipedream-2bw"),
        *("--delay-correction", "error-feedback"),
    ),
}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--microbatches", type=int, nargs="+", default=[1, 2, 4, 8])
    add_model(
        parser,
        hidden_size=512,
        heads=8,
        seq_length=256,
        vocab_size=256,
        micro_batch_size=2,
        optimizers=("adam", "muon", "sgd"),
    )
    parser.add_argument(
        "--modes",
        nargs="+",
        choices=_MODES,
        default=["1f1b", "2bw"],
        help="1f1b is always run (default: 1f1b 2bw)",
    )
    add_common(parser, iterations=7, repeats=5)
    args = parser.parse_args()
    if args.quick:
        args.microbatches, args.iterations, args.repeats = [2], 3, 1
        args.hidden_size, args.seq_length = 256, 128
    modes = ["1f1b", *(name for name in dict.fromkeys(args.modes) if name != "1f1b")]

    rows: list[dict[str, Any]] = []
    for microbatches in args.microbatches:
        runs: dict[str, list[Measurement]] = {name: [] for name in modes}
        for repeat in range(args.repeats):
            for name in modes:
                progress(f"m = {microbatches}, repeat {repeat + 1} of {args.repeats}: {name} ...")
                try:
                    run = _run(name, microbatches, args)
                except JobError as error:
                    progress(str(error))
                    return 1
                runs[name].append(run)
                progress(f"    {1e3 * run.median_seconds:.1f} ms per iteration")
        rows += _rows(runs, microbatches, args)
    _report(rows, args)
    return 0


def _run(name: str, microbatches: int, args: argparse.Namespace) -> Measurement:
    flags = model_flags(args, stages=_STAGES, microbatches=microbatches)
    return run_job(
        ranks=_STAGES,
        flags=[*flags, *_MODES[name]],
        iterations=args.iterations,
        timeout=args.timeout,
        settings={"pin": True},
    )


def _slot(run: Measurement, microbatches: int) -> float:
    """Seconds of a forward and a backward on the slower stage."""
    skip = SKIPPED * microbatches
    slots: list[float] = [
        statistics.median(rank["forward"][skip:]) + statistics.median(rank["backward"][skip:])
        for rank in run.ranks
    ]
    return max(slots)


def _optimizer(run: Measurement) -> float:
    """Seconds of Megatron's step on the rank that comes last to it, and so waits for none."""
    per_iteration = zip(*(rank["step"][SKIPPED:] for rank in run.ranks), strict=True)
    last: list[float] = [min(times) for times in per_iteration]
    return statistics.median(last)


def _rows(
    runs: dict[str, list[Measurement]], microbatches: int, args: argparse.Namespace
) -> list[dict[str, Any]]:
    everything = [run for per_mode in runs.values() for run in per_mode]
    tau = statistics.median(_slot(run, microbatches) for run in everything)
    t_opt = statistics.median(_optimizer(run) for run in runs["1f1b"])
    possible = ((microbatches + _STAGES - 1) * tau + t_opt) / (microbatches * tau + t_opt)
    rows: list[dict[str, Any]] = []
    for name, measured in runs.items():
        times = Spread.of([1e3 * run.median_seconds for run in measured])
        own_slot = statistics.median(_slot(run, microbatches) for run in measured)
        bubble_free = statistics.median(
            (microbatches * _slot(run, microbatches) + t_opt) / run.median_seconds
            for run in measured
        )
        # Jobs of one repeat ran one after the other, so that a slower hour slows both.
        gain = Spread.of(
            [
                base.median_seconds / run.median_seconds
                for base, run in zip(runs["1f1b"], measured, strict=True)
            ]
        )
        rows.append(
            {
                "mode": name,
                "microbatches": microbatches,
                "baseline": "1f1b",
                "optimizer": args.optimizer,
                "repeats": args.repeats,
                "iteration_ms": times.median,
                "iteration_ms_low": times.low,
                "iteration_ms_high": times.high,
                "slot_ms": 1e3 * own_slot,
                "bubble_free_share": bubble_free,
                "optimizer_ms": 1e3 * t_opt,
                "ratio": gain.median,
                "ratio_low": gain.low,
                "ratio_high": gain.high,
                "ideal_ratio": possible if name != "1f1b" else 1.0,
                "share_of_ideal": gain.median / possible if name != "1f1b" else 1.0,
            }
        )
    return rows


def _report(rows: list[dict[str, Any]], args: argparse.Namespace) -> None:
    print(
        f"\np = {_STAGES}, {args.layers} layers, hidden {args.hidden_size}, sequence "
        f"{args.seq_length}, {args.optimizer}; median (lowest to highest) of {args.repeats} runs\n"
    )
    table = [["mode", "m", "ms per iteration", "tau", "t_opt", "bubble-free", "gain over 1F1B"]]
    table[0] += ["ideal gain", "share"]
    for row in rows:
        times = Spread(row["iteration_ms"], row["iteration_ms_low"], row["iteration_ms_high"])
        gain = Spread(row["ratio"], row["ratio_low"], row["ratio_high"])
        table.append(
            [
                row["mode"],
                str(row["microbatches"]),
                times.show(0),
                f"{row['slot_ms']:.0f}",
                f"{row['optimizer_ms']:.1f}",
                f"{100 * row['bubble_free_share']:.1f} %",
                gain.show(3),
                f"{row['ideal_ratio']:.3f}",
                f"{100 * row['share_of_ideal']:.1f} %",
            ]
        )
    print_table(table)
    if args.csv:
        write_csv(args.csv, rows)
    if args.png:
        shown = [row for row in rows if row["mode"] != "1f1b"]
        write_bars(
            args.png,
            title="Speed-up over Megatron's 1F1B, two CPU ranks, over the ideal one",
            unit="share of the ideal speed-up",
            bars=[
                (
                    f"{row['mode']}, m = {row['microbatches']}",
                    Spread(
                        row["share_of_ideal"],
                        row["ratio_low"] / row["ideal_ratio"],
                        row["ratio_high"] / row["ideal_ratio"],
                    ),
                )
                for row in shown
            ],
            line=1.0,
            line_label="ideal",
        )


if __name__ == "__main__":
    sys.exit(main())
