"""What a run of the check printed: losses, times, bubble, memory, the sanitizer's findings."""

import re
from dataclasses import dataclass, field

from megatron_async.tools.training_log import Iteration, TrainingLog

__all__ = ["MeasurementError", "Memory", "RunLog"]

_MEMORY = re.compile(
    r"\[Rank (\d+)\] \(after (\d+) iterations\) memory \(MB\) \| allocated: ([\d.]+) \| "
    r"max allocated: ([\d.]+)"
)
_RACE = "CSAN detected a possible data race"
_WARM_UP = 4  # iterations: kernels are chosen, allocators fill up


class MeasurementError(Exception):
    """The log does not have what is looked for; the message says what."""


@dataclass(frozen=True, kw_only=True)
class Memory:
    """What one rank's allocator reports behind an iteration, in bytes.

    Attributes:
        held: allocated at that moment.
        peak: allocated at most since the start.
    """

    held: float
    peak: float


@dataclass
class RunLog:
    """What the lines that were fed so far say.

    Attributes:
        name: of the run.
        races: what the sanitizer reported.
    """

    name: str
    races: int = 0
    _training: TrainingLog = field(default_factory=TrainingLog)
    _memory: dict[int, dict[int, Memory]] = field(default_factory=dict)

    def feed(self, line: str) -> None:
        """Take a line."""
        self._training.feed(line)
        self.races += line.count(_RACE)
        for rank, iteration, held, peak in _MEMORY.findall(line):
            found = Memory(held=float(held) * 2**20, peak=float(peak) * 2**20)
            self._memory.setdefault(int(iteration), {})[int(rank)] = found

    @property
    def iterations(self) -> int:
        """How many were logged."""
        return len(self._training.iterations)

    def losses(self) -> list[float]:
        """Each iteration's loss in nats.

        Raises:
            MeasurementError: there are none, or one is not a number.
        """
        if not self._training.iterations:
            raise MeasurementError(f"{self.name} logged no iteration")
        found = []
        for one in self._training.iterations:
            if one.loss is None:
                raise MeasurementError(f"{self.name}: no loss in iteration {one.number}")
            found.append(one.loss)
        return found

    def seconds(self) -> list[float]:
        """The times of the iterations in the steady state.

        Raises:
            MeasurementError: there are none.
        """
        return [one.seconds for one in self._steady()]

    def bubbles(self) -> list[float]:
        """The bubble's shares of the same iterations.

        Raises:
            MeasurementError: there are none.
        """
        found = [one.bubble for one in self._steady() if one.bubble is not None]
        if not found:
            raise MeasurementError(f"{self.name} logged no bubble")
        return found

    def memory(self, *, ranks: int) -> dict[int, Memory]:
        """The last report of memory before the last iteration, after which updates are drained.

        Args:
            ranks: how many there are.

        Raises:
            MeasurementError: a rank is missing.
        """
        within = [number for number in self._memory if number < self.iterations]
        found = self._memory[max(within)] if within else {}
        if found.keys() != set(range(ranks)):
            raise MeasurementError(
                f"{self.name}: memory of ranks {sorted(found)}, not of all {ranks}"
            )
        return found

    def _steady(self) -> list[Iteration]:
        found = self._training.iterations[_WARM_UP:-1]
        if not found:
            raise MeasurementError(f"{self.name} logged {self.iterations} iterations, too few")
        return found
