"""Stages that sleep instead of computing: what does each schedule make of them?

Every mode is a real training job on CPU ranks, through the package's launcher, of a tiny GPT. Each
microbatch's forward and backward and each optimizer step are stretched to given times by sleeping,
so that any number of stages runs on two cores and the time of an iteration is the schedule's doing:
communication, collectives and waiting are Megatron's own and real. It is compared with the
bubble-free ideal m (t_f + t_b) + t_opt, and with what the simulator of action lists predicts.

The processes' own work, some 20 ms for a microbatch, runs in the time that is slept, as long as it
fits. With more ranks than cores that asks for long slots (t_f + t_b): on two cores 300 ms for up to
8 stages and 600 ms for 16, so that the cores are busy less than a third of the time. A job without
any update, the mode 2bw-no-update, shows whether they are long enough: its ratio is near 1 then.
With 16 stages the processes take some 7 GB.

--latency-ms lets what crosses stages arrive late (see support/late_messages.py). torch-zbv and
torch-zb are zero-bubble schedules of torch.distributed.pipelining, real ranks over gloo as well,
that sleep as long and end an iteration with the same collectives; they have two stages a rank, and
halve t_b between the input's and the weights' part. Not among the default modes.
"""

import argparse
import sys
from typing import Any

from support.jobs import JobError, Measurement
from support.modes import MODES
from support.options import add_common
from support.pace import Pace, ideal_ms
from support.report import Spread, print_table, progress, write_bars, write_csv

from megatron_async.schedules.fresh_2bw import DELAYED_MICROBATCHES

_DEFAULT = ["1f1b", "interleaved", "2bw-undeferred", "2bw", "fresh-2bw", "paci", "2bw-no-update"]


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
        "--latency-ms",
        type=float,
        default=0.0,
        metavar="L",
        help="messages between stages arrive late by that, in every mode (default 0)",
    )
    parser.add_argument(
        "--delayed-microbatches",
        type=DELAYED_MICROBATCHES.parse,
        default=DELAYED_MICROBATCHES.default,
        metavar=DELAYED_MICROBATCHES.metavar,
        help="the flag of that name, for the modes that have it (default fewest)",
    )
    parser.add_argument(
        "--pipeline-extra-warmup",
        type=int,
        default=0,
        metavar="E",
        help="the flag of that name, for the modes that have it (default 0)",
    )
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
        help=f"some of {', '.join(MODES)} (default: {', '.join(_DEFAULT)})",
    )
    parser.add_argument(
        "--max-ratio",
        type=float,
        metavar="R",
        help="fail if a mode with a deferred update takes more than R of the ideal",
    )
    add_common(parser, iterations=6, repeats=3)
    args = parser.parse_args()
    if args.quick:
        args.stages, args.microbatches, args.iterations, args.repeats = 2, 2, 4, 1
        args.forward_ms, args.backward_ms, args.optimizer_ms = 50.0, 100.0, 30.0
    pace = Pace(
        stages=args.stages,
        microbatches=args.microbatches,
        forward_ms=args.forward_ms,
        backward_ms=args.backward_ms,
        optimizer_ms=args.optimizer_ms,
        latency_ms=args.latency_ms,
        delayed_microbatches=args.delayed_microbatches,
        extra_warmup=args.pipeline_extra_warmup,
        tied=args.tied,
        log_interval=args.log_interval,
        iterations=args.iterations,
        timeout=args.timeout,
    )
    modes: list[str] = []
    for name in dict.fromkeys(args.modes):
        reason = MODES[name].impossible(pace)
        if reason is None:
            modes.append(name)
        else:
            progress(f"{MODES[name].title} is left out: {reason}")
    if not modes:
        return 1

    measured: dict[str, list[Measurement]] = {name: [] for name in modes}
    for repeat in range(args.repeats):
        for name in modes:
            progress(f"repeat {repeat + 1} of {args.repeats}: {MODES[name].title} ...")
            try:
                done = MODES[name].run(pace)
            except JobError as error:
                progress(str(error))
                return 1
            measured[name].append(done)
            progress(f"    {1e3 * done.seconds:.1f} ms per iteration")
    rows = [_row(name, measured[name], pace, args.repeats) for name in modes]
    _report(rows, pace, args)
    failed = [
        row
        for row in rows
        if args.max_ratio is not None
        and MODES[row["mode"]].hides_update
        and row["ratio_to_ideal"] > args.max_ratio
    ]
    for row in failed:
        print(
            f"FAILED: {MODES[row['mode']].title}: {row['ratio_to_ideal']:.3f} of the ideal, more "
            f"than {args.max_ratio}"
        )
    return 1 if failed else 0


def _row(name: str, runs: list[Measurement], pace: Pace, repeats: int) -> dict[str, Any]:
    mode = MODES[name]
    ideal = ideal_ms(mode, pace)
    times = Spread.of([1e3 * done.seconds for done in runs])
    overhead = Spread.of([(1e3 * done.seconds - ideal) / pace.microbatches for done in runs])
    single = Spread.of([1e3 * seconds for done in runs for seconds in done.iteration_seconds])
    # What the ranks computed within the slept times, in the slowest of them.
    computed = max(
        max(rank["forward"], default=0.0) + max(rank["backward"], default=0.0)
        for done in runs
        for rank in done.ranks
    )
    return {
        "mode": name,
        "stages": pace.stages,
        "microbatches": pace.microbatches,
        "forward_ms": pace.forward_ms,
        "backward_ms": pace.backward_ms,
        "optimizer_ms": pace.optimizer_ms,
        "latency_ms": pace.latency_ms,
        "delayed_microbatches": pace.delayed_microbatches,
        "extra_warmup": pace.extra_warmup,
        "mean_delay": mode.mean_delay(pace),
        "log_interval": pace.log_interval,
        "tied": pace.tied,
        "iterations": pace.iterations,
        "repeats": repeats,
        "iteration_ms": times.median,
        "iteration_ms_low": times.low,
        "iteration_ms_high": times.high,
        "single_iteration_ms_low": single.low,
        "single_iteration_ms_high": single.high,
        "ideal_ms": ideal,
        "ratio_to_ideal": times.median / ideal,
        "ratio_low": times.low / ideal,
        "ratio_high": times.high / ideal,
        "simulated_ratio": mode.simulated_ms(pace) / ideal,
        "excess_ms_per_microbatch": overhead.median,
        "longest_own_work_ms": 1e3 * computed,
    }


def _report(rows: list[dict[str, Any]], pace: Pace, args: argparse.Namespace) -> None:
    late = f", messages {pace.latency_ms:g} ms late" if pace.latency_ms else ""
    extra = f", {pace.extra_warmup} more in flight" if pace.extra_warmup else ""
    print(
        f"\np = {pace.stages}, m = {pace.microbatches}, t_f = {pace.forward_ms:g} ms, "
        f"t_b = {pace.backward_ms:g} ms, t_opt = {pace.optimizer_ms:g} ms{late}{extra}, "
        f"{'tied' if pace.tied else 'untied'} embeddings, clipping on; "
        f"median (lowest to highest) of {args.repeats} runs of {pace.iterations} iterations\n"
    )
    table = [["mode", "delay", "ms per iteration", "ideal", "ratio to ideal", "simulated"]]
    for row in rows:
        times = Spread(row["iteration_ms"], row["iteration_ms_low"], row["iteration_ms_high"])
        ratio = Spread(row["ratio_to_ideal"], row["ratio_low"], row["ratio_high"])
        table.append(
            [
                MODES[row["mode"]].title,
                f"{row['mean_delay']:.3g}",
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
        if row["longest_own_work_ms"] > pace.forward_ms + pace.backward_ms:
            print(
                f"\nNote: {MODES[row['mode']].title}: a microbatch's own work took up to "
                f"{row['longest_own_work_ms']:.0f} ms, more than its slot; use longer slots"
            )
    if args.csv:
        write_csv(args.csv, rows)
    if args.png:
        write_bars(
            args.png,
            title=f"Time per iteration over the bubble-free ideal, p = {pace.stages}, "
            f"m = {pace.microbatches}",
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
