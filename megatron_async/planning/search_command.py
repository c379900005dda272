"""``megatron-async plan --search``: the best layouts of a model on a number of GPUs."""

import argparse
import csv
from collections.abc import Sequence
from pathlib import Path

from megatron_async.corrections import CORRECTIONS, RECOMMENDED
from megatron_async.optimizers import OPTIMIZERS
from megatron_async.planning.candidates import candidate, candidates
from megatron_async.planning.devices import DEVICES
from megatron_async.planning.memory import Storage
from megatron_async.planning.model_flags import add_model_flags, shape_of
from megatron_async.planning.partition import layout as layout_flag
from megatron_async.planning.search import Choice, Cluster, layouts, search
from megatron_async.planning.tables import print_table
from megatron_async.planning.times import Rates

__all__ = ["main"]

_SCHEDULES = ("1f1b", "interleaved", "zb-h1", "pipedream-2bw", "fresh-2bw", "paci")


def main(argv: Sequence[str]) -> int:
    """Run the command. Returns the exit code: 1 if nothing fits."""
    parser = _parser()
    args = parser.parse_args(argv)
    device = DEVICES[args.device]
    try:
        if any(value is None for value in (args.layers, args.hidden_size, args.heads)):
            raise ValueError("a model needs --num-layers, --hidden-size and --num-attention-heads")
        if min(args.gpus, args.global_batch_size, args.top, args.gpus_per_node) < 1:
            raise ValueError("numbers must be positive")
        shape = shape_of(args)
        rates = Rates.of(device, network_gb_s=args.network_gb_s)
        if args.tflops is not None:
            rates = Rates(
                tflops=args.tflops,
                memory_gb_s=rates.memory_gb_s,
                link_gb_s=rates.link_gb_s,
                network_gb_s=rates.network_gb_s,
            )
        cluster = Cluster(
            gpus=args.gpus,
            node=min(args.gpus_per_node, args.gpus),
            memory_gib=device.memory_gib if args.memory_gib is None else args.memory_gib,
            reserve_gib=args.reserve_gib,
            communicator_gib=args.communicator_gib,
            rates=rates,
        )
        correction = CORRECTIONS.get(args.delay_correction)
        storage = Storage(
            optimizer=args.optimizer,
            distributed_optimizer=not args.no_distributed_optimizer,
            grad_reduce_in_bf16=args.grad_reduce_in_bf16,
            correction_buffers=0 if correction is None else correction.buffers_with({}),
            recompute=args.recompute,
            dropout=not args.no_dropout,
        )
        found = list(
            layouts(
                shape,
                storage,
                cluster,
                candidates=[candidate(name) for name in dict.fromkeys(args.schedules)],
                global_batch=args.global_batch_size,
                micro_batch_sizes=sorted(set(args.micro_batch_sizes)),
                chunks=args.chunks,
            )
        )
    except ValueError as error:
        parser.error(str(error))
    print(
        f"{args.gpus} x {device.name} at {rates.tflops:.0f} TFLOPS, {cluster.memory_gib:g} GiB, "
        f"{args.global_batch_size} sequences of {shape.seq_length} tokens: {len(found)} layouts fit"
    )
    if not found:
        print(
            "Nothing fits. More GPUs, --recompute, --grad-reduce-in-bf16, smaller "
            "--micro-batch-sizes or a lower --reserve-gib give room."
        )
        return 1
    best: list[Choice] = []
    for name in dict.fromkeys(args.schedules) if args.each else (None,):
        of_it = [choice for choice in found if name in (None, choice.candidate.name)]
        best += search(of_it, top=args.top)
    best.sort(key=lambda choice: choice.time)
    print()
    print_table([_TITLES, *(_row(choice) for choice in best)])
    first = best[0]
    print(f"\nThe first: --tensor-model-parallel-size {first.layout.tensor_parallel}", end="")
    print(f" --pipeline-model-parallel-size {first.layout.stages}", end="")
    print(f" --micro-batch-size {first.micro_batch_size}", end="")
    if first.chunks > 1:
        layers = first.layout.layers_per_stage[0] // first.chunks
        print(f" --num-layers-per-virtual-pipeline-stage {layers}", end="")
    elif first.layout.stages > 1:
        layers_flag = layout_flag(first.layout.layers_per_stage)
        print(f" --pipeline-model-parallel-layout '{layers_flag}'", end="")
    print()
    if args.csv:
        with args.csv.open("w", newline="", encoding="utf-8") as file:
            csv.writer(file).writerows([_TITLES, *(_row(choice) for choice in best)])
    return 0


_TITLES = ["schedule", "TP", "PP", "DP", "mbs", "m", "s/iteration", "delay", "GiB", "layout"]


def _row(choice: Choice) -> list[str]:
    layout = choice.layout
    return [
        choice.candidate.name,
        str(layout.tensor_parallel),
        str(layout.stages),
        str(layout.data_parallel),
        str(choice.micro_batch_size),
        str(choice.microbatches),
        f"{choice.time / 1e3:.3f}",
        f"{choice.delay:.3g}",
        f"{choice.memory / 2**30:.1f}",
        layout_flag(layout.layers_per_stage) if choice.chunks == 1 else f"{choice.chunks} chunks",
    ]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="megatron-async plan --search",
        description="List the fastest layouts of a model on a number of GPUs, from a model of the "
        "device and a simulation of the schedules. Nothing is trained, and nothing was measured on "
        "GPUs.",
    )
    parser.add_argument("--gpus", type=int, required=True, help="ranks in all")
    parser.add_argument("--gpus-per-node", type=int, default=8, help="(default 8)")
    parser.add_argument("--global-batch-size", type=int, required=True, help="sequences")
    parser.add_argument("--device", choices=list(DEVICES), required=True)
    parser.add_argument("--tflops", type=float, help="that training reaches, if you know it")
    parser.add_argument("--memory-gib", type=float, help="of a rank (default: the device's)")
    parser.add_argument(
        "--reserve-gib",
        type=float,
        default=4.0,
        help="kept for the context, temporary tensors and gaps (default 4, an estimate)",
    )
    parser.add_argument(
        "--communicator-gib",
        type=float,
        default=0.3,
        help="of each NCCL communicator (default 0.3, an estimate)",
    )
    parser.add_argument(
        "--network-gb-s",
        type=float,
        default=50.0,
        help="10^9 bytes a second of each GPU to other nodes (default 50)",
    )
    names = [each.name for each in candidates()]
    parser.add_argument(
        *("--schedules", "--schedule"),
        dest="schedules",
        nargs="+",
        choices=names,
        default=list(_SCHEDULES),
        metavar="NAME",
        help=f"of {', '.join(names)} (default: {', '.join(_SCHEDULES)})",
    )
    parser.add_argument("--micro-batch-sizes", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--chunks", type=int, default=2, help="of interleaved 1F1B (default 2)")
    parser.add_argument(
        "--optimizer",
        choices=[each.name for each in OPTIMIZERS if each.state_bytes is not None],
        default="muon",
        help="(default muon)",
    )
    parser.add_argument(
        "--no-distributed-optimizer", action="store_true", help="state on each rank"
    )
    parser.add_argument("--grad-reduce-in-bf16", action="store_true", help="gradients in bf16")
    parser.add_argument("--no-dropout", action="store_true", help="no masks are kept")
    parser.add_argument("--recompute", action="store_true", help="full activation recompute")
    parser.add_argument(
        "--delay-correction",
        choices=["none", *(each.name for each in CORRECTIONS)],
        default=RECOMMENDED,
        help=f"whose buffers are counted (default {RECOMMENDED})",
    )
    parser.add_argument("--top", type=int, default=10, help="how many to list (default 10)")
    parser.add_argument("--each", action="store_true", help="so many of each schedule")
    parser.add_argument("--csv", type=Path, metavar="FILE", help="also write the table as CSV")
    add_model_flags(parser)
    return parser
