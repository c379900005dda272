"""Starts real torchrun jobs of a training script and reads what Megatron logs.

A launch of two ranks costs 5 to 10 s on two idle cores, most of it imports. Share one between
assertions.

The numbers in Megatron's log lines:

- The second iteration that a process prints shows the mean of the first two losses: Megatron does
  not reset its sum after the first one (``training_log`` in ``megatron/training/training.py``).
  That goes for a resumed run, too. :attr:`RunResult.losses` has the digits as printed,
  :attr:`RunResult.loss_values` undoes the mean. Both hold for ``--log-interval 1``.
- Losses have 7 digits, gradient norms 3 behind the point. For all digits, pass
  ``tensorboard_dir=DIR, tensorboard_log_interval=1`` and call :func:`read_scalars`. Those losses
  are never averaged.
"""

import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from textwrap import dedent
from typing import Any

import psutil
import pytest

__all__ = [
    "PRETRAIN_GPT",
    "REPOSITORY",
    "Iteration",
    "RankLog",
    "RunResult",
    "gpt_args",
    "read_scalars",
    "run_python",
    "run_torchrun",
    "stop",
    "unaveraged",
    "wait_for_iteration",
]

REPOSITORY = Path(__file__).resolve().parent.parent
PRETRAIN_GPT = Path(
    os.environ.get("MEGATRON_PRETRAIN_GPT", REPOSITORY / "examples" / "pretrain_gpt.py")
)
LAUNCHERS: Mapping[str, Sequence[str]] = {
    # The package's own launcher, on CPU ranks.
    "plugin": ("-m", "megatron_async", "--cpu"),
    # Megatron on CPU ranks, and nothing else of the package.
    "plain": (str(REPOSITORY / "tests" / "plain_cpu_launcher.py"),),
    # The script itself.
    "none": (),
}

type Value = str | int | float | bool | Path | Sequence[str | int | float | Path] | None

# One layer on each of 4 stages; 8 microbatches a batch with one data-parallel rank.
_GPT_ARGS: Mapping[str, Value] = {
    "num_layers": 4,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "seq_length": 64,
    "max_position_embeddings": 64,
    "vocab_size": 256,
    "mock_data": True,
    "tokenizer_type": "NullTokenizer",
    "micro_batch_size": 2,
    "global_batch_size": 16,
    "train_iters": 6,
    "lr": "1e-3",
    "min_lr": "1e-3",
    "lr_decay_style": "constant",
    "log_interval": 1,
    "eval_iters": 0,
    "eval_interval": 1000,
    "optimizer": "adam",
    "num_workers": 0,
    "seed": 1234,
}


def gpt_args(**overrides: Value) -> list[str]:
    """Make the command line of a tiny GPT on mock data.

    Dropout is Megatron's default (0.1, twice): pass ``hidden_dropout=0, attention_dropout=0`` to
    compare layouts.

    Args:
        overrides: a flag's name with underscores, and its value. ``True`` gives the bare flag,
            ``None`` or ``False`` leaves it out, a sequence gives several values.
    """
    argv: list[str] = []
    for name, value in {**_GPT_ARGS, **overrides}.items():
        if value is None or value is False:
            continue
        argv.append("--" + name.replace("_", "-"))
        if value is True:
            continue
        values = [value] if isinstance(value, str | int | float | Path) else value
        argv += [str(one) for one in values]
    return argv


@dataclasses.dataclass(frozen=True)
class Iteration:
    """One training log line: the iteration and its ``name: value`` fields, as printed."""

    number: int
    fields: Mapping[str, str]


@dataclasses.dataclass(frozen=True)
class RankLog:
    """What one rank printed."""

    stdout: str
    stderr: str


@dataclasses.dataclass(frozen=True)
class RunResult:
    """A finished job.

    Attributes:
        returncode: torchrun's; None if the job was stopped at its time limit.
        command: torchrun's command line.
        seconds: wall-clock time of the job. Never assert on it.
        ranks: each rank's output.
        launcher_output: what torchrun itself printed, with its summary of failed ranks.
    """

    returncode: int | None
    command: Sequence[str]
    seconds: float
    ranks: Sequence[RankLog]
    launcher_output: str

    @property
    def stdout(self) -> str:
        """All ranks' stdout, rank 0 first."""
        return "\n".join(rank.stdout for rank in self.ranks)

    @property
    def stderr(self) -> str:
        """All ranks' stderr, rank 0 first."""
        return "\n".join(rank.stderr for rank in self.ranks)

    @cached_property
    def iterations(self) -> list[Iteration]:
        """The training log lines, which the last rank prints."""
        found = []
        for match in re.finditer(r" iteration +(\d+)/ *\d+ \|(.*)", self.ranks[-1].stdout):
            parts = (part.rpartition(":") for part in match[2].split("|"))
            fields = {name.strip(): value.strip() for name, colon, value in parts if colon}
            found.append(Iteration(int(match[1]), fields))
        return found

    def _column(self, name: str) -> list[tuple[int, str]]:
        return [
            (iteration.number, iteration.fields[name])
            for iteration in self.iterations
            if name in iteration.fields
        ]

    @property
    def losses(self) -> list[tuple[int, str]]:
        """(iteration, lm loss with all its printed digits); the second one is a mean, see above.

        A loss that is not a number is not printed at all.
        """
        return self._column("lm loss")

    @property
    def loss_values(self) -> dict[int, float]:
        """Each iteration's own lm loss, see :func:`unaveraged`."""
        return unaveraged(self.losses)

    @property
    def grad_norms(self) -> list[tuple[int, str]]:
        """(iteration, gradient norm)."""
        return self._column("grad norm")

    @property
    def learning_rates(self) -> list[tuple[int, str]]:
        """(iteration, learning rate)."""
        return self._column("learning rate")

    @property
    def validation_losses(self) -> list[tuple[str, str]]:
        """(``iteration 4``, or ``iteration 6 on validation set`` at the end; lm loss)."""
        return re.findall(
            r"validation loss at (.*?) \| lm loss value: (\S+)", self.ranks[-1].stdout
        )

    def describe(self, lines: int = 40) -> str:
        """Return the command and the last ``lines`` lines of everything that was printed."""
        end = (
            "was stopped at its time limit"
            if self.returncode is None
            else (f"ended with code {self.returncode}")
        )
        parts = [f"The job {end} after {self.seconds:.0f} s: {' '.join(self.command)}"]
        for number, rank in enumerate(self.ranks):
            parts.append(_tail(f"rank {number} stdout", rank.stdout, lines))
            parts.append(_tail(f"rank {number} stderr", rank.stderr, lines))
        parts.append(_tail("torchrun", self.launcher_output, lines))
        return "\n".join(parts)


def _tail(title: str, text: str, lines: int) -> str:
    rows = text.rstrip().splitlines()
    return "\n".join([f"---- {title} ({len(rows)} lines) ----", *rows[-lines:]])


def unaveraged(losses: Sequence[tuple[int, str]]) -> dict[int, float]:
    """Undo Megatron's mean in the second of a run's printed losses.

    Args:
        losses: (iteration, printed loss) of one process from its start on, at every iteration.

    Returns:
        Each iteration's own loss. The second one has an error of up to 1.5 of the last printed
        digit, the others of half of it.
    """
    values = {iteration: float(loss) for iteration, loss in losses}
    if len(losses) > 1:
        first, second = losses[0][0], losses[1][0]
        values[second] = 2 * values[second] - values[first]
    return values


def read_scalars(directory: str | Path) -> dict[str, dict[int, float]]:
    """Read the scalars that ``--tensorboard-dir`` wrote.

    Returns:
        By name (``lm loss``, ``grad-norm``, ``lm loss validation``, ...) and iteration, in float32.
    """
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(directory), size_guidance={"scalars": 0}).Reload()
    return {
        name: {event.step: event.value for event in events.Scalars(name)}
        for name in events.Tags()["scalars"]
    }


_JOB = "MEGATRON_ASYNC_TEST_LOGS"
"""Variable that all processes of a job inherit: its log folder."""


def run_torchrun(
    nproc: int,
    argv: Sequence[str],
    *,
    timeout: float = 300,
    env: Mapping[str, str] | None = None,
    launcher: str | Sequence[str] = "plain",
    script: str | Path = PRETRAIN_GPT,
    check: bool = True,
    during: Callable[[subprocess.Popen[str], Path], None] | None = None,
) -> RunResult:
    """Run ``script`` on ``nproc`` CPU ranks of this machine, and wait for it.

    Args:
        nproc: number of ranks.
        argv: the script's arguments, see :func:`gpt_args`.
        timeout: seconds until the job is stopped. Each rank's stack goes to its stderr then.
        env: variables to add to the environment.
        launcher: a key of ``LAUNCHERS``, or torchrun arguments to put before the script.
        script: what to run.
        check: fail the test, with the ends of all logs, if the job fails or is stopped.
        during: called once the job is started, with torchrun's process and the logs' folder, see
            :func:`wait_for_iteration`.
    """
    before = LAUNCHERS[launcher] if isinstance(launcher, str) else launcher
    with tempfile.TemporaryDirectory(prefix="megatron-async-") as logs:
        command = [
            *(sys.executable, "-m", "torch.distributed.run"),
            # Rendezvous on a port that torchrun itself binds: no race between jobs for a free one.
            *("--standalone", "--local-addr", "localhost", "--nproc-per-node", str(nproc)),
            *("--log-dir", logs, "--redirects", "3"),
            *(*before, str(script), *argv),
        ]
        start = time.monotonic()
        process = subprocess.Popen(
            command,
            env={**_environment(), **(env or {}), _JOB: logs},
            cwd=REPOSITORY,
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
            ranks=[_rank_log(Path(logs), rank) for rank in range(nproc)],
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
    while not re.search(rf" iteration +{number}/", _rank_log(logs, rank).stdout):
        if time.monotonic() > stop:
            raise TimeoutError(f"no iteration {number}:\n{_rank_log(logs, rank).stderr[-4000:]}")
        time.sleep(0.05)


def run_python(code: str, *argv: str, path: Path | None = None) -> Any:
    """Run ``code`` in a process of its own; return the JSON that its last line prints."""
    environment = _environment()
    if path is not None:
        environment["PYTHONPATH"] += f"{os.pathsep}{path}"
    process = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", dedent(code), *argv],
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert process.returncode == 0, process.stdout + process.stderr
    return json.loads(process.stdout.splitlines()[-1])


def _environment() -> dict[str, str]:
    # A pytest that runs under torchrun itself would hand its own rank down.
    inherited = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("TORCHELASTIC_", "MASTER_"))
        and name not in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK")
    }
    path = os.pathsep.join(filter(None, [str(REPOSITORY), inherited.get("PYTHONPATH")]))
    return {
        "WANDB_MODE": "offline",
        "GLOO_SOCKET_IFNAME": "lo",
        **inherited,
        "OMP_NUM_THREADS": "1",
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",
        "PYTHONFAULTHANDLER": "1",
        "PYTHONPATH": path,
    }


def stop(process: subprocess.Popen[str]) -> str:
    """End torchrun and everything it started; return torchrun's output."""
    # torchrun puts each rank into a session of its own, out of reach of killpg.
    children = (
        psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
    )
    process.kill()
    for child in children:
        _signal(child, signal.SIGABRT)  # prints its stack: PYTHONFAULTHANDLER
    _, alive = psutil.wait_procs(children, timeout=5)
    for child in alive:
        _signal(child, signal.SIGKILL)
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


def _signal(process: psutil.Process, number: signal.Signals) -> None:
    try:
        process.send_signal(number)
    except psutil.NoSuchProcess:
        return


def _rank_log(logs: Path, rank: int) -> RankLog:
    def read(stream: str) -> str:
        # LOGS/<run>/attempt_0/<rank>/<stream>.log; absent if torchrun failed before it.
        files = sorted(logs.glob(f"*/attempt_*/{rank}/{stream}.log"))
        return "".join(file.read_text(encoding="utf-8", errors="replace") for file in files)

    return RankLog(stdout=read("stdout"), stderr=read("stderr"))
