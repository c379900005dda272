"""Starts jobs of CPU ranks on this machine, and ends them: the layer below all tests that train.

What is the same for the package's own jobs (the start of torchrun's command, a rank's environment,
the end of a job's processes) is :mod:`megatron_async.tools.job`'s. Here a job has the log of each
rank apart, a time limit, at which ranks print their stacks, and leaves nothing behind.

A launch of two ranks costs 5 to 10 s on two idle cores, most of it imports. Share one between
assertions, or run many jobs in one launch: :mod:`tests.support.forked`.
"""

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from textwrap import dedent
from typing import Any

import psutil
import pytest

from megatron_async.tools.job import end_family, rank_environment, torchrun
from tests.support.gpt import PRETRAIN_GPT, REPOSITORY
from tests.support.output import RunResult, read_rank_log

__all__ = ["LAUNCHERS", "environment", "run_python", "run_torchrun", "stop", "wait_for_iteration"]

LAUNCHERS: Mapping[str, Sequence[str]] = {
    # The package's own launcher, on CPU ranks.
    "plugin": ("-m", "megatron_async", "--cpu"),
    # Megatron on CPU ranks, and nothing else of the package.
    "plain": ("-m", "tests.support.launchers.plain_cpu"),
    # The script itself.
    "none": (),
}
"""What torchrun starts ahead of the script."""

_JOB = "MEGATRON_ASYNC_TEST_LOGS"
"""Variable that all processes of a job inherit: its log folder."""


def environment() -> dict[str, str]:
    """Return the environment of a job's ranks, and of other processes that tests start."""
    path = os.pathsep.join(filter(None, [str(REPOSITORY), os.environ.get("PYTHONPATH")]))
    return {
        "WANDB_MODE": "offline",
        **rank_environment(),
        "PYTHONFAULTHANDLER": "1",
        "PYTHONPATH": path,
    }


def run_torchrun(
    nproc: int,
    argv: Sequence[str],
    *,
    timeout: float = 300,
    env: Mapping[str, str] | None = None,
    launcher: str | Sequence[str] = "plain",
    script: str | Path | None = PRETRAIN_GPT,
    check: bool = True,
    during: Callable[[subprocess.Popen[str], Path], None] | None = None,
) -> RunResult:
    """Run ``script`` on ``nproc`` CPU ranks of this machine, and wait for it.

    Args:
        nproc: number of ranks.
        argv: the script's arguments, see :func:`tests.support.gpt.gpt_args`.
        timeout: seconds until the job is stopped. Each rank's stack goes to its stderr then.
        env: variables to add to the environment.
        launcher: a key of ``LAUNCHERS``, or torchrun arguments to put before the script.
        script: what to run; None if the launcher says that, too.
        check: fail the test, with the ends of all logs, if the job fails or is stopped, or a rank
            does not exit with 0 when it has finished.
        during: called once the job is started, with torchrun's process and the logs' folder, see
            :func:`wait_for_iteration`.
    """
    before = LAUNCHERS[launcher] if isinstance(launcher, str) else launcher
    with tempfile.TemporaryDirectory(prefix="megatron-async-") as logs:
        command = [
            *(*torchrun(nproc), "--log-dir", logs, "--redirects", "3"),
            *(*before, *([] if script is None else [str(script)]), *argv),
        ]
        start = time.monotonic()
        process = subprocess.Popen(
            command,
            env={**environment(), **(env or {}), _JOB: logs},
            cwd=REPOSITORY,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        returncode: int | None = None
        try:
            if during is not None:
                during(process, Path(logs))
            output, _ = process.communicate(timeout=timeout)
            returncode = process.returncode
        except subprocess.TimeoutExpired:
            output = stop(process)
        except BaseException:
            stop(process)
            raise
        finally:
            _end_orphans(logs)
        result = RunResult(
            returncode=returncode,
            command=command,
            seconds=time.monotonic() - start,
            ranks=[read_rank_log(Path(logs), rank) for rank in range(nproc)],
            launcher_output=output,
        )
    if check and returncode != 0:
        pytest.fail(result.describe(), pytrace=False)
    return result


def wait_for_iteration(logs: Path, *, rank: int, number: int, timeout: float = 180) -> None:
    """Wait until the last rank, ``rank``, has logged a training iteration.

    Args:
        logs: as :func:`run_torchrun` passes it.
        rank: the number of ranks - 1.
        number: of the iteration; 1 is the first.
        timeout: in seconds.

    Raises:
        TimeoutError: it took longer.
    """
    stop = time.monotonic() + timeout
    while not re.search(rf" iteration +{number}/", read_rank_log(logs, rank).stdout):
        if time.monotonic() > stop:
            raise TimeoutError(
                f"no iteration {number}:\n{read_rank_log(logs, rank).stderr[-4000:]}"
            )
        time.sleep(0.05)


def run_python(code: str, *argv: str, path: Path | None = None) -> Any:
    """Run ``code`` in a process of its own; return the JSON that its last line prints."""
    variables = environment()
    if path is not None:
        variables["PYTHONPATH"] += f"{os.pathsep}{path}"
    process = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", dedent(code), *argv],
        env=variables,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert process.returncode == 0, process.stdout + process.stderr
    return json.loads(process.stdout.splitlines()[-1])


def stop(process: subprocess.Popen[str]) -> str:
    """End torchrun and everything it started; return torchrun's output."""
    children = (
        psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
    )
    process.kill()  # First, or it would end its ranks before they have printed their stacks.
    for child in children:
        try:
            child.send_signal(signal.SIGABRT)  # prints its stack: PYTHONFAULTHANDLER
        except psutil.NoSuchProcess:
            continue
    _, alive = psutil.wait_procs(children, timeout=5)
    end_family(*(child.pid for child in alive))
    return process.communicate()[0]


def _end_orphans(logs: str) -> None:
    """Kill what a job has left behind: a killed rank does not end the worker that writes its
    checkpoints."""
    for process in psutil.process_iter():
        try:
            if process.environ().get(_JOB) == logs:
                process.kill()
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
