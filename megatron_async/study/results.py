"""What a finished run leaves behind: ``result.json`` in its folder."""

import json
import math
import os
import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Final, Self

from megatron_async.tools.training_log import TrainingLog

__all__ = ["DIVERGED", "FINISHED", "CellResult", "diverged", "read", "result_of", "write"]

FINISHED: Final = "finished"
DIVERGED: Final = "diverged"

_FILE = "result.json"
_WARM_UP = 3  # iterations that are left out of times: the first ones also set things up
_PLACE = re.compile(r"iteration (\d+)( on validation set)?")
# Megatron's checks of the loss and of the gradients, and this package's of the gradient norm.
_NOT_FINITE = re.compile(r"found (?:NaN|Inf) in local|the gradient norm is (?:nan|inf)\b")


@dataclass(frozen=True, kw_only=True)
class CellResult:
    """A run that came to its end, or that diverged: its loss or its gradient was no number.

    Attributes:
        name: of the cell.
        settings: the cell's, for those who read the file alone.
        command: all of the words that started it.
        status: :data:`FINISHED` or :data:`DIVERGED`.
        validation_loss: in nats a token, at the end of training; None if it diverged.
        losses: of each iteration; None where it was no number.
        validation: [iteration, loss] of each validation.
        seconds_per_iteration: median.
        seconds: from the last start to the end, set-up included.
        versions: of the packages that matter.
    """

    name: str
    settings: Mapping[str, Any]
    command: list[str]
    status: str
    validation_loss: float | None
    losses: list[float | None]
    validation: list[tuple[int, float]]
    seconds_per_iteration: float | None
    seconds: float
    versions: Mapping[str, str]

    @property
    def loss(self) -> float:
        """The final validation loss, infinite if the run diverged."""
        return math.inf if self.validation_loss is None else self.validation_loss

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Self:
        """Make a result of what :func:`write` wrote.

        Raises:
            TypeError, ValueError: it is something else.
        """
        if set(document) != {one.name for one in fields(cls)}:
            raise ValueError("these are not a result's keys")
        values = dict(document)
        values["validation"] = [(int(at), float(loss)) for at, loss in values["validation"]]
        return cls(**values)


def diverged(line: str) -> bool:
    """Whether a line of a run's output says that a loss or gradient is NaN or infinite."""
    return _NOT_FINITE.search(line) is not None


def result_of(
    logs: Sequence[TrainingLog],
    *,
    iterations: int,
    said_so: bool,
    name: str,
    settings: Mapping[str, Any],
    command: list[str],
    seconds: float,
    versions: Mapping[str, str],
) -> CellResult | None:
    """The result of a run that has ended; None if it is neither finished nor diverged.

    Args:
        logs: its own, after those of the starts from whose checkpoints it went on.
        iterations: how many it should have.
        said_so: whether a line of it was :func:`diverged`.
    """
    loss = logs[-1].final_validation_loss
    losses: dict[int, float | None] = {}
    validation: dict[int, float] = {}
    for log in logs:
        losses |= {one.number: one.loss for one in log.iterations}
        for place, value in log.validation.items():
            if match := _PLACE.fullmatch(place):
                validation[int(match[1])] = value
    complete = len(losses) == iterations and loss is not None
    if not complete and not said_so:
        return None
    finite = complete and loss is not None and math.isfinite(loss)
    times = [one.seconds for log in logs for one in log.iterations[_WARM_UP:]]
    return CellResult(
        name=name,
        settings=settings,
        command=command,
        status=FINISHED if finite else DIVERGED,
        validation_loss=loss if finite else None,
        losses=[
            value if value is not None and math.isfinite(value) else None
            for _, value in sorted(losses.items())
        ],
        validation=[(at, one) for at, one in sorted(validation.items()) if math.isfinite(one)],
        seconds_per_iteration=statistics.median(times) if times else None,
        seconds=seconds,
        versions=versions,
    )


def write(result: CellResult, folder: Path) -> None:
    """Write the file, whole or not at all."""
    partial = folder / f"{_FILE}.partial"
    with partial.open("w", encoding="utf-8") as file:
        json.dump(asdict(result), file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(folder / _FILE)


def read(folder: Path) -> CellResult | None:
    """Read the file; None if there is none, or it is no result."""
    try:
        document = json.loads((folder / _FILE).read_text(encoding="utf-8"))
        return CellResult.from_json(document)
    except (OSError, ValueError, TypeError, AttributeError):
        return None
