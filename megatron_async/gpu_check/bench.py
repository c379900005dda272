"""Starts the runs that checks ask for, each once, and hands out what they logged."""

import contextlib
import csv
import os
import re
import time
from collections.abc import Sequence
from pathlib import Path

from megatron_async.gpu_check.checks import Parts
from megatron_async.gpu_check.run_log import RunLog
from megatron_async.gpu_check.runs import Machine, Run, runs_on
from megatron_async.gpu_check.training import LOCAL, Model
from megatron_async.planning import plan as planning
from megatron_async.tools.job import Job, JobError

__all__ = ["Bench", "RunFailed"]

_TAIL = 50  # lines: the tracebacks of two ranks
# What torchrun says of failed ranks when all have ended.
_SUMMARY = re.compile(r"^E\d{4} .*failed \(exitcode: ")


class RunFailed(Exception):
    """A run failed or took too long; its end was shown already."""


class Bench:
    """The runs of one check.

    Args:
        machine: where.
        script: the training script.
        output: a folder for logs and plans.
        limit_s: how long a run may take, in seconds.
    """

    def __init__(self, machine: Machine, *, script: Path, output: Path, limit_s: float) -> None:
        self.machine = machine
        self._runs = runs_on(machine, script)
        self._output = output
        self._limit_s = limit_s
        self._done: dict[Run, tuple[RunLog, str]] = {}

    def log(self, name: str, *, with_races: bool = False) -> RunLog:
        """What a run logged; it is started by the first who asks.

        Args:
            name: of the run.
            with_races: the sanitizer may have ended it.

        Raises:
            RunFailed: it failed, or took too long.
        """
        run = self._runs[name]
        if run not in self._done:
            self._done[run] = self._start(name, run, with_races=with_races)
        log, problem = self._done[run]
        if problem and not (with_races and log.races):
            raise RunFailed(f"the run {log.name} {problem}")
        return log

    def plan(self, model: Model, *, stages: int, microbatches: int, schedule: str) -> list[Parts]:
        """What ``megatron-async plan`` predicts of each stage's memory, in bytes by name.

        Args:
            model: what is trained, with the layers of most runs.
            stages: pipeline stages.
            microbatches: of a batch.
            schedule: its name.
        """
        flags = model.shape | {
            "pipeline-model-parallel-size": stages,
            "microbatches": microbatches,
        }
        argv = [part for name, value in flags.items() for part in (f"--{name}", str(value))]
        argv.append("--delay-correction")
        if self.machine.layer_flags == LOCAL:
            argv.append("--unfused-attention")
        table = self._output / f"plan-pp{stages}.csv"
        with (
            table.with_suffix(".txt").open("w", encoding="utf-8") as text,
            contextlib.redirect_stdout(text),
        ):
            planning.main([*argv, "--csv", str(table)])
        return _read_plan(table, schedule)

    def _start(self, name: str, run: Run, *, with_races: bool) -> tuple[RunLog, str]:
        path = self._output / f"{name}.log"
        log = RunLog(name)
        problem = ""
        print(f"{name:<24}", end="", flush=True)
        began = time.monotonic()
        job = Job(
            run.arguments,
            ranks=run.ranks,
            log=path,
            silence_s=self._limit_s,
            limit_s=self._limit_s,
            environment=_from_user() | dict(run.environment),
        )
        try:
            with job:
                for line in job.follow():
                    log.feed(line)
        except JobError as error:
            late = time.monotonic() - began >= self._limit_s
            problem = f"took longer than {self._limit_s:.0f} s" if late else "failed"
            if not (with_races and log.races):
                print(f"{error}\n{_tail(path)}", flush=True)
                return log, problem
        print(f"{time.monotonic() - began:4.0f} s", flush=True)
        return log, problem


def _from_user() -> dict[str, str]:
    """What a job would set to 1 itself: a user may want to try others."""
    name = "CUDA_DEVICE_MAX_CONNECTIONS"
    return {name: os.environ[name]} if name in os.environ else {}


def _tail(path: Path) -> str:
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    end = next((number for number, line in enumerate(lines) if _SUMMARY.search(line)), len(lines))
    shown = lines[:end][-_TAIL:]
    return "\n".join([f"---- the end of {path} ----", *shown, "----"])


def _read_plan(path: Path, schedule: str) -> list[Parts]:
    with path.open(newline="", encoding="utf-8") as file:
        rows: Sequence[dict[str, str]] = list(csv.DictReader(file))
    end = "_bytes"
    return [
        {name.removesuffix(end): float(value) for name, value in row.items() if name.endswith(end)}
        for row in rows
        if row["schedule"] == schedule
    ]
