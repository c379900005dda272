"""Looks at the nodes of a job before it trains: what differs, what is missing, what is slow.

    torchrun [...] --nproc-per-node 8 -m megatron_async.tools.node_check --output runs/NAME

Every rank of the job runs it, started as the training will be. It ends with 1 on all ranks if
something is wrong, and rank 0 names the nodes. Looked at:

- each rank has a GPU of its own, of the same model, with most of its memory free;
- Python, torch, CUDA, NCCL, the driver, Megatron, this package are the same everywhere;
- an all-reduce over all ranks gives the right sum, over NCCL, or over gloo with ``--cpu``;
- the output folder can be written, is the same on all nodes, and has space, and so has the
  temporary one;
- how long the imports took, which on a shared file system can be minutes (a note, no failure).
"""

import argparse
import datetime
import importlib
import os
import platform
import secrets
import shutil
import socket
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil

__all__ = ["Report", "main", "notes_on", "problems_of"]

_GIB = 2**30
_SLOW_IMPORT_S = 60.0
_FREE_SHARE = 0.9
"""Of a GPU's memory: what a new process finds where nobody else is on it."""
_ELEMENTS = 16 * 2**20
"""Of the all-reduce, in fp32: 64 MiB."""
_TIMEOUT = datetime.timedelta(seconds=300)


@dataclass(frozen=True, kw_only=True)
class Report:
    """What one rank found.

    Attributes:
        rank: in the whole job.
        node: the host's name, with Slurm's name of the node.
        device: the GPU's identity (its UUID); None without one.
        model: the GPU's name; None without one.
        free_share: of the GPU's memory.
        versions: by name.
        import_s: seconds from the start of the process until torch and Megatron were imported.
        output_bytes: free in the output folder.
        temporary_bytes: free in the temporary folder.
        shared: whether the file that rank 0 wrote into the output folder is there.
        trouble: what failed on this rank alone; empty if nothing did.
    """

    rank: int
    node: str
    device: str | None
    model: str | None
    free_share: float
    versions: Mapping[str, str]
    import_s: float
    output_bytes: int
    temporary_bytes: int
    shared: bool
    trouble: str = ""


def problems_of(
    reports: Sequence[Report], *, cpu: bool, output_gib: float, temporary_gib: float
) -> list[str]:
    """What is wrong, one sentence each, with the nodes that it concerns.

    Args:
        reports: of all ranks.
        cpu: no GPU is wanted.
        output_gib, temporary_gib: how much has to be free there, in GiB.
    """
    problems = [
        f"{each.node}, rank {each.rank}: {each.trouble}" for each in reports if each.trouble
    ]
    if not cpu:
        problems += _gpu_problems(reports)
    for name in sorted({name for each in reports for name in each.versions}):
        found = [(each.versions.get(name, "none"), each.node) for each in reports]
        problems += _unlike(f"{name} is", found)
    for each in _one_a_node(reports):
        if not each.shared:
            problems.append(
                f"{each.node} does not see what rank 0 wrote into the output folder: it has to be "
                "on a file system that all nodes share."
            )
        for place, free, wanted in (
            ("output", each.output_bytes, output_gib),
            ("temporary", each.temporary_bytes, temporary_gib),
        ):
            if free < wanted * _GIB:
                problems.append(
                    f"{each.node} has {free / _GIB:.1f} GiB free in the {place} folder, of "
                    f"{wanted:g} that are wanted."
                )
    return problems


def notes_on(reports: Sequence[Report]) -> list[str]:
    """What is no failure, but costs time."""
    slowest = max(reports, key=lambda each: each.import_s)
    if slowest.import_s < _SLOW_IMPORT_S:
        return []
    text = (
        f"importing took {slowest.import_s:.0f} s on {slowest.node}: keep the environment on a "
        "local disk or in a container image, not in many small files on a shared file system."
    )
    return [text]


def _gpu_problems(reports: Sequence[Report]) -> list[str]:
    problems = [f"{each.node}, rank {each.rank}: no GPU." for each in reports if not each.device]
    seen = Counter(each.device for each in reports if each.device)
    problems += [
        f"{each.node}: several ranks share the GPU {each.device}."
        for each in {each.device: each for each in reports}.values()
        if each.device and seen[each.device] > 1
    ]
    problems += [
        f"{each.node}, rank {each.rank}: {each.free_share:.0%} of the GPU's memory are free; "
        "another process is on it."
        for each in reports
        if each.device and each.free_share < _FREE_SHARE
    ]
    models = [(each.model, each.node) for each in reports if each.model]
    return problems + _unlike("the GPU is", models)


def _unlike(what: str, found: Sequence[tuple[str, str]]) -> list[str]:
    """A sentence if not all have the same; those of the fewer nodes are named."""
    if len({value for value, _ in found}) < 2:
        return []
    usual = Counter(value for value, _ in found).most_common(1)[0][0]
    others = sorted({(value, node) for value, node in found if value != usual})
    rest = ", ".join(f"{value} on {node}" for value, node in others)
    return [f"{what} {usual} on most ranks, and {rest}."]


def _one_a_node(reports: Sequence[Report]) -> list[Report]:
    return list({each.node: each for each in reversed(reports)}.values())[::-1]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the check on this rank. Returns 1 if anything is wrong on any rank."""
    parser = argparse.ArgumentParser(
        prog="torchrun [...] -m megatron_async.tools.node_check",
        description="Look at the nodes of a job before it trains.",
    )
    parser.add_argument("--output", type=Path, required=True, help="where checkpoints go")
    parser.add_argument("--cpu", action="store_true", help="CPU ranks over gloo")
    parser.add_argument("--output-gib", type=float, default=10.0, help="free there (default 10)")
    parser.add_argument(
        "--temporary-gib", type=float, default=1.0, help="free in the temporary folder (default 1)"
    )
    args = parser.parse_args(argv)
    if "RANK" not in os.environ:
        parser.error("start it with torchrun, as the training")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Megatron's, about libraries that it can do without
        importlib.import_module("megatron.training.training")
    import_s = time.time() - psutil.Process().create_time()

    import torch.distributed as dist

    # Reports go over gloo on GPUs as well, so that they arrive where NCCL does not work.
    dist.init_process_group("gloo", timeout=_TIMEOUT)
    try:
        mark: list[Any] = [_write_mark(args.output) if dist.get_rank() == 0 else None]
        dist.broadcast_object_list(mark)
        reports = _gather(_report(args.output, mark[0], cpu=args.cpu, import_s=import_s))
        problems = problems_of(
            reports, cpu=args.cpu, output_gib=args.output_gib, temporary_gib=args.temporary_gib
        )
        # Without a GPU for every rank an NCCL communicator does not come about.
        reduced = "not tried" if problems else _all_reduce(cpu=args.cpu)
        wrong = [each for each in _gather(reduced) if each.startswith("!")]
        problems += sorted({each.removeprefix("!") for each in wrong})
        if dist.get_rank() == 0:
            _print(reports, problems, reduced)
            _remove(args.output, mark[0])
    finally:
        dist.destroy_process_group()
    return int(bool(problems))


def _gather[T](mine: T) -> list[T]:
    import torch.distributed as dist

    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    return everyone


def _write_mark(output: Path) -> str | None:
    name = f".node-check-{secrets.token_hex(8)}"
    try:
        output.mkdir(parents=True, exist_ok=True)
        (output / name).write_text(name)
    except OSError:
        return None  # said by every rank
    return name


def _remove(output: Path, mark: str | None) -> None:
    if mark is not None:
        (output / mark).unlink(missing_ok=True)


def _report(output: Path, mark: str | None, *, cpu: bool, import_s: float) -> Report:
    import torch

    trouble = "" if mark else f"{output.absolute()} cannot be written by rank 0."
    device = model = None
    free_share = 0.0
    local = int(os.environ["LOCAL_RANK"])
    if not cpu and torch.cuda.is_available() and local < torch.cuda.device_count():
        try:
            properties = torch.cuda.get_device_properties(local)
            free, total = torch.cuda.mem_get_info(local)
            device, model, free_share = str(properties.uuid), properties.name, free / total
        except RuntimeError as error:
            trouble = trouble or f"the GPU fails: {error}"
    return Report(
        rank=int(os.environ["RANK"]),
        node=os.environ.get("SLURMD_NODENAME", socket.gethostname()),
        device=device,
        model=model,
        free_share=free_share,
        versions=_versions(cpu=cpu),
        import_s=import_s,
        output_bytes=_free(output),
        temporary_bytes=_free(Path(tempfile.gettempdir())),
        shared=mark is not None and (output / mark).exists(),
        trouble=trouble,
    )


def _free(folder: Path) -> int:
    try:
        return shutil.disk_usage(folder).free
    except OSError:
        return 0


def _versions(*, cpu: bool) -> dict[str, str]:
    import torch

    found = {"Python": platform.python_version(), "torch": torch.__version__}
    for name in ("megatron-core", "megatron-async", "emerging-optimizers", "transformer-engine"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "none"
    if not cpu and torch.cuda.is_available():
        found["CUDA"] = str(torch.version.cuda)
        found["NCCL"] = ".".join(map(str, torch.cuda.nccl.version()))
        found["driver"] = _driver()
    return found


def _driver() -> str:
    """Of the kernel module; CUDA's own API tells the CUDA version alone."""
    try:
        text = Path("/proc/driver/nvidia/version").read_text()
    except OSError:
        return "unknown"
    words = text.partition("\n")[0].split()
    return next((word for word in words if word[0].isdigit() and "." in word), "unknown")


def _all_reduce(*, cpu: bool) -> str:
    """What rank 0 prints; it begins with ``!`` if something is wrong."""
    import torch
    import torch.distributed as dist

    local = int(os.environ["LOCAL_RANK"])
    backend = "gloo" if cpu else "nccl"
    device = torch.device("cpu") if cpu else torch.device("cuda", local)
    ranks = dist.get_world_size()
    try:
        if not cpu:
            torch.cuda.set_device(device)
        group: Any = dist.new_group(backend=backend, timeout=_TIMEOUT)
        values = torch.full((_ELEMENTS,), float(dist.get_rank() + 1), device=device)
        # The first one makes the communicator.
        dist.all_reduce(values[:1].clone(), group=group)
        _wait(device)
        start = time.monotonic()
        dist.all_reduce(values, group=group)
        _wait(device)
        seconds = time.monotonic() - start
    except RuntimeError as error:  # among them torch.distributed.DistBackendError
        return f"!the all-reduce over {backend} failed: {str(error).strip().splitlines()[0]}"
    expected = ranks * (ranks + 1) / 2
    if not bool((values == expected).all()):
        return f"!the all-reduce over {backend} gave {values[0].item()}, not {expected}."
    # NCCL tests' bus bandwidth: what each rank's link carries.
    bandwidth = 4 * _ELEMENTS * 2 * (ranks - 1) / ranks / seconds / 1e9
    return f"64 MiB over {backend} in {1e3 * seconds:.1f} ms ({bandwidth:.1f} GB/s)"


def _wait(device: Any) -> None:
    if device.type == "cuda":
        import torch

        torch.cuda.synchronize(device)


def _print(reports: Sequence[Report], problems: Sequence[str], reduced: str) -> None:
    nodes = Counter(each.node for each in reports)
    first = reports[0]
    print(f"{len(reports)} ranks on {len(nodes)} nodes, {first.model or 'no GPU'} each")
    print("  " + ", ".join(f"{name} {version}" for name, version in first.versions.items()))
    print(
        f"  imports took up to {max(each.import_s for each in reports):.0f} s; free: "
        f"{min(each.output_bytes for each in reports) / _GIB:.0f} GiB in the output folder, "
        f"{min(each.temporary_bytes for each in reports) / _GIB:.0f} GiB in the temporary one"
    )
    print(f"  all-reduce: {reduced.removeprefix('!')}")
    for note in notes_on(reports):
        print(f"note: {note}")
    for problem in problems:
        print(f"node check: {problem}", file=sys.stderr)
    print("The nodes are not fit to train." if problems else "The nodes are fit.", flush=True)


if __name__ == "__main__":
    sys.exit(main())
