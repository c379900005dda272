"""What ``megatron-async plan`` says of the memory, against the tensors of real jobs on CPU ranks.

Every rank counts the tensors that are alive behind its last iteration, each storage once: weights
and their versions, gradients, main parameters, the optimizer's state, the copy of the gradients and
the correction's buffers. The activations are what autograd holds for backwards at the peak of the
steady iterations, each storage once and without the weights. Both are compared with the plan's
figures of the same stage. What an operation needs while it runs is in neither.
"""

import argparse
import sys
from typing import Any

from support.jobs import JobError, run_job
from support.options import add_common, add_model, model_flags
from support.report import print_table, progress, write_csv

from megatron_async.planning.candidates import candidate
from megatron_async.planning.memory import (
    Layout,
    ModelShape,
    Storage,
    peak_in_flight,
    stage_memory,
)

_MODES: dict[str, tuple[str, tuple[str, ...], int]] = {
    "1f1b": ("1f1b", ("--rerun-mode", "disabled"), 0),
    "2bw": ("pipedream-2bw", ("--pipeline-schedule", "pipedream-2bw"), 0),
    "fresh-2bw-corrected": (
        "fresh-2bw",
        ("--pipeline-schedule", "fresh-2bw", "--delay-correction", "error-feedback"),
        1,
    ),
    "paci": ("paci", ("--pipeline-schedule", "paci"), 0),
}
"""Of each: the planner's schedule, the run's flags, the correction's buffers."""


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--stages", type=int, default=2)
    parser.add_argument("--microbatches", type=int, default=4)
    add_model(
        parser,
        hidden_size=128,
        heads=4,
        seq_length=64,
        vocab_size=1024,
        micro_batch_size=2,
        optimizers=("adam", "muon"),
    )
    parser.add_argument("--bf16", action="store_true", help="bf16 with fp32 main parameters")
    parser.add_argument("--recompute", action="store_true", help="full activation recompute")
    parser.add_argument("--modes", nargs="+", choices=_MODES, default=list(_MODES))
    add_common(parser, iterations=1, repeats=1)
    args = parser.parse_args()
    if args.quick:
        args.modes = ["fresh-2bw-corrected"]
    rows: list[dict[str, Any]] = []
    for name in dict.fromkeys(args.modes):
        progress(f"{name} ...")
        try:
            rows += _run(name, args)
        except JobError as error:
            progress(str(error))
            return 1
    table = [["mode", "stage", "state MB", "planned", "activations MB", "planned", "total, %"]]
    for row in rows:
        table.append(
            [
                row["mode"],
                str(row["stage"]),
                f"{row['state_bytes'] / 1e6:.3f}",
                f"{row['planned_state_bytes'] / 1e6:.3f}",
                f"{row['activation_bytes'] / 1e6:.3f}",
                f"{row['planned_activation_bytes'] / 1e6:.3f}",
                f"{100 * row['planned_over_measured']:.1f}",
            ]
        )
    print_table(table)
    if args.csv:
        write_csv(args.csv, rows)
    return 0


def _run(name: str, args: argparse.Namespace) -> list[dict[str, Any]]:
    schedule, flags, buffers = _MODES[name]
    argv = model_flags(args, stages=args.stages, microbatches=args.microbatches)
    argv += ["--attention-dropout", "0", "--hidden-dropout", "0"]
    argv += [*flags, *(["--bf16"] if args.bf16 else [])]
    if args.recompute:
        argv += ["--recompute-granularity", "full", "--recompute-method", "uniform"]
        argv += ["--recompute-num-layers", "1"]
    done = run_job(
        ranks=args.stages,
        flags=argv,
        iterations=args.iterations,
        timeout=args.timeout,
        settings={"count_memory": True, "count_activations": True},
    )
    planned = candidate(schedule)
    pipeline = planned.pipeline(stages=args.stages)
    lists = planned.lists(pipeline, microbatches=args.microbatches)
    rule = planned.schedule.rule(pipeline, args.microbatches)
    found = []
    for stage, measured in enumerate(done.ranks):
        held = stage_memory(
            ModelShape(
                layers=args.layers,
                hidden_size=args.hidden_size,
                attention_heads=args.heads,
                # Megatron pads to a multiple of 128.
                vocab_size=-(-args.vocab_size // 128) * 128,
                seq_length=args.seq_length,
            ),
            Layout(
                stages=args.stages,
                layers_per_stage=[args.layers // args.stages] * args.stages,
            ),
            Storage(
                bf16=args.bf16,
                optimizer=args.optimizer,
                asynchronous=planned.schedule.asynchronous,
                other_versions=rule.kept(stage) - 1,
                correction_buffers=buffers,
                recompute=args.recompute,
                dropout=False,
                fused_attention=False,
            ),
            stage=stage,
            micro_batch_size=args.micro_batch_size,
            in_flight=peak_in_flight(lists[stage]),
        )
        state = held.total - held.activations
        total = measured["tensor_bytes"] + measured["saved_bytes"]
        found.append(
            {
                "mode": name,
                "stage": stage,
                "stages": args.stages,
                "microbatches": args.microbatches,
                "layers": args.layers,
                "hidden_size": args.hidden_size,
                "seq_length": args.seq_length,
                "micro_batch_size": args.micro_batch_size,
                "vocab_size": args.vocab_size,
                "optimizer": args.optimizer,
                "precision": "bf16" if args.bf16 else "fp32",
                "recompute": args.recompute,
                "state_bytes": measured["tensor_bytes"],
                "planned_state_bytes": state,
                "activation_bytes": measured["saved_bytes"],
                "planned_activation_bytes": held.activations,
                "planned_over_measured": held.total / total,
            }
        )
    return found


if __name__ == "__main__":
    sys.exit(main())
