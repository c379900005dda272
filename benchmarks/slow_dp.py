"""Slow data-parallel collectives: how much of their time does an iteration still see?

Each reduction of gradients and each gather of parameters arrives later by an injected delay, as
over a slow network; the stages sleep instead of computing (see paced.py). A mode's exposed time is
what an iteration takes longer with the delay than without it. A synchronous iteration without
overlap exposes all of it, a perfect overlap none. A stage's gradients are ready at the end of its
last backward, not before: the worst that a bucket's reduction can meet.
"""

import argparse
import dataclasses
import sys
from typing import Any

from support.jobs import JobError, Measurement, gpt_flags, run_job
from support.options import add_common
from support.report import Spread, print_table, progress, write_bars, write_csv

_ASYNCHRONOUS = ("--pipeline-schedule", "pipedream-2bw")
_FRESH = ("--pipeline-schedule", "fresh-2bw")
_SHARDED = ("--use-distributed-optimizer",)
_REDUCE = ("--overlap-grad-reduce",)
_GATHER = ("--overlap-param-gather",)


@dataclasses.dataclass(frozen=True)
class Mode:
    title: str
    flags: tuple[str, ...]


MODES = {
    "1f1b": Mode("1F1B", _SHARDED),
    "1f1b-overlap": Mode("1F1B, both overlaps", (*_SHARDED, *_REDUCE, *_GATHER)),
    "2bw": Mode("2BW", (*_ASYNCHRONOUS, *_SHARDED)),
    "2bw-reduce": Mode("2BW, gradients overlapped", (*_ASYNCHRONOUS, *_SHARDED, *_REDUCE)),
    "2bw-overlap": Mode("2BW, both overlapped", (*_ASYNCHRONOUS, *_SHARDED, *_REDUCE, *_GATHER)),
    "2bw-second-buffer": Mode(
        "2BW, both overlapped, second gradient buffer",
        (*_ASYNCHRONOUS, *_SHARDED, *_REDUCE, *_GATHER, "--second-grad-buffer"),
    ),
    "fresh-2bw-overlap": Mode(
        "fresh-2bw, both overlapped", (*_FRESH, *_SHARDED, *_REDUCE, *_GATHER)
    ),
    "fresh-2bw-second-buffer": Mode(
        "fresh-2bw, both overlapped, second gradient buffer",
        (*_FRESH, *_SHARDED, *_REDUCE, *_GATHER, "--second-grad-buffer"),
    ),
}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--stages", type=int, default=2, help="pipeline stages (default 2)")
    parser.add_argument(
        "--data-parallel", type=int, default=2, help="data-parallel replicas (default 2)"
    )
    parser.add_argument("--microbatches", type=int, default=4, help="of each replica (default 4)")
    parser.add_argument("--forward-ms", type=float, default=100.0, help="t_f (default 100)")
    parser.add_argument("--backward-ms", type=float, default=200.0, help="t_b (default 200)")
    parser.add_argument("--optimizer-ms", type=float, default=20.0, help="t_opt (default 20)")
    parser.add_argument(
        "--delay-ms",
        type=float,
        default=150.0,
        help="injected into each data-parallel collective (default 150)",
    )
    parser.add_argument(
        "--modes",
        nargs="+",
        choices=MODES,
        default=list(MODES),
        metavar="MODE",
        help=f"some of {', '.join(MODES)} (default: all)",
    )
    add_common(parser, iterations=6, repeats=3)
    args = parser.parse_args()
    if args.quick:
        args.stages, args.microbatches, args.iterations, args.repeats = 1, 2, 3, 1
        args.forward_ms, args.backward_ms, args.optimizer_ms = 40.0, 80.0, 10.0
        args.delay_ms = 60.0
        if args.modes == list(MODES):
            args.modes = ["1f1b", "2bw-overlap", "fresh-2bw-second-buffer"]

    runs: dict[str, list[tuple[Measurement, Measurement]]] = {name: [] for name in args.modes}
    for repeat in range(args.repeats):
        for name in dict.fromkeys(args.modes):
            progress(f"repeat {repeat + 1} of {args.repeats}: {MODES[name].title} ...")
            try:
                pair = (_run(MODES[name], 0.0, args), _run(MODES[name], args.delay_ms, args))
            except JobError as error:
                progress(str(error))
                return 1
            runs[name].append(pair)
            progress(
                f"    {1e3 * pair[0].seconds:.1f} ms per iteration, delayed "
                f"{1e3 * pair[1].seconds:.1f} ms"
            )
    rows = [_row(name, pairs, args) for name, pairs in runs.items()]
    _report(rows, args)
    return 0


def _run(mode: Mode, delay_ms: float, args: argparse.Namespace) -> Measurement:
    flags = gpt_flags(
        layers=2 * args.stages,
        hidden_size=32,
        heads=2,
        seq_length=32,
        vocab_size=128,
        stages=args.stages,
        microbatches=args.microbatches,
        data_parallel=args.data_parallel,
        iterations=args.iterations,
        # Megatron cannot resume it, but steps it: a plain Adam keeps the optimizer out of this.
        optimizer="adam",
    )
    return run_job(
        ranks=args.stages * args.data_parallel,
        flags=[*flags, *mode.flags],
        iterations=args.iterations,
        timeout=args.timeout,
        settings={
            "forward_seconds": args.forward_ms / 1e3,
            "backward_seconds": args.backward_ms / 1e3,
            "gradients_last": True,
            "optimizer_seconds": args.optimizer_ms / 1e3,
            "reduce_delay_seconds": delay_ms / 1e3,
        },
    )


def _row(
    name: str, pairs: list[tuple[Measurement, Measurement]], args: argparse.Namespace
) -> dict[str, Any]:
    plain = Spread.of([1e3 * run.seconds for run, _ in pairs])
    exposed = Spread.of([1e3 * (slow.seconds - run.seconds) for run, slow in pairs])
    slow = pairs[0][1]
    collectives = slow.ranks[0]["collectives"] / len(slow.ranks[0]["ends"])
    injected = args.delay_ms * collectives
    ratio = Spread.of([slow.seconds / run.seconds for run, slow in pairs])
    return {
        "mode": name,
        "baseline": f"{name} without delay",
        "stages": args.stages,
        "data_parallel": args.data_parallel,
        "microbatches": args.microbatches,
        "delay_ms": args.delay_ms,
        "repeats": args.repeats,
        "collectives_per_iteration": collectives,
        "injected_ms": injected,
        "iteration_ms": plain.median,
        "exposed_ms": exposed.median,
        "exposed_ms_low": exposed.low,
        "exposed_ms_high": exposed.high,
        "exposed_share": exposed.median / injected if injected else 0.0,
        "ratio": ratio.median,
        "ratio_low": ratio.low,
        "ratio_high": ratio.high,
    }


def _report(rows: list[dict[str, Any]], args: argparse.Namespace) -> None:
    print(
        f"\np = {args.stages}, {args.data_parallel} replicas, m = {args.microbatches}, "
        f"t_f = {args.forward_ms:g} ms, t_b = {args.backward_ms:g} ms, t_opt = "
        f"{args.optimizer_ms:g} ms, every collective {args.delay_ms:g} ms late; median (lowest to "
        f"highest) of {args.repeats} pairs\n"
    )
    table = [["mode", "ms without delay", "injected", "exposed ms", "exposed share", "ratio"]]
    for row in rows:
        exposed = Spread(row["exposed_ms"], row["exposed_ms_low"], row["exposed_ms_high"])
        ratio = Spread(row["ratio"], row["ratio_low"], row["ratio_high"])
        table.append(
            [
                MODES[row["mode"]].title,
                f"{row['iteration_ms']:.1f}",
                f"{row['injected_ms']:.0f}",
                exposed.show(1),
                f"{100 * row['exposed_share']:.0f} %",
                ratio.show(3),
            ]
        )
    print_table(table)
    if args.csv:
        write_csv(args.csv, rows)
    if args.png:
        write_bars(
            args.png,
            title=f"Time that an iteration sees of collectives that are {args.delay_ms:g} ms late",
            unit="exposed ms per iteration",
            bars=[
                (
                    MODES[row["mode"]].title,
                    Spread(row["exposed_ms"], row["exposed_ms_low"], row["exposed_ms_high"]),
                )
                for row in rows
            ],
        )


if __name__ == "__main__":
    sys.exit(main())
