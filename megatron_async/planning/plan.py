"""`megatron-async plan`: what each schedule would take, in time and in memory, before it is run."""

import argparse
import csv
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TextIO

from megatron_async.corrections import CORRECTIONS, RECOMMENDED
from megatron_async.corrections.correction import ADAPTIVE_STRENGTH
from megatron_async.optimizers import OPTIMIZERS
from megatron_async.planning import search_command
from megatron_async.planning.candidates import (
    Candidate,
    add_schedule_flags,
    candidates,
    check_counts,
    pipeline_of,
)
from megatron_async.planning.check import check
from megatron_async.planning.memory import (
    Layout,
    ModelShape,
    StageMemory,
    Storage,
    check_fits,
    peak_in_flight,
    stage_memory,
)
from megatron_async.planning.model_flags import add_model_flags, shape_of
from megatron_async.planning.tables import print_table
from megatron_async.planning.times import forward_flops
from megatron_async.schedules import RECOMMENDED as RECOMMENDED_SCHEDULE
from megatron_async.schedules.one_f_one_b import ONE_F_ONE_B
from megatron_async.schedules.schedule import Pipeline
from megatron_async.schedules.simulator import Costs, simulate

__all__ = ["Prediction", "main", "predict"]


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """What one schedule takes."""

    candidate: Candidate
    problem: str | None = None
    """Why it cannot run with these numbers; the rest is then 0."""
    time: float = 0.0
    """Per iteration in the steady state, in the unit of the costs."""
    ideal: float = 0.0
    idle: float = 0.0
    """Mean over the stages of the share of the iteration that is waited."""
    in_flight: tuple[float, ...] = ()
    """Per stage, microbatches kept at the peak."""
    versions: tuple[int, ...] = ()
    """Per stage, weight versions kept."""
    delay: float = 0.0
    """Of a gradient in updates, mean over stages and microbatches."""

    @property
    def schedule(self) -> str:
        """The candidate's name."""
        return self.candidate.name


def predict(
    candidate: Candidate,
    *,
    pipeline: Pipeline,
    microbatches: int,
    costs: Costs,
) -> Prediction:
    """Simulate a schedule on one of its pipelines, see :meth:`Candidate.pipeline`."""
    try:
        lists = candidate.lists(pipeline, microbatches=microbatches)
    except ValueError as error:
        return Prediction(candidate=candidate, problem=str(error))
    run = simulate(lists, costs)
    rule = candidate.schedule.rule(pipeline, microbatches)
    return Prediction(
        candidate=candidate,
        time=run.iteration_time,
        ideal=run.ideal_time,
        idle=sum(run.idle_shares) / pipeline.stages,
        in_flight=tuple(peak_in_flight(actions) for actions in lists),
        versions=tuple(rule.kept(stage) for stage in range(pipeline.stages)),
        delay=rule.mean_staleness(pipeline.stages),
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command. Returns the exit code; wrong arguments leave through argparse."""
    argv = sys.argv[1:] if argv is None else list(argv)
    if "--search" in argv:
        return search_command.main([each for each in argv if each != "--search"])
    parser = _parser()
    args = parser.parse_args(argv)
    try:
        check_counts(args, "stages", "microbatches", "micro_batch_size", "data_parallel")
        check_counts(args, "tensor_parallel", "expert_parallel", "chunks")
        if args.forward_ms is not None and min(args.forward_ms) <= 0:
            raise ValueError("--forward-ms must be positive")
        shape, layout = _model(args)
        if args.check and shape is None:
            raise ValueError("--check needs the model: --layers, --hidden-size and --heads")
        costs, unit = _costs(args, shape, layout)
        costs.per_stage(args.stages)
        predictions = [
            predict(
                each,
                pipeline=pipeline_of(each, args),
                microbatches=args.microbatches,
                costs=costs,
            )
            for each in candidates()
        ]
    except ValueError as error:
        parser.error(str(error))
    _print_times(predictions, args, costs, unit, sys.stdout)
    memory: dict[str, list[StageMemory]] = {}
    if shape is not None and layout is not None:
        memory = {
            prediction.schedule: _memory(prediction, shape, layout, args)
            for prediction in predictions
            if prediction.problem is None
        }
        _print_memory(memory, layout, args, sys.stdout)
    else:
        print("\nFor the memory, give --layers, --hidden-size and --heads.")
    if args.csv:
        _write_csv(args.csv, predictions, memory)
    if args.check and shape is not None and layout is not None:
        return check(shape, layout)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="megatron-async plan",
        description="Predict time per iteration and memory per stage of Megatron's synchronous "
        "schedules and of the asynchronous ones, by simulating their action lists. Nothing is "
        "trained. With --search it lists the fastest layouts on a number of GPUs; --search "
        "--help has its flags.",
    )
    parser.add_argument(
        *("--pipeline-model-parallel-size", "--stages"),
        dest="stages",
        type=int,
        required=True,
        metavar="P",
        help="pipeline stages",
    )
    parser.add_argument(
        "--microbatches",
        type=int,
        required=True,
        metavar="M",
        help="microbatches per batch: global batch / (micro batch * data parallel size)",
    )
    parser.add_argument(
        "--chunks", type=int, default=2, help="model chunks per stage of interleaved 1F1B"
    )
    times = parser.add_argument_group(
        "times", "One number, or one for each stage. Without any, times are in units of a forward."
    )
    for name, meaning in (
        ("forward", "forward of one microbatch on one stage"),
        ("backward", "its backward (default: twice the forward)"),
        ("optimizer", "optimizer step of one stage (default: 0)"),
    ):
        times.add_argument(f"--{name}-ms", type=float, nargs="+", metavar="MS", help=meaning)
    for name, meaning in (
        ("reduction", "a batch's gradients over the data-parallel replicas (default: 0)"),
        ("gather", "a version's parameters over the replicas (default: 0)"),
    ):
        times.add_argument(f"--{name}-ms", type=float, default=0.0, metavar="MS", help=meaning)
    times.add_argument(
        "--latency-ms", type=float, default=0.0, metavar="MS", help="one message between stages"
    )
    times.add_argument(
        "--tflops",
        type=float,
        help="compute the times from the model's shape and this rate per device (10^12 floating-"
        "point operations a second that training really reaches, not the peak of the data sheet)",
    )
    model = add_model_flags(parser)
    model.add_argument(
        "--layers-per-stage", type=int, nargs="+", metavar="N", help="an uneven split"
    )
    run = parser.add_argument_group("training")
    run.add_argument("--micro-batch-size", type=int, default=1, help="sequences (default 1)")
    run.add_argument(
        *("--tensor-model-parallel-size", "--tensor-parallel"),
        dest="tensor_parallel",
        type=int,
        default=1,
        help="ranks that share a layer (default 1)",
    )
    run.add_argument("--data-parallel", type=int, default=1, help="replicas (default 1)")
    run.add_argument(
        *("--expert-model-parallel-size", "--expert-parallel"),
        dest="expert_parallel",
        type=int,
        default=1,
        help="ranks that share the experts (default 1)",
    )
    run.add_argument("--sequence-parallel", action="store_true", help="with tensor parallelism")
    run.add_argument(
        *("--use-distributed-optimizer", "--distributed-optimizer"),
        dest="distributed_optimizer",
        action="store_true",
        help="optimizer state sharded over the replicas",
    )
    run.add_argument("--precision", choices=("bf16", "fp32"), default="bf16", help="(default bf16)")
    run.add_argument(
        "--optimizer",
        choices=[each.name for each in OPTIMIZERS if each.state_bytes is not None],
        default="muon",
        help="what state it keeps (default muon)",
    )
    run.add_argument("--recompute", action="store_true", help="full activation recompute")
    run.add_argument("--no-dropout", action="store_true", help="no masks are kept")
    run.add_argument(
        "--unfused-attention", action="store_true", help="attention scores are kept in memory"
    )
    run.add_argument(
        "--delay-correction",
        nargs="?",
        choices=[each.name for each in CORRECTIONS],
        const=RECOMMENDED,
        help="its buffers are counted",
    )
    run.add_argument(
        "--delay-correction-adaptive-strength", action="store_true", help="one more buffer"
    )
    run.add_argument("--second-grad-buffer", action="store_true", help="one more set of gradients")
    run.add_argument("--grad-reduce-in-bf16", action="store_true", help="gradients in bf16")
    add_schedule_flags(run)
    run.add_argument(
        "--overlap-param-gather", action="store_true", help="gather new versions under computation"
    )
    parser.add_argument(
        "--check",
        action="store_true",
        help="build each stage with Megatron, on the meta device, and compare the parameters",
    )
    parser.add_argument("--csv", type=Path, metavar="FILE", help="also write the table as CSV")
    return parser


def _model(args: argparse.Namespace) -> tuple[ModelShape | None, Layout | None]:
    if args.layers_per_stage is not None:
        total = sum(args.layers_per_stage)
        if args.layers is not None and args.layers != total:
            raise ValueError(f"--layers-per-stage adds up to {total}, --layers says {args.layers}")
        args.layers = total
    given = [args.layers, args.hidden_size, args.heads]
    if all(value is None for value in given):
        return None, None
    if any(value is None for value in given):
        raise ValueError("a model needs --layers, --hidden-size and --heads together")
    per_stage = args.layers_per_stage
    if per_stage is None:
        if args.layers % args.stages:
            raise ValueError(
                f"{args.layers} layers do not divide into {args.stages} stages evenly; "
                "give --layers-per-stage"
            )
        per_stage = [args.layers // args.stages] * args.stages
    shape = shape_of(args)
    layout = Layout(
        stages=args.stages,
        layers_per_stage=per_stage,
        tensor_parallel=args.tensor_parallel,
        data_parallel=args.data_parallel,
        expert_parallel=args.expert_parallel,
        sequence_parallel=args.sequence_parallel,
    )
    check_fits(shape, layout)
    return shape, layout


def _costs(
    args: argparse.Namespace, shape: ModelShape | None, layout: Layout | None
) -> tuple[Costs, str]:
    def spread(values: Sequence[float] | None, default: Sequence[float]) -> Sequence[float]:
        if values is None:
            return default
        return list(values) * args.stages if len(values) == 1 else values

    if args.tflops is not None:
        if shape is None or layout is None:
            raise ValueError("--tflops needs the model: --layers, --hidden-size and --heads")
        if not 0 < args.tflops < math.inf:
            raise ValueError(f"--tflops must be positive, got {args.tflops}")
        forward: Sequence[float] = [
            forward_flops(shape, layout, stage, args.micro_batch_size) / args.tflops / 1e9
            for stage in range(args.stages)
        ]
    else:
        forward = [1.0] * args.stages
    timed = args.forward_ms is not None or args.tflops is not None
    others = (args.latency_ms, args.reduction_ms, args.gather_ms)
    if not timed and (args.backward_ms or args.optimizer_ms or any(others)):
        raise ValueError("times need --forward-ms (or --tflops) too")
    forward = spread(args.forward_ms, forward)
    again = 1.0 if args.recompute and args.forward_ms is None else 0.0
    costs = Costs(
        forward=forward,
        backward=spread(args.backward_ms, [(2.0 + again) * time for time in forward]),
        optimizer=spread(args.optimizer_ms, [0.0] * args.stages),
        latency=args.latency_ms,
        reduction=args.reduction_ms,
        gather=args.gather_ms,
    )
    return costs, " ms" if timed else ""


def _print_times(
    predictions: Sequence[Prediction],
    args: argparse.Namespace,
    costs: Costs,
    unit: str,
    out: TextIO,
) -> None:
    print(f"{args.stages} stages, {args.microbatches} microbatches per batch", file=out)
    forward, backward, optimizer = (
        max(column) for column in zip(*costs.per_stage(args.stages), strict=True)
    )
    print(
        f"slowest stage: forward {forward:.4g}{unit}, backward {backward:.4g}{unit} per "
        f"microbatch, optimizer step {optimizer:.4g}{unit}"
        + ("" if unit else " (in units of a forward; give --forward-ms or --tflops)"),
        file=out,
    )
    rows = [["schedule", f"iteration{unit and ' (ms)'}", "of ideal", "idle", "delay", "in flight"]]
    problems = []
    for prediction in predictions:
        title = prediction.candidate.title
        if prediction.problem:
            rows.append([title, *"-----"])
            problems.append(f"{title}: {prediction.problem}")
            continue
        rows.append(
            [
                title,
                f"{prediction.time:.4g}" if prediction.time < 1000 else f"{prediction.time:.0f}",
                f"{prediction.time / prediction.ideal:.3f}",
                f"{100 * prediction.idle:.1f} %",
                f"{prediction.delay:.3g}",
                f"{max(prediction.in_flight):.4g}",
            ]
        )
    print(file=out)
    print_table(rows, out)
    print(
        "\nof ideal: of m (t_f + t_b) + t_opt of the slowest stage, an iteration without a bubble. "
        "idle: the\nshare of it that a stage waits, mean over the stages; where they are unequal "
        "they wait for the slowest.",
        file=out,
    )
    times = {prediction.schedule: prediction for prediction in predictions}
    fast, slow = times[RECOMMENDED_SCHEDULE], times[ONE_F_ONE_B.name]
    if fast.time and slow.time:
        print(
            f"\n{fast.candidate.schedule.title} over 1F1B: {slow.time / fast.time:.2f} times as "
            "fast",
            file=out,
        )
    for problem in problems:
        print(f"\n{problem}", file=out)


def _correction_buffers(args: argparse.Namespace) -> int:
    if args.delay_correction is None:
        return 0
    settings = {ADAPTIVE_STRENGTH.dest: args.delay_correction_adaptive_strength}
    return CORRECTIONS[args.delay_correction].buffers_with(settings)


def _memory(
    prediction: Prediction, shape: ModelShape, layout: Layout, args: argparse.Namespace
) -> list[StageMemory]:
    storage = Storage(
        bf16=args.precision == "bf16",
        optimizer=args.optimizer,
        distributed_optimizer=args.distributed_optimizer,
        grad_reduce_in_bf16=args.grad_reduce_in_bf16,
        recompute=args.recompute,
        dropout=not args.no_dropout,
        fused_attention=not args.unfused_attention,
    )
    if prediction.candidate.schedule.asynchronous:
        storage = replace(
            storage,
            asynchronous=True,
            deferred_update=prediction.candidate.deferred,
            correction_buffers=_correction_buffers(args),
            second_grad_buffer=args.second_grad_buffer,
        )
    return [
        stage_memory(
            shape,
            layout,
            replace(storage, other_versions=versions - 1),
            stage=stage,
            micro_batch_size=args.micro_batch_size,
            in_flight=in_flight,
        )
        for stage, (in_flight, versions) in enumerate(
            zip(prediction.in_flight, prediction.versions, strict=True)
        )
    ]


def _print_memory(
    memory: dict[str, list[StageMemory]],
    layout: Layout,
    args: argparse.Namespace,
    out: TextIO,
) -> None:
    # The stages that differ: the ends, and of each schedule the one that holds most.
    fullest = {
        name: max(range(layout.stages), key=lambda stage: per_stage[stage].total)
        for name, per_stage in memory.items()
    }
    shown = sorted({0, layout.stages - 1, *fullest.values()})
    print(
        f"\nMemory of one rank in GiB ({args.precision}, {args.optimizer}"
        f"{', distributed optimizer' if args.distributed_optimizer else ''}); "
        f"activations are estimated, the rest is counted",
        file=out,
    )
    titles = {each.name: each.title for each in candidates()}
    detail = RECOMMENDED_SCHEDULE if RECOMMENDED_SCHEDULE in memory else ONE_F_ONE_B.name
    rows = [[titles[detail], *(f"stage {stage}" for stage in shown)]]
    for field in fields(StageMemory):
        values = [getattr(memory[detail][stage], field.name) for stage in shown]
        if any(values):
            rows.append([field.name.replace("_", " "), *(_gib(value) for value in values)])
    rows.append(["total", *(_gib(memory[detail][stage].total) for stage in shown)])
    if detail == RECOMMENDED_SCHEDULE:
        added = [_gib(memory[detail][stage].added) for stage in shown]
        rows.append(["of which asynchronous training adds", *added])
    for name, per_stage in memory.items():
        if name != detail:
            totals = (_gib(per_stage[stage].total) for stage in shown)
            rows.append([f"total, {titles[name]}", *totals])
    print_table(rows, out)


def _gib(value: int) -> str:
    return f"{value / 2**30:.3f}"


def _write_csv(
    path: Path, predictions: Sequence[Prediction], memory: dict[str, list[StageMemory]]
) -> None:
    parts = [field.name for field in fields(StageMemory)]
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(
            ["schedule", "iteration", "ideal", "ratio_to_ideal", "idle", "stage", "in_flight"]
            + [f"{part}_bytes" for part in [*parts, "total"]]
        )
        for prediction in predictions:
            for stage, in_flight in enumerate(prediction.in_flight):
                held = memory.get(prediction.schedule)
                writer.writerow(
                    [
                        prediction.schedule,
                        prediction.time,
                        prediction.ideal,
                        prediction.time / prediction.ideal,
                        prediction.idle,
                        stage,
                        in_flight,
                    ]
                    + [getattr(held[stage], part) if held else "" for part in [*parts, "total"]]
                )
