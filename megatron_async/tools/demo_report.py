"""The demo's results as a table, a CSV file and a picture."""

import csv
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_async.tools.training_log import TrainingLog

__all__ = ["Result", "table", "time_to_loss", "verdict", "write"]

_WARM_UP = 3  # iterations that are left out of times: the first ones also set things up
_LAST = 10  # iterations whose mean training loss is "the loss" at some point of a run
_SPAN = 2  # a plotted point is the mean of so many iterations before, after, and its own


@dataclass(frozen=True, kw_only=True)
class Result:
    """A finished run.

    Attributes:
        name: of its files.
        title: for people.
        log: all of its log; has a final validation loss.
    """

    name: str
    title: str
    log: TrainingLog

    @property
    def validation_loss(self) -> float:
        """At the end of training, in nats a byte."""
        loss = self.log.final_validation_loss
        assert loss is not None
        return loss

    @property
    def seconds(self) -> float:
        """Median time of an iteration."""
        return statistics.median(one.seconds for one in self.log.iterations[_WARM_UP:])

    @property
    def bubble(self) -> float | None:
        """Mean share of the time that stages waited for each other, if it was logged."""
        shares = [one.bubble for one in self.log.iterations[_WARM_UP:] if one.bubble is not None]
        return statistics.mean(shares) if shares else None


def table(results: Sequence[Result]) -> str:
    """The results as aligned text, a line each."""
    rows = [("", "validation loss", "s/iteration", "bubble")]
    for result in results:
        bubble = "-" if result.bubble is None else f"{result.bubble:.1%}"
        rows.append(
            (result.title, f"{result.validation_loss:.4f}", f"{result.seconds:.3f}", bubble)
        )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(
            [row[0].ljust(widths[0])]
            + [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
        ).rstrip()
        for row in rows
    )


def verdict(results: Sequence[Result]) -> str:
    """What the delay cost, what the correction won back, and what is left with fresh-2bw.

    Args:
        results: synchronous; delayed by one step; that, corrected; fresh-2bw, corrected.
    """
    synchronous, delayed, corrected, fresh = (result.validation_loss for result in results)
    gap = delayed - synchronous
    if gap <= 0:
        return f"The one-step delay cost no loss in this run ({gap:+.4f})."
    recovered = (delayed - corrected) / gap
    return (
        f"The one-step delay cost {gap:.4f} of loss at this size; the correction won back "
        f"{recovered:.0%} of it; fresh-2bw with the correction is at {fresh - synchronous:+.4f}."
    )


def time_to_loss(results: Sequence[Result]) -> str:
    """How long each run needs to the training loss that the synchronous one ends with.

    The loss is the mean of ten iterations; an iteration takes a run its median time. Learning rates
    decay to the end, so that a run that lags behind may never get there.

    Args:
        results: the synchronous one first.
    """
    target = list(_recent(results[0]).values())[-1]
    parts = []
    for result in results:
        means = _recent(result)
        reached = next((number for number, mean in means.items() if mean <= target), None)
        time = "not reached" if reached is None else f"{reached * result.seconds:.1f} s"
        parts.append(f"{result.title} {time}")
    return f"Time to the synchronous run's last training loss, {target:.4f}: {', '.join(parts)}."


def write(results: Sequence[Result], folder: Path) -> list[Path]:
    """Write ``losses.csv`` and ``losses.png`` and return their paths."""
    paths = [folder / "losses.csv", folder / "losses.png"]
    _write_csv(results, paths[0])
    _write_png(results, paths[1])
    return paths


def _recent(result: Result) -> dict[int, float]:
    """Mean training losses of the last iterations, by the number of the iteration."""
    ones = result.log.iterations
    # A loss that is not a number is logged as none; nothing is below it.
    losses = [math.inf if one.loss is None else one.loss for one in ones]
    return {
        one.number: statistics.fmean(losses[max(0, index + 1 - _LAST) : index + 1])
        for index, one in enumerate(ones)
    }


def _write_csv(results: Sequence[Result], path: Path) -> None:
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(
            ("run", "iteration", "training_loss", "seconds", "bubble", "validation_loss")
        )
        for result in results:
            last = result.log.iterations[-1].number
            for one in result.log.iterations:
                at_end = f"{result.validation_loss:.7g}" if one.number == last else ""
                writer.writerow(
                    (
                        result.name,
                        one.number,
                        "" if one.loss is None else f"{one.loss:.7g}",
                        f"{one.seconds:.4f}",
                        "" if one.bubble is None else f"{one.bubble:.3f}",
                        at_end,
                    )
                )


def _write_png(results: Sequence[Result], path: Path) -> None:
    from matplotlib.figure import Figure  # without pyplot: no display is looked for

    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.add_subplot()
    for index, result in enumerate(results):
        points = [(one.number, one.loss) for one in result.log.iterations if one.loss is not None]
        numbers = [number for number, _ in points]
        losses = [loss for _, loss in points]
        means = [
            statistics.mean(losses[max(0, i - _SPAN) : i + _SPAN + 1]) for i in range(len(losses))
        ]
        color = f"C{index}"
        axes.plot(numbers, losses, color=color, alpha=0.25, linewidth=0.8)
        label = f"{result.title}: {result.validation_loss:.3f}"
        axes.plot(numbers, means, color=color, label=label)
        axes.plot(numbers[-1:], [result.validation_loss], "o", color=color)
    axes.set_xlabel("iteration")
    axes.set_ylabel("loss (nats a byte)")
    axes.set_title("Training loss; dots and numbers: validation loss at the end")
    axes.legend()
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=150)
