"""What a job printed and logged.

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
import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path

__all__ = ["Iteration", "RankLog", "RunResult", "read_rank_log", "read_scalars", "unaveraged"]


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

    @property
    def crashed(self) -> list[int]:
        """The ranks that died of a signal such as SIGABRT, be it after the last iteration.

        ``returncode`` does not tell once torchrun has passed on a signal.
        """
        words = ("Fatal Python error: ", "terminate called ")  # faulthandler's and C++'s
        return [n for n, rank in enumerate(self.ranks) if any(w in rank.stderr for w in words)]

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


def read_rank_log(logs: Path, rank: int) -> RankLog:
    """Read what a rank has printed so far.

    Args:
        logs: torchrun's ``--log-dir``.
        rank: the rank.
    """

    def read(stream: str) -> str:
        # LOGS/<run>/attempt_0/<rank>/<stream>.log; absent if torchrun failed before it.
        files = sorted(logs.glob(f"*/attempt_*/{rank}/{stream}.log"))
        return "".join(file.read_text(encoding="utf-8", errors="replace") for file in files)

    return RankLog(stdout=read("stdout"), stderr=read("stderr"))
