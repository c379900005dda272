"""``megatron-async plan --search``: the best layouts of a model on a number of GPUs."""

import argparse
import csv
import math
from collections.abc import Sequence
from pathlib import Path

from megatron_async.corrections import CORRECTIONS, RECOMMENDED
from megatron_async.optimizers import OPTIMIZERS
from megatron_async.planning.candidates import candidate, candidates
from megatron_async.planning.check import check
from megatron_async.planning.devices import DEVICES
from megatron_async.planning.memory import Storage
from megatron_async.planning.model_flags import add_model_flags, shape_of
from megatron_async.planning.partition import layout as layout_flag
from megatron_async.planning.search import Choice, Cluster, Sizes, layouts, search
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
        _check_numbers(args)
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
                sizes=Sizes(tensor=args.tensor, pipeline=args.pipeline, expert=args.expert),
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
            "--micro-batch-sizes or a lower --reserve-gib give room. Sizes must divide the GPUs, "
            "heads and experts, and a batch what its replicas take at a time."
        )
        return 1
    best: list[Choice] = []
    for name in dict.fromkeys(args.schedules) if args.each else (None,):
        of_it = [choice for choice in found if name in (None, choice.candidate.name)]
        best += search(of_it, top=args.top)
    best.sort(key=lambda choice: choice.time)
    rows = [_row(choice) for choice in best]
    if shape.experts is not None:
        for row, choice in zip(rows, best, strict=True):
            row.insert(_EXPERT_COLUMN, str(choice.layout.expert_parallel))
    titles = list(_TITLES)
    if shape.experts is not None:
        titles.insert(_EXPERT_COLUMN, "EP")
    print()
    print_table([titles, *rows])
    print(f"\nThe first: {' '.join(_flags(best[0]))}")
    if args.csv:
        with args.csv.open("w", newline="", encoding="utf-8") as file:
            csv.writer(file).writerows([titles, *rows])
    return check(shape, best[0].layout) if args.check else 0


def _check_numbers(args: argparse.Namespace) -> None:
    """Raise a ValueError that names the flag whose number makes no sense."""
    whole = ("gpus", "gpus_per_node", "global_batch_size", "top", "chunks", "micro_batch_sizes")
    positive = ("tflops", "memory_gib", "network_gb_s")
    sizes = ("tensor", "pipeline", "expert")
    for name in (*whole, *positive, *sizes, "reserve_gib", "communicator_gib"):
        given = getattr(args, name)
        flag = f"--{name}-model-parallel-size" if name in sizes else f"--{name.replace('_', '-')}"
        for value in given if isinstance(given, list) else [given]:
            if value is None:
                continue
            if not math.isfinite(value) or value < 0 or (value == 0 and "_gib" not in name):
                raise ValueError(f"{flag} must be positive, got {value}")

    for name in ("gpus", "global_batch_size"):
        if getattr(args, name) > _MOST:
            raise ValueError(f"--{name.replace('_', '-')} can be searched up to {_MOST}")


def _flags(choice: Choice) -> list[str]:
    """Megatron's."""
    layout = choice.layout
    flags = [f"--tensor-model-parallel-size {layout.tensor_parallel}"]
    flags.append(f"--pipeline-model-parallel-size {layout.stages}")
    if layout.expert_parallel > 1:
        flags.append(f"--expert-model-parallel-size {layout.expert_parallel}")
    flags.append(f"--micro-batch-size {choice.micro_batch_size}")
    if choice.chunks > 1:
        layers = layout.layers_per_stage[0] // choice.chunks
        flags.append(f"--num-layers-per-virtual-pipeline-stage {layers}")
    elif layout.stages > 1:
        flags.append(f"--pipeline-model-parallel-layout '{layout_flag(layout.layers_per_stage)}'")
    return flags


_TITLES = ["schedule", "TP", "PP", "DP", "mbs", "m", "s/iteration", "delay", "GiB", "layout"]
_EXPERT_COLUMN = 3
_MOST = 2**17
"""Above it a search takes minutes, or hours."""


def _row(choice: Choice) -> list[str]:
    layout = choice.layout
    return [
        choice.candidate.name,
        str(layout.tensor_parallel),
        str(layout.stages),
        str(layout.data_parallel),
        str(choice.micro_batch_size),
        str(choice.microbatches),
        f"{choice.time / 1e3:{'.3f' if choice.time >= 100 else '.3g'}}",
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
    sizes = parser.add_argument_group("sizes", "Those to look at (default: all that are possible).")
    for name, metavar, meaning in (
        ("tensor", "TP", "ranks of a node that share a layer"),
        ("pipeline", "PP", "stages"),
        ("expert", "EP", "replicas that share the experts of a mixture"),
    ):
        sizes.add_argument(
            f"--{name}-model-parallel-size",
            dest=name,
            type=int,
            nargs="+",
            metavar=metavar,
            help=meaning,
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
    sizes.add_argument(
        *("--micro-batch-sizes", "--micro-batch-size"),
        dest="micro_batch_sizes",
        type=int,
        nargs="+",
        default=[1, 2, 4, 8],
        metavar="N",
        help="sequences (default 1 2 4 8)",
    )
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
    parser.add_argument(
        "--check",
        action="store_true",
        help="build the fastest layout's stages with Megatron, on the meta device, and compare the "
        "parameters",
    )
    parser.add_argument("--csv", type=Path, metavar="FILE", help="also write the table as CSV")
    add_model_flags(parser)
    return parser
