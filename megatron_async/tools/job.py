"""A torchrun job on this machine: started, followed line by line, always ended."""

import os
import queue
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

import psutil

__all__ = ["Job", "JobError", "end_family", "problem_in", "rank_environment", "torchrun"]

_GRACE_S = 10.0
_REFUSAL = re.compile(r"megatron_async: \d+ problems? with the arguments:\n(?:  .*\n?)+")
_ERRORS = (
    re.compile(r"^(?:\[rank\d+\]: ?)?(\w[\w.]*(?:Error|Exception)\b.*)", re.MULTILINE),
    re.compile(r"^\S+: (error: .*)", re.MULTILINE),  # argparse's
    re.compile(r"^megatron_async: (there is no .*|.* does not work on CPU ranks .*)", re.MULTILINE),
)


class JobError(Exception):
    """The job failed or hung; the message names its log."""


class Job:
    """Runs ``torchrun ARGUMENTS`` and copies what it prints to a file.

    The job has no standard input, and one thread a rank. Leaving the context ends the job and every
    process that it started.

    Args:
        arguments: what torchrun runs: a script, or ``-m`` and a module, and its arguments.
        ranks: how many processes.
        log: the file to write.
        silence_s: how long the job may print nothing before it counts as hanging, in seconds.
        limit_s: how long it may take, in seconds; by default as long as it likes.
        environment: variables to add.
    """

    def __init__(
        self,
        arguments: Sequence[str],
        *,
        ranks: int,
        log: Path,
        silence_s: float,
        limit_s: float = float("inf"),
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self._command = [*torchrun(ranks), *arguments]
        self._log = log
        self._silence_s = silence_s
        self._limit_s = limit_s
        self._environment = dict(environment or {})
        self._lines: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()

    def __enter__(self) -> "Job":
        self._process = subprocess.Popen(
            self._command,
            env={**rank_environment(), **self._environment},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        self._ends = time.monotonic() + self._limit_s
        assert self._process.stdout is not None
        reader = threading.Thread(target=self._read, args=(self._process.stdout,), daemon=True)
        reader.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._process.poll() is None:
            end_family(self._process.pid)
            self._process.wait()

    def follow(self) -> Iterator[str]:
        """Yield the job's lines as they come, until it has ended.

        Raises:
            JobError: it failed, printed nothing for too long, or took longer than it may.
        """
        with self._log.open("wb") as log:
            log.write((" ".join(self._command) + "\n").encode())
            while (line := self._next()) is not None:
                log.write(line)
                log.flush()
                yield line.decode(errors="replace").rstrip("\n")
        code = self._process.wait()
        if code:
            problem = problem_in(self._log.read_text(encoding="utf-8", errors="replace"))
            raise JobError(
                f"the run failed with exit code {code}: {problem or 'no error message was found'}\n"
                f"Its whole output is in {self._log}."
            )

    def _read(self, output: BinaryIO) -> None:
        for line in output:
            self._lines.put(line)
        self._lines.put(None)

    def _next(self) -> bytes | None:
        left = self._ends - time.monotonic()
        if left > 0:
            try:
                return self._lines.get(timeout=min(self._silence_s, left))
            except queue.Empty:
                if self._silence_s < left:
                    raise JobError(
                        f"the run printed nothing for {self._silence_s:.0f} s and was ended; see "
                        f"{self._log}."
                    ) from None
        raise JobError(
            f"the run took longer than {self._limit_s:.0f} s and was ended; see {self._log}."
        )


def torchrun(ranks: int) -> list[str]:
    """The start of a command that runs so many ranks on this machine.

    Rendezvous on a port that torchrun itself binds, reached over the loopback device: neither a
    free port nor the host's name has to be found.
    """
    rendezvous = ("--standalone", "--local-addr", "localhost", "--nproc-per-node", str(ranks))
    return [sys.executable, "-m", "torch.distributed.run", *rendezvous]


def problem_in(output: str) -> str:
    """The error message that a job's output holds; empty if it holds none."""
    if match := _REFUSAL.search(output):
        return match[0].rstrip()
    for pattern in _ERRORS:
        if match := pattern.search(output):
            return match[1]
    return ""


def rank_environment() -> dict[str, str]:
    """The environment of this process, as a job's should be: one thread a rank, unbuffered."""
    # A caller that runs under torchrun itself would hand its own rank down.
    of_a_rank = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK")
    inherited = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("TORCHELASTIC_", "MASTER_")) and name not in of_a_rank
    }
    return {
        "GLOO_SOCKET_IFNAME": "lo",
        **inherited,
        "OMP_NUM_THREADS": "1",
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",
        "PYTHONUNBUFFERED": "1",
    }


def end_family(*pids: int) -> None:
    """End processes and all below them; torchrun's ranks are sessions of their own."""
    family = []
    for pid in pids:
        try:
            root = psutil.Process(pid)
            family += [*root.children(recursive=True), root]
        except psutil.NoSuchProcess:
            continue
    for process in family:
        try:
            process.terminate()
        except psutil.NoSuchProcess:
            continue
    _, alive = psutil.wait_procs(family, timeout=_GRACE_S)
    for process in alive:
        try:
            process.kill()
        except psutil.NoSuchProcess:
            continue
    psutil.wait_procs(alive, timeout=_GRACE_S)
