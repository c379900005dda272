"""Reads Megatron's training log: losses, times, the pipeline bubble, validation."""

import re
from dataclasses import dataclass, field

__all__ = ["Iteration", "TrainingLog"]

_ITERATION = re.compile(r" iteration +(\d+)/ *\d+ \|(.*)")
_VALIDATION = re.compile(r" validation loss at (.+?) \| lm loss value: (\S+)")


@dataclass(frozen=True, kw_only=True)
class Iteration:
    """One line of ``--log-interval 1``.

    Attributes:
        number: counted from 1.
        loss: the iteration's own training loss in nats; None if it was not a number.
        seconds: the time it took.
        bubble: the share of it that stages waited for each other (``--log-pipeline-bubble``), if
            the line has it.
    """

    number: int
    loss: float | None
    seconds: float
    bubble: float | None


@dataclass
class TrainingLog:
    """What the lines that were fed so far say.

    Attributes:
        iterations: one for each line, in order. Needs ``--log-interval 1``.
        validation: the loss by place, such as ``iteration 50 on validation set``.
    """

    iterations: list[Iteration] = field(default_factory=list)
    validation: dict[str, float] = field(default_factory=dict)

    def feed(self, line: str) -> bool:
        """Take a line of the log; return whether it was one that counts."""
        if match := _ITERATION.search(line):
            fields = (part.rpartition(":") for part in match[2].split("|"))
            values = {name.strip(): value.strip() for name, colon, value in fields if colon}
            self._add(int(match[1]), values)
            return True
        if match := _VALIDATION.search(line):
            self.validation[match[1]] = float(match[2])
            return True
        return False

    @property
    def final_validation_loss(self) -> float | None:
        """The loss on the validation set at the end of training, if it was reached."""
        ends = [loss for place, loss in self.validation.items() if "validation set" in place]
        return ends[-1] if ends else None

    def _add(self, number: int, values: dict[str, str]) -> None:
        loss = float(values["lm loss"]) if "lm loss" in values else None
        if len(self.iterations) == 1 and loss is not None:
            # Megatron does not reset its sum after the first line of a process, so the second one
            # has the mean of two losses (training_log in megatron/training/training.py).
            first = self.iterations[0].loss
            loss = None if first is None else 2 * loss - first
        bubble = values.get("bubble")
        self.iterations.append(
            Iteration(
                number=number,
                loss=loss,
                seconds=float(values["elapsed time per iteration (ms)"]) / 1e3,
                bubble=None if bubble is None else float(bubble.rstrip("%")) / 100,
            )
        )
