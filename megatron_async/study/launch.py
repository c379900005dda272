"""Starts the runs of a study: each as a command of its own, or as forks of one process.

Most of a small run's launch goes into imports. :class:`ForkLauncher` has them done once, in
:mod:`megatron_async.study.fork_host`; each run is a fork that calls the package's launcher as
``python -m megatron_async`` would. That works for runs of one CPU rank.
"""

import contextlib
import ctypes
import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final, Protocol

from megatron_async.tools.job import end_family, rank_environment, torchrun

__all__ = [
    "CommandLauncher",
    "ForkLauncher",
    "LaunchError",
    "Launcher",
    "Run",
    "die_with_parent",
    "one_rank_environment",
]

_PR_SET_PDEATHSIG: Final = 1


class LaunchError(Exception):
    """Runs cannot be started at all."""


class Run(Protocol):
    """A run that was started."""

    def poll(self) -> int | None:
        """The exit code (negative: a signal's number), or None while it runs."""

    def pid(self) -> int | None:
        """The process at the top; None if it is not known yet, or has ended."""


class Launcher(Protocol):
    """A way to start runs.

    Attributes:
        command: the words ahead of ``-m megatron_async`` that start the same run by hand.
    """

    command: tuple[str, ...]

    def start(self, arguments: Sequence[str], *, log: Path, environment: Mapping[str, str]) -> Run:
        """Start a run, whose output is added to a file.

        Args:
            arguments: those of the launcher: ``--cpu`` perhaps, the script, and its flags.
            log: the file.
            environment: variables to add.
        """

    def end(self, runs: Sequence[Run]) -> None:
        """End runs and every process they have started."""

    def close(self) -> None:
        """End what the launcher itself has started."""


def die_with_parent(number: int) -> None:
    """Have the kernel send this process a signal when its parent ends, however it ends (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)


def one_rank_environment() -> dict[str, str]:
    """What torchrun would tell the one rank of a job."""
    # Port 0: the rank hosts the store itself and takes whatever port is free.
    ranks = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    return {**ranks, "MASTER_ADDR": "localhost", "MASTER_PORT": "0"}


class CommandLauncher:
    """Starts each run as a command.

    Args:
        command: the words ahead of ``-m megatron_async``.
        local: whether all ranks are on this machine.
    """

    def __init__(self, command: Sequence[str], *, local: bool = True) -> None:
        self.command = tuple(command)
        self._environment = rank_environment()
        if not local and "GLOO_SOCKET_IFNAME" not in os.environ:
            # The loopback device reaches no other machine.
            self._environment.pop("GLOO_SOCKET_IFNAME", None)

    def start(self, arguments: Sequence[str], *, log: Path, environment: Mapping[str, str]) -> Run:
        with log.open("ab") as output:
            try:
                process = subprocess.Popen(
                    [*self.command, "-m", "megatron_async", *arguments],
                    env={**self._environment, **environment},
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                    preexec_fn=lambda: die_with_parent(signal.SIGTERM),
                )
            except OSError as error:
                raise LaunchError(
                    f"{self.command[0]} cannot be started: {error.strerror}."
                ) from error
        return _Command(process)

    def end(self, runs: Sequence[Run]) -> None:
        end_family(*_pids(runs))
        for run in runs:
            if isinstance(run, _Command):
                run.wait()

    def close(self) -> None:
        return


class _Command:
    def __init__(self, process: "subprocess.Popen[bytes]") -> None:
        self._process = process

    def poll(self) -> int | None:
        return self._process.poll()

    def pid(self) -> int | None:
        return self._process.pid if self._process.poll() is None else None

    def wait(self) -> None:
        self._process.wait()


class ForkLauncher:
    """Starts runs of one CPU rank as forks of a process that has imported Megatron.

    Args:
        log: a file for what that process itself says.

    Raises:
        LaunchError: from :meth:`start` or from a run's ``poll``, when the process has ended.
    """

    def __init__(self, *, log: Path) -> None:
        self.command = tuple(torchrun(1))
        self._log = log
        self._runs: list[_Fork] = []
        self._buffer = b""
        with log.open("wb") as errors:
            self._host = subprocess.Popen(
                [sys.executable, "-m", "megatron_async.study.fork_host"],
                env=rank_environment(),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                start_new_session=True,
                preexec_fn=lambda: die_with_parent(signal.SIGTERM),
            )
        assert self._host.stdout is not None
        os.set_blocking(self._host.stdout.fileno(), False)

    def start(self, arguments: Sequence[str], *, log: Path, environment: Mapping[str, str]) -> Run:
        run = _Fork(self)
        order = {
            "number": len(self._runs),
            "arguments": list(arguments),
            "log": str(log),
            "environment": {**one_rank_environment(), **environment},
        }
        self._runs.append(run)
        assert self._host.stdin is not None
        try:
            self._host.stdin.write(json.dumps(order).encode() + b"\n")
            self._host.stdin.flush()
        except BrokenPipeError:
            raise self._ended() from None
        return run

    def end(self, runs: Sequence[Run]) -> None:
        # One that was asked for and has not begun yet ends with the launcher.
        with contextlib.suppress(LaunchError):
            self.read()
        end_family(*_pids(runs))

    def close(self) -> None:
        end_family(self._host.pid)
        self._host.wait()
        for stream in (self._host.stdin, self._host.stdout):
            if stream is not None:
                try:
                    stream.close()
                except BrokenPipeError:
                    continue

    def read(self) -> None:
        """Take in what the process reports."""
        assert self._host.stdout is not None
        while chunk := self._host.stdout.read(65536):
            self._buffer += chunk
        *lines, self._buffer = self._buffer.split(b"\n")
        for line in lines:
            report = json.loads(line)
            run = self._runs[report["number"]]
            if "pid" in report:
                run.process = report["pid"]
            else:
                run.code = report["code"]
        if self._host.poll() is not None and any(run.code is None for run in self._runs):
            raise self._ended()

    def _ended(self) -> LaunchError:
        self._host.wait()
        last = self._log.read_text(errors="replace").splitlines()[-1:]
        return LaunchError(
            f"the process that starts the runs ended with code {self._host.returncode}: "
            f"{''.join(last) or 'it said nothing'}\nIts whole output is in {self._log}."
        )


class _Fork:
    def __init__(self, launcher: ForkLauncher) -> None:
        self._launcher = launcher
        self.process: int | None = None
        self.code: int | None = None

    def poll(self) -> int | None:
        if self.code is None:
            self._launcher.read()
        return self.code

    def pid(self) -> int | None:
        return self.process if self.code is None else None


def _pids(runs: Sequence[Run]) -> list[int]:
    return [pid for run in runs if (pid := run.pid()) is not None]
