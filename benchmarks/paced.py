"""Stages that sleep instead of computing: what does each schedule make of them?

Every mode is a real training job on CPU ranks, through the package's launcher, of a tiny GPT. Each
microbatch's forward and backward and each optimizer step are stretched to given times by sleeping,
so that any number of stages runs on two cores and the time of an iteration is the schedule's doing:
communication, collectives and waiting are Megatron's own and real. It is compared with the
bubble-free ideal m (t_f + t_b) + t_opt, and with what the simulator of action lists predicts.

The processes' own work runs in the time that is slept, as long as it fits: with more ranks than
cores give slots (t_f + t_b) of 300 ms or more.
"""

import argparse
import dataclasses
import sys
from typing import Any

from support.jobs import JobError, Measurement, gpt_flags, run_job
from support.misplaced import misplaced_schedule
from support.options import add_common
from support.report import Spread, print_table, progress, write_bars, write_csv

from megatron_async.planning.candidates import candidate
from megatron_async.schedules.schedule import Pipeline, action_lists
from megatron_async.schedules.simulator import Costs, simulate

_ASYNCHRONOUS = ("--pipeline-schedule", "pipedream-2bw")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mode:
    title: str
    flags: tuple[str, ...] = ()
    simulated: str | None = None
    """Name of the schedule in `megatron_async.planning.candidates`."""
    chunks: int = 1
    settings: dict[str, Any] = dataclasses.field(default_factory=dict)


MODES = {
    "1f1b": Mode(title="Megatron 1F1B", simulated="1f1b"),
    "interleaved": Mode(
        title="Megatron interleaved 1F1B (v = 2)", simulated="interleaved", chunks=2
    ),
    "2bw-undeferred": Mode(
        title="2BW, update undeferred",
        flags=(*_ASYNCHRONOUS, "--no-deferred-update"),
        simulated="pipedream-2bw-undeferred",
    ),
    "2bw": Mode(title="2BW, update deferred", flags=_ASYNCHRONOUS, simulated="pipedream-2bw"),
    "2bw-no-update": Mode(
        title="2BW, no update at all",
        flags=_ASYNCHRONOUS,
        simulated="pipedream-2bw",
        settings={"update": False},
    ),
    "2bw-misplaced": Mode(
        title="2BW, update completed after the receive (wrong)",
        flags=("--pipeline-schedule", misplaced_schedule().name),
    ),
}
_DEFAULT = ["1f1b", "interleaved", "2bw-undeferred", "2bw", "2bw-no-update"]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--stages", type=int, default=4, help="pipeline stages p (default 4)")
    parser.add_argument("--microbatches", type=int, default=4, help="microbatches m (default 4)")
    parser.add_argument("--forward-ms", type=float, default=100.0, help="t_f (default 100)")
    parser.add_argument("--backward-ms", type=float, default=200.0, help="t_b (default 200)")
    parser.add_argument("--optimizer-ms", type=float, default=60.0, help="t_opt (default 60)")
    parser.add_argument(
        "--log-interval", type=int, default=1000000, help="iterations between log lines (none)"
    )
    parser.add_argument(
        "--tied",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="first and last stage share the embedding, whose gradients have to be summed "
        "(default: tied)",
    )
    parser.add_argument(
        "--modes",
        nargs="+",
        choices=MODES,
        default=_DEFAULT,
        metavar="MODE",
        help=f"some of {', '.join(MODES)} (default: all but the last)",
    )
    parser.add_argument(
        "--max-ratio",
        type=float,
        metavar="R",
        help="fail if deferred 2BW (or the misplaced one, if run) takes more than R of the ideal",
    )
    add_common(parser, iterations=6, repeats=3)
    args = parser.parse_args()
    if args.quick:
        args.stages, args.microbatches, args.iterations, args.repeats = 2, 2, 4, 1
        args.forward_ms, args.backward_ms, args.optimizer_ms = 50.0, 100.0, 30.0
    modes = [name for name in dict.fromkeys(args.modes) if _possible(name, args)]

    measured: dict[str, list[Measurement]] = {name: [] for name in modes}
    for repeat in range(args.repeats):
        for name in modes:
            progress(f"repeat {repeat + 1} of {args.repeats}: {MODES[name].title} ...")
            try:
                run = _run(MODES[name], args)
            except JobError as error:
                progress(str(error))
                return 1
            measured[name].append(run)
            progress(f"    {1e3 * run.seconds:.1f} ms per iteration")
    rows = [_row(name, measured[name], args) for name in modes]
    _report(rows, args)
    failed = [
        row
        for row in rows
        if args.max_ratio is not None
        and row["mode"] in ("2bw", "2bw-misplaced")
        and row["ratio_to_ideal"] > args.max_ratio
    ]
    for row in failed:
        print(
            f"FAILED: {MODES[row['mode']].title}: {row['ratio_to_ideal']:.3f} of the ideal, more "
            f"than {args.max_ratio}"
        )
    return 1 if failed else 0


def _possible(name: str, args: argparse.Namespace) -> bool:
    mode = MODES[name]
    if mode.chunks > 1 and (args.stages < 2 or args.microbatches % args.stages):
        progress(
            f"{mode.title} is left out: it needs at least 2 stages and a multiple of "
            f"{args.stages} microbatches"
        )
        return False
    return True


def _run(mode: Mode, args: argparse.Namespace) -> Measurement:
    layers = 2 * args.stages  # The same model for all modes.
    flags = gpt_flags(
        layers=layers,
        hidden_size=32,
        heads=2,
        seq_length=32,
        vocab_size=128,
        stages=args.stages,
        microbatches=args.microbatches,
        iterations=args.iterations,
        tied=args.tied,
        log_interval=args.log_interval,
    )
    flags += mode.flags
    if mode.chunks > 1:
        flags += ["--num-layers-per-virtual-pipeline-stage", str(2 // mode.chunks)]
    return run_job(
        ranks=args.stages,
        flags=flags,
        iterations=args.iterations,
        timeout=args.timeout,
        settings={
            "forward_seconds": args.forward_ms / 1e3,
            "backward_seconds": args.backward_ms / 1e3,
            "optimizer_seconds": args.optimizer_ms / 1e3,
            "chunks": mode.chunks,
            **mode.settings,
        },
    )


def _simulated(name: str, args: argparse.Namespace) -> float:
    """Milliseconds per iteration that the simulator predicts."""
    mode = MODES[name]
    updates = mode.settings.get("update", True)
    costs = Costs(
        forward=args.forward_ms,
        backward=args.backward_ms,
        optimizer=args.optimizer_ms if updates else 0.0,
    )
    if mode.simulated is None:
        pipeline = Pipeline(stages=args.stages)
        lists = action_lists(misplaced_schedule(), pipeline, [args.microbatches] * 16)
    else:
        planned = candidate(mode.simulated)
        lists = planned.lists(
            planned.pipeline(stages=args.stages), microbatches=args.microbatches, iterations=16
        )
    return simulate(lists, costs).iteration_time


def _row(name: str, runs: list[Measurement], args: argparse.Namespace) -> dict[str, Any]:
    mode = MODES[name]
    slots = args.microbatches * (args.forward_ms + args.backward_ms)
    ideal = slots + (args.optimizer_ms if mode.settings.get("update", True) else 0.0)
    times = Spread.of([1e3 * run.seconds for run in runs])
    overhead = Spread.of([(1e3 * run.seconds - ideal) / args.microbatches for run in runs])
    single = Spread.of([1e3 * seconds for run in runs for seconds in run.iteration_seconds])
    # What the ranks computed within the slept times, in the slowest of them.
    computed = max(
        max(rank["forward"], default=0.0) + max(rank["backward"], default=0.0)
        for run in runs
        for rank in run.ranks
    )
    return {
        "mode": name,
        "stages": args.stages,
        "microbatches": args.microbatches,
        "forward_ms": args.forward_ms,
        "backward_ms": args.backward_ms,
        "optimizer_ms": args.optimizer_ms,
        "log_interval": args.log_interval,
        "tied": args.tied,
        "iterations": args.iterations,
        "repeats": args.repeats,
        "iteration_ms": times.median,
        "iteration_ms_low": times.low,
        "iteration_ms_high": times.high,
        "single_iteration_ms_low": single.low,
        "single_iteration_ms_high": single.high,
        "ideal_ms": ideal,
        "ratio_to_ideal": times.median / ideal,
        "ratio_low": times.low / ideal,
        "ratio_high": times.high / ideal,
        "simulated_ratio": _simulated(name, args) / ideal,
        "excess_ms_per_microbatch": overhead.median,
        "longest_own_work_ms": 1e3 * computed,
    }


def _report(rows: list[dict[str, Any]], args: argparse.Namespace) -> None:
    print(
        f"\np = {args.stages}, m = {args.microbatches}, t_f = {args.forward_ms:g} ms, "
        f"t_b = {args.backward_ms:g} ms, t_opt = {args.optimizer_ms:g} ms, "
        f"{'tied' if args.tied else 'untied'} embeddings, clipping on; "
        f"median (lowest to highest) of {args.repeats} runs of {args.iterations} iterations\n"
    )
    table = [["mode", "ms per iteration", "ideal", "ratio to ideal", "simulated"]]
    for row in rows:
        times = Spread(row["iteration_ms"], row["iteration_ms_low"], row["iteration_ms_high"])
        ratio = Spread(row["ratio_to_ideal"], row["ratio_low"], row["ratio_high"])
        table.append(
            [
                MODES[row["mode"]].title,
                times.show(1),
                f"{row['ideal_ms']:.0f}",
                ratio.show(3),
                f"{row['simulated_ratio']:.3f}",
            ]
        )
    print_table(table)
    for row in rows:
        if row["mode"] == "2bw-no-update":
            print(
                f"\nFixed overhead, from the run without any update: "
                f"{row['excess_ms_per_microbatch']:.2f} ms per microbatch"
            )
        if row["longest_own_work_ms"] > args.forward_ms + args.backward_ms:
            print(
                f"\nNote: {MODES[row['mode']].title}: a microbatch's own work took up to "
                f"{row['longest_own_work_ms']:.0f} ms, more than its slot; use longer slots"
            )
    if args.csv:
        write_csv(args.csv, rows)
    if args.png:
        write_bars(
            args.png,
            title=f"Time per iteration over the bubble-free ideal, p = {args.stages}, "
            f"m = {args.microbatches}",
            unit="ratio to ideal",
            bars=[
                (
                    MODES[row["mode"]].title,
                    Spread(row["ratio_to_ideal"], row["ratio_low"], row["ratio_high"]),
                )
                for row in rows
            ],
            line=1.0,
            line_label="ideal",
        )


if __name__ == "__main__":
    sys.exit(main())
