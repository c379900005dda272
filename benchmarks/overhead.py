"""What asynchronous training costs where there is no pipeline: one rank, time and memory.

With one stage nothing is waited for, so whatever 2BW takes longer than Megatron's synchronous
training is its overhead: the second weight version, the copy of the gradients, the correction. Jobs
of the modes alternate, and each repeat gives one ratio to its own synchronous job; the result is
the median of these with its 95 % bootstrap confidence interval. Memory is the size of all tensors
alive after the last iteration, each storage counted once, against what arithmetic says, and the
allocator's peak (on a CPU rank the process's).
"""

import argparse
import statistics
import sys
from typing import Any

from support.jobs import JobError, Measurement, run_job
from support.options import add_common, add_model, model_flags
from support.report import Spread, median_interval, print_table, progress, write_bars, write_csv

from megatron_async.planning.memory import Layout, ModelShape, Storage, stage_memory

_ASYNCHRONOUS = ("--pipeline-schedule", "pipedream-2bw")
_MODES: dict[str, tuple[str, ...]] = {
    # By default Megatron keeps an iteration's data, to be able to run it again.
    "synchronous": ("--rerun-mode", "disabled"),
    "2bw-undeferred": (*_ASYNCHRONOUS, "--no-deferred-update"),
    "2bw": _ASYNCHRONOUS,
    "2bw-corrected": (*_ASYNCHRONOUS, "--delay-correction", "error-feedback"),
    "2bw-second-buffer": (*_ASYNCHRONOUS, "--overlap-grad-reduce", "--second-grad-buffer"),
}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--microbatches", type=int, default=4)
    add_model(
        parser,
        hidden_size=256,
        heads=4,
        seq_length=256,
        vocab_size=1024,
        micro_batch_size=1,
        optimizers=("adam", "muon", "sgd"),
    )
    parser.add_argument("--bf16", action="store_true", help="bf16 with fp32 main parameters")
    parser.add_argument(
        "--gpu",
        action="store_true",
        help="on one GPU instead of a CPU rank, with Megatron's defaults for everything else",
    )
    parser.add_argument(
        "--modes", nargs="+", choices=_MODES, default=["synchronous", "2bw", "2bw-corrected"]
    )
    parser.add_argument(
        "--extra",
        nargs=argparse.REMAINDER,
        default=[],
        help="everything behind it goes to the training script as it stands",
    )
    add_common(parser, iterations=10, repeats=7)
    args = parser.parse_args()
    if args.quick:
        args.iterations, args.repeats = 3, 1
        args.hidden_size, args.seq_length = 128, 64
    modes = ["synchronous", *(m for m in dict.fromkeys(args.modes) if m != "synchronous")]

    runs: dict[str, list[Measurement]] = {name: [] for name in modes}
    for repeat in range(args.repeats):
        # Turn about, so that whatever drifts does not favour one of them.
        for name in modes if repeat % 2 == 0 else reversed(modes):
            progress(f"repeat {repeat + 1} of {args.repeats}: {name} ...")
            try:
                run = _run(name, args)
            except JobError as error:
                progress(str(error))
                return 1
            runs[name].append(run)
            progress(f"    {1e3 * _seconds(run):.1f} ms per iteration")
    rows = [_row(name, runs, args) for name in modes]
    _report(rows, args)
    return 0


def _run(name: str, args: argparse.Namespace) -> Measurement:
    flags = model_flags(args, stages=1, microbatches=args.microbatches)
    flags += [*(["--bf16"] if args.bf16 else []), *_MODES[name], *args.extra]
    return run_job(
        ranks=1,
        flags=flags,
        iterations=args.iterations,
        timeout=args.timeout,
        settings={"synchronize": args.gpu, "count_memory": True},
        on_cpu=not args.gpu,
    )


def _seconds(run: Measurement) -> float:
    """The job's median iteration, which something else on the machine disturbs least."""
    return statistics.median(run.iteration_seconds)


def _expected(name: str, args: argparse.Namespace) -> int:
    """Bytes that the mode keeps beyond the synchronous one, by arithmetic."""
    memory = stage_memory(
        ModelShape(
            layers=args.layers,
            hidden_size=args.hidden_size,
            attention_heads=args.heads,
            # Megatron pads to a multiple of 128.
            vocab_size=-(-args.vocab_size // 128) * 128,
            seq_length=args.seq_length,
        ),
        Layout(stages=1, layers_per_stage=[args.layers]),
        Storage(
            bf16=args.bf16,
            asynchronous=name != "synchronous",
            deferred_update=name != "2bw-undeferred",
            second_grad_buffer=name == "2bw-second-buffer",
            correction_buffers=int(name == "2bw-corrected"),
        ),
        stage=0,
        micro_batch_size=args.micro_batch_size,
        in_flight=1,
    )
    return memory.added


def _row(name: str, runs: dict[str, list[Measurement]], args: argparse.Namespace) -> dict[str, Any]:
    baseline = runs["synchronous"]
    times = Spread.of([1e3 * _seconds(run) for run in runs[name]])
    ratio = median_interval(
        [_seconds(run) / _seconds(base) for base, run in zip(baseline, runs[name], strict=True)]
    )

    def bytes_of(mode: str, what: str) -> float:
        found: list[float] = [run.ranks[0][what] for run in runs[mode]]
        return statistics.median(found)

    return {
        "mode": name,
        "baseline": "synchronous",
        "device": "gpu" if args.gpu else "cpu",
        "optimizer": args.optimizer,
        "repeats": args.repeats,
        "iteration_ms": times.median,
        "iteration_ms_low": times.low,
        "iteration_ms_high": times.high,
        "ratio": ratio.median,
        "ratio_ci_low": ratio.low,
        "ratio_ci_high": ratio.high,
        "tensor_bytes": int(bytes_of(name, "tensor_bytes")),
        "added_bytes": int(
            bytes_of(name, "tensor_bytes") - bytes_of("synchronous", "tensor_bytes")
        ),
        "expected_added_bytes": _expected(name, args),
        "peak_bytes": int(bytes_of(name, "peak_bytes")),
    }


def _report(rows: list[dict[str, Any]], args: argparse.Namespace) -> None:
    device = "GPU" if args.gpu else "CPU rank"
    print(
        f"\none {device}, m = {args.microbatches}, {args.layers} layers, "
        f"hidden {args.hidden_size}, sequence {args.seq_length}, {args.optimizer}, "
        f"{'bf16' if args.bf16 else 'fp32'}; {args.repeats} repeats\n"
    )
    table = [["mode", "ms per iteration", "ratio (95 % CI)", "added MB", "expected MB", "peak MB"]]
    for row in rows:
        times = Spread(row["iteration_ms"], row["iteration_ms_low"], row["iteration_ms_high"])
        ratio = Spread(row["ratio"], row["ratio_ci_low"], row["ratio_ci_high"])
        table.append(
            [
                row["mode"],
                times.show(1),
                ratio.show(3),
                f"{row['added_bytes'] / 1e6:.3f}",
                f"{row['expected_added_bytes'] / 1e6:.3f}",
                f"{row['peak_bytes'] / 1e6:.0f}",
            ]
        )
    print_table(table)
    if args.csv:
        write_csv(args.csv, rows)
    if args.png:
        write_bars(
            args.png,
            title="Time per iteration over synchronous training, one stage",
            unit="ratio, with the 95 % confidence interval of the median",
            bars=[
                (row["mode"], Spread(row["ratio"], row["ratio_ci_low"], row["ratio_ci_high"]))
                for row in rows
            ],
            line=1.0,
            line_label="synchronous",
        )


if __name__ == "__main__":
    sys.exit(main())
