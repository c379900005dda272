"""``megatron-async study``: run a grid of trainings and report on it."""

import argparse
import os
import shlex
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from megatron_async.study import against, config, report, runner
from megatron_async.study.analysis import analyse
from megatron_async.study.cells import Cell, count, plan
from megatron_async.study.config import ConfigError, Study
from megatron_async.study.datasets import Prepared, prepare
from megatron_async.study.launch import CommandLauncher, ForkLauncher, Launcher, LaunchError
from megatron_async.study.live import duration
from megatron_async.tools.data import DataError
from megatron_async.tools.job import torchrun

__all__ = ["main"]


def main(argv: Sequence[str]) -> int:
    """Run the command and return its exit status: 1 if a cell failed or nothing can be done."""
    try:
        if argv[:1] == ["report"]:
            return _report(argv[1:])
        if argv[:1] == ["against"]:
            return _against(argv[1:])
        return _study(argv)
    except (ConfigError, DataError, runner.RunError, LaunchError) as error:
        print(f"megatron-async study: {error}", file=sys.stderr)
        return 1
    except OSError as error:
        place = f"{error.filename}: " if error.filename else ""
        print(f"megatron-async study: {place}{error.strerror or error}", file=sys.stderr)
        return 1


def _study(argv: Sequence[str]) -> int:
    parser = _make_parser()
    args = parser.parse_args(argv)
    if args.list:
        _list()
        return 0
    if args.config is None:
        parser.error("give a configuration, or --list for those of this package")
    study = config.load(args.config, overrides=args.set)
    if args.dry_run:
        _dry_run(study)
        return 0
    if args.output is None:
        parser.error("give --output DIR")
    directory: Path = args.output
    if directory.exists() and not directory.is_dir():
        raise runner.RunError(f"--output {directory} is a file; name a folder.")
    directory.mkdir(parents=True, exist_ok=True)
    started = time.monotonic()
    dataset = prepare(study.dataset, directory)
    group = {"WANDB_RUN_GROUP": study.name} if args.wandb_project else {}
    environments = [{**group, **one} for one in _environments(study, args.jobs)]
    outcome = runner.run(
        study,
        directory,
        dataset=dataset,
        launcher=_launcher(study, directory, separate=args.no_fork),
        environments=environments,
        extra=_wandb(study, args.wandb_project),
    )
    for label, problem in outcome.failures.items():
        print(f"megatron-async study: {label} failed: {problem}", file=sys.stderr)
    seconds = duration(time.monotonic() - started)
    print(f"{outcome.started} cells run in {seconds}, {outcome.total} in all\n")
    _write_report(study, directory, dataset.identity)
    if not outcome.complete:
        print(f"Not all cells are done: start it again with --output {directory}.")
    return 0 if outcome.complete else 1


def _report(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="megatron-async study report",
        description="Write DIR/report from the results that a study has so far.",
        allow_abbrev=False,
    )
    parser.add_argument("directory", type=Path, metavar="DIR", help="the study's --output")
    directory: Path = parser.parse_args(argv).directory
    path = directory / runner.CONFIG_FILE
    if not path.is_file():
        raise ConfigError(f"{directory} holds no study: there is no {path}.")
    identity = (directory / runner.DATASET_FILE).read_text(encoding="utf-8")
    _write_report(config.load(str(path)), directory, identity)
    return 0


def _against(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="megatron-async study against",
        description="Show gap and recovery of several studies against a flag of Megatron in which "
        "they differ, such as train-iters or global-batch-size.",
        allow_abbrev=False,
    )
    parser.add_argument("flag", metavar="FLAG", help="under flags in the studies' configurations")
    parser.add_argument(
        "directories", nargs="+", type=Path, metavar="DIR", help="the studies' --output"
    )
    parser.add_argument("--output", type=Path, required=True, metavar="OUT", help="a folder")
    args = parser.parse_args(argv)
    flag = args.flag.removeprefix("--")
    series = against.read(flag, args.directories)
    print(f"Wrote {', '.join(map(str, against.write(flag, series, args.output)))}.")
    return 0


def _write_report(study: Study, directory: Path, dataset: str) -> None:
    identity = runner.identity_of(study, dataset)
    analysis = analyse(study, runner.read_results(directory), identity=identity)
    if not any(group.results for group in analysis.groups):
        raise runner.RunError(f"no cell in {directory} is done: there is nothing to report.")
    paths = report.write(study, analysis, directory / "report")
    print(report.main_table(analysis))
    print(f"\nWrote {', '.join(map(str, paths))}.")


def _list() -> None:
    studies = [config.load(name) for name in config.shipped()]
    width = max(len(study.name) for study in studies)
    for study in studies:
        cells = count(study, identity=())
        print(f"{study.name:{width}}  {study.device}, {cells} cells: {study.description}")


def _dry_run(study: Study) -> None:
    """Print a command for each cell that is known to be needed; learning rates that are to be
    chosen are not known."""
    cells = plan(study, {}, identity=())
    print(f"# {study.name}: {count(study, identity=())} cells, of which {len(cells)} are known now")
    command = shlex.split(study.launcher) if study.launcher else torchrun(study.ranks)
    dataset = Prepared(flags=("--data-path", "DATASET"), identity="")
    for cell in cells:
        arguments = runner.arguments_of(study, cell, dataset, folder=Path("DIR/cells") / cell.name)
        print(f"\n# {cell.label}\n{shlex.join([*command, '-m', 'megatron_async', *arguments])}")


def _launcher(study: Study, directory: Path, *, separate: bool) -> Launcher:
    if study.launcher is not None:
        return CommandLauncher(shlex.split(study.launcher), local=False)
    if study.device == "cpu" and study.ranks == 1 and not separate:
        return ForkLauncher(log=directory / "launcher.log")
    return CommandLauncher(torchrun(study.ranks))


def _environments(study: Study, jobs: int | None) -> list[Mapping[str, str]]:
    """Variables for each of the runs at a time.

    Raises:
        RunError: the machine has too few GPUs.
    """
    if study.device == "cpu" or study.launcher is not None:
        most = 1 if study.launcher is not None else max(1, _cores() // study.ranks)
        return [{} for _ in range(jobs or most)]
    gpus = _gpus()
    most = len(gpus) // study.ranks
    if (jobs or 1) > most:
        raise runner.RunError(
            f"{jobs or 1} run(s) at a time of {study.ranks} GPUs each need more than the "
            f"{len(gpus)} GPUs here: lower ranks and the parallel sizes in flags, or --jobs."
        )
    return [
        {"CUDA_VISIBLE_DEVICES": ",".join(gpus[slot * study.ranks : (slot + 1) * study.ranks])}
        for slot in range(jobs or most)
    ]


def _cores() -> int:
    """Physical cores that this process may use."""
    import psutil

    physical = psutil.cpu_count(logical=False) or 1
    return max(1, min(physical, len(os.sched_getaffinity(0))))


def _gpus() -> list[str]:
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    if given is not None:
        return [one for one in given.split(",") if one]
    import torch

    return [str(index) for index in range(torch.cuda.device_count())]


def _wandb(study: Study, project: str | None) -> Callable[[Cell, Path], Sequence[str]]:
    """Megatron's own flags: a cell is a W&B run, under the cell's name."""
    if project is None:
        return lambda cell, folder: ()
    return lambda cell, folder: (
        *("--wandb-project", project, "--wandb-exp-name", f"{study.name} {cell.label}"),
        *("--wandb-save-dir", str(folder), "--tensorboard-dir", str(folder / "tensorboard")),
    )


def _jobs(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError("give at least 1")
    return value


def _make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="megatron-async study",
        description="Train a grid of optimizers, delays, corrections and seeds, and report what "
        "the delay costs and what a correction wins back. A study that was stopped goes on when it "
        "is started again. `megatron-async study report DIR` writes the report alone, and "
        "`megatron-async study against FLAG DIR... --output OUT` compares studies that differ in "
        "a flag.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "config", nargs="?", metavar="CONFIG", help="a YAML file, or a name of --list"
    )
    parser.add_argument("--output", type=Path, metavar="DIR", help="where everything goes")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="change the configuration, for example flags.train-iters=50 or seeds=[1]; may be "
        "given several times",
    )
    parser.add_argument(
        "--jobs",
        type=_jobs,
        metavar="N",
        help="runs at a time; by default as many as the physical cores or GPUs allow",
    )
    parser.add_argument(
        "--no-fork",
        action="store_true",
        help="start each run on CPU as a process of its own instead of forking one that has "
        "imported Megatron",
    )
    parser.add_argument("--wandb-project", metavar="NAME", help="log the runs to Weights & Biases")
    parser.add_argument(
        "--dry-run", action="store_true", help="print the cells' commands and run nothing"
    )
    parser.add_argument("--list", action="store_true", help="list this package's configurations")
    return parser
