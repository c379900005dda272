"""Runs the cells of a study, several at a time, and picks up where an earlier run was stopped."""

import fcntl
import importlib.metadata
import shlex
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from megatron_async.study import results as results_file
from megatron_async.study.cells import Cell, count, plan
from megatron_async.study.config import Study, dump
from megatron_async.study.datasets import Prepared
from megatron_async.study.launch import Launcher, Run
from megatron_async.study.live import LiveTable, Row, duration
from megatron_async.study.results import DIVERGED, CellResult
from megatron_async.tools.job import problem_in
from megatron_async.tools.training_log import TrainingLog

__all__ = [
    "CONFIG_FILE",
    "DATASET_FILE",
    "Outcome",
    "RunError",
    "arguments_of",
    "folder_of",
    "identity_of",
    "read_results",
    "run",
    "write_config",
]

CONFIG_FILE: Final = "study.yaml"
DATASET_FILE: Final = "dataset.txt"

_CACHE = "index-cache"
_CHECKPOINTS = "checkpoints"
_POLL_S = 0.1
_SILENCE_S = 1800.0  # a run that logs nothing for so long hangs
_GIVE_UP = 3  # failed cells, before any has come to its end
_PACKAGES = ("megatron-async", "megatron-core", "emerging-optimizers", "torch")


class RunError(Exception):
    """The study cannot be run; the message says why."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a call of :func:`run` came to.

    Attributes:
        results: of all cells that are done, by name, from earlier calls too.
        failures: what went wrong with the cells that failed in this call, by label.
        started: how many cells this call started.
        total: how many cells the study has.
        complete: whether nothing is left to run.
    """

    results: Mapping[str, CellResult]
    failures: Mapping[str, str]
    started: int
    total: int
    complete: bool


@dataclass(kw_only=True)
class _Running:
    cell: Cell
    run: Run
    slot: int
    folder: Path
    command: list[str]
    before: list[TrainingLog]
    position: int = 0
    rest: bytes = b""
    said_so: bool = False
    log: TrainingLog = field(default_factory=TrainingLog)
    started: float = field(default_factory=time.monotonic)
    heard: float = field(default_factory=time.monotonic)

    @property
    def log_path(self) -> Path:
        return self.folder / "log.txt"

    def read(self) -> None:
        """Take in what the run has printed since the last call."""
        with self.log_path.open("rb") as file:
            file.seek(self.position)
            new = file.read()
        if not new:
            return
        self.position += len(new)
        self.heard = time.monotonic()
        *lines, self.rest = (self.rest + new).split(b"\n")
        for line in lines:
            text = line.decode(errors="replace")
            self.log.feed(text)
            self.said_so = self.said_so or results_file.diverged(text)

    @property
    def row(self) -> Row:
        last = self.log.iterations[-1] if self.log.iterations else None
        return Row(
            label=self.cell.label,
            iteration=0 if last is None else last.number,
            iterations=self.iterations,
            loss=None if last is None else last.loss,
        )

    @property
    def iterations(self) -> int:
        return int(self.cell.flags["train-iters"][0])


def identity_of(study: Study, dataset: str) -> tuple[str, ...]:
    """What a result depends on beside the flags; see :class:`~.cells.Cell`.

    Args:
        dataset: the identity of a :class:`~.datasets.Prepared`.
    """
    script = "" if study.script is None else str(study.script)
    return (study.device, str(study.ranks), script, dataset)


def folder_of(directory: Path, cell: Cell) -> Path:
    """Where a cell's files are."""
    return directory / "cells" / cell.name


def arguments_of(study: Study, cell: Cell, dataset: Prepared, *, folder: Path) -> list[str]:
    """What follows ``-m megatron_async`` on the command line of a cell with this folder."""
    script = study.script or Path(__file__).parents[1] / "scripts" / "pretrain_gpt.py"
    cpu = ["--cpu"] if study.device == "cpu" else []
    # Of this run alone: Megatron writes index files without care for others that read them.
    cache = ["--data-cache-path", str(folder / _CACHE)]
    checkpoints = []
    if study.checkpoint_interval is not None:
        place = str(folder / _CHECKPOINTS)
        checkpoints = ["--save", place, "--load", place]
        checkpoints += ["--save-interval", str(study.checkpoint_interval)]
    # A flag that stands twice has its last value.
    return [*cpu, str(script), *dataset.flags, *cache, *checkpoints, *cell.words]


def read_results(directory: Path) -> dict[str, CellResult]:
    """The results of all cells in a study's folder, by name."""
    found = {}
    for folder in sorted((directory / "cells").glob("*/")):
        result = results_file.read(folder)
        if result is not None and result.name == folder.name:
            found[result.name] = result
    return found


def write_config(study: Study, dataset: Prepared, directory: Path) -> None:
    """Write down what the study is, for its report."""
    for name, text in ((CONFIG_FILE, dump(study)), (DATASET_FILE, dataset.identity)):
        partial = directory / f"{name}.partial"
        partial.write_text(text, encoding="utf-8")
        partial.replace(directory / name)


@contextmanager
def _alone(directory: Path) -> Iterator[None]:
    """Hold the folder against another study in it, until the process ends or the block does."""
    with (directory / ".lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise RunError(
                f"another study is running in {directory}; give another --output."
            ) from None
        yield


def run(
    study: Study,
    directory: Path,
    *,
    dataset: Prepared,
    launcher: Launcher,
    environments: Sequence[Mapping[str, str]],
    extra: Callable[[Cell, Path], Sequence[str]] = lambda cell, folder: (),
    live: LiveTable | None = None,
) -> Outcome:
    """Run what has no result yet. Processes that were started are ended, whatever happens.

    Args:
        study: what to run.
        directory: gets the study's files.
        dataset: what to train on.
        launcher: starts the runs; is closed at the end.
        environments: variables of each of the runs at a time; their number is that of the runs.
        extra: arguments of a cell, in its folder, on which its result does not depend.
        live: where to show what happens.

    Raises:
        RunError: another process runs a study there, or nothing works.
        LaunchError: runs cannot be started.
    """
    directory.mkdir(parents=True, exist_ok=True)
    try:
        with _alone(directory):
            write_config(study, dataset, directory)
            loop = _Loop(
                study, directory, dataset, launcher, environments, extra, live or LiveTable()
            )
            return loop.run()
    finally:
        launcher.close()


class _Loop:
    def __init__(
        self,
        study: Study,
        directory: Path,
        dataset: Prepared,
        launcher: Launcher,
        environments: Sequence[Mapping[str, str]],
        extra: Callable[[Cell, Path], Sequence[str]],
        live: LiveTable,
    ) -> None:
        self._study = study
        self._directory = directory
        self._dataset = dataset
        self._launcher = launcher
        self._environments = environments
        self._extra = extra
        self._live = live
        self._identity = identity_of(study, dataset.identity)
        self._total = count(study, identity=self._identity)
        self._results = read_results(directory)
        self._plan: list[Cell] | None = None
        self._running: list[_Running] = []
        self._failures: dict[str, str] = {}
        self._failed: set[str] = set()
        self._times: list[float] = []
        self._started = 0
        self._versions = _versions()

    def run(self) -> Outcome:
        self._greet()
        try:
            while self._start_more() or self._running:
                time.sleep(_POLL_S)
                for one in list(self._running):
                    self._look_after(one)
                self._show()
        finally:
            self._live.close()
            self._launcher.end([one.run for one in self._running])
        wanted = self._wanted()
        return Outcome(
            results=self._results,
            failures=self._failures,
            started=self._started,
            total=self._total,
            complete=not self._failures and all(cell.name in self._results for cell in wanted),
        )

    def _wanted(self) -> list[Cell]:
        # Made again only when there is another result.
        if self._plan is None:
            self._plan = plan(self._study, self._results, identity=self._identity)
        return self._plan

    def _done(self) -> int:
        return sum(cell.name in self._results for cell in self._wanted())

    def _greet(self) -> None:
        done = self._done()
        again = f", {done} of them done before" if done else ""
        self._live.say(
            f"{self._study.name}: {self._total} cells{again}; {len(self._environments)} at a time"
        )

    def _start_more(self) -> bool:
        """Start what can be started, and return whether any was."""
        free = set(range(len(self._environments))) - {one.slot for one in self._running}
        if not free:
            return False
        busy = {one.cell.name for one in self._running} | self._failed | set(self._results)
        todo = [cell for cell in self._wanted() if cell.name not in busy]
        for slot, cell in zip(sorted(free), todo, strict=False):
            self._start(cell, slot)
        return bool(todo)

    def _start(self, cell: Cell, slot: int) -> None:
        folder = folder_of(self._directory, cell)
        before = self._earlier(folder)
        arguments = [
            *arguments_of(self._study, cell, self._dataset, folder=folder),
            *self._extra(cell, folder),
        ]
        command = [*self._launcher.command, "-m", "megatron_async", *arguments]
        log = folder / "log.txt"
        log.write_text(shlex.join(command) + "\n")
        run = self._launcher.start(arguments, log=log, environment=self._environments[slot])
        self._running.append(
            _Running(cell=cell, run=run, slot=slot, folder=folder, command=command, before=before)
        )
        self._started += 1

    def _earlier(self, folder: Path) -> list[TrainingLog]:
        """Make a folder ready, and read the logs of a run that goes on from a checkpoint."""
        if not (folder / _CHECKPOINTS).is_dir():
            # Whatever an earlier run left without a result is of no use.
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
            return []
        last = folder / "log.txt"
        kept = sorted(folder.glob("log-*.txt"))
        if last.exists():
            kept.append(last.rename(folder / f"log-{len(kept) + 1:03d}.txt"))
        logs = []
        for path in kept:
            log = TrainingLog()
            for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
                log.feed(line)
            logs.append(log)
        return logs

    def _look_after(self, one: _Running) -> None:
        code = one.run.poll()
        one.read()
        if code is None:
            if time.monotonic() - one.heard < _SILENCE_S:
                return
            self._launcher.end([one.run])
            self._finish(one, None, f"printed nothing for {duration(_SILENCE_S)} and was ended")
            return
        problem = f"exit code {code}" if code >= 0 else f"ended by signal {-code}"
        result = results_file.result_of(
            [*one.before, one.log],
            iterations=one.iterations,
            said_so=one.said_so,
            name=one.cell.name,
            settings=_settings(one.cell),
            command=one.command,
            seconds=time.monotonic() - one.started,
            versions=self._versions,
        )
        # A complete log of a run that then failed is not trusted, a divergence is a failure.
        if result is not None and code != 0 and result.status != DIVERGED:
            result = None
        self._finish(one, result, problem)

    def _finish(self, one: _Running, result: CellResult | None, problem: str) -> None:
        self._running.remove(one)
        shutil.rmtree(one.folder / _CACHE, ignore_errors=True)
        label = one.cell.label
        seconds = time.monotonic() - one.started
        if result is None:
            output = one.log_path.read_text(encoding="utf-8", errors="replace")
            cause = problem_in(output) or "no error message was found"
            self._failed.add(one.cell.name)
            self._failures[label] = f"{problem}: {cause} ({one.log_path})"
            self._live.say(f"FAILED   {label}: {self._failures[label]}")
            if not self._results and len(self._failed) >= _GIVE_UP:
                raise RunError(
                    f"{_GIVE_UP} cells failed and none succeeded: mend the configuration. The "
                    f"last: {self._failures[label]}"
                )
            return
        results_file.write(result, one.folder)
        if not self._study.keep_checkpoints:
            shutil.rmtree(one.folder / _CHECKPOINTS, ignore_errors=True)
        self._results[result.name] = result
        self._plan = None
        self._times.append(seconds)
        loss = f"{result.validation_loss:.4f}" if result.validation_loss is not None else "diverged"
        self._live.say(f"{loss:8} {label} ({duration(seconds)})")

    def _show(self) -> None:
        done = self._done()
        left = None
        if self._times:
            mean = sum(self._times) / len(self._times)
            left = max(0.0, (self._total - done) * mean / len(self._environments))
        self._live.update(
            done=done, total=self._total, rows=[one.row for one in self._running], seconds_left=left
        )


def _settings(cell: Cell) -> dict[str, str | int | float | None]:
    return {
        "variant": cell.variant,
        "optimizer": cell.optimizer,
        "momentum": cell.momentum,
        "delay": cell.delay,
        "correction": cell.correction,
        "learning_rate": cell.learning_rate,
        "seed": cell.seed,
    }


def _versions() -> dict[str, str]:
    return {name: importlib.metadata.version(name) for name in _PACKAGES}
