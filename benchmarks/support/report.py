"""Medians and their spread, tables, CSV files and bar charts."""

import csv
import random
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["Spread", "median_interval", "print_table", "progress", "write_bars", "write_csv"]


@dataclass(frozen=True)
class Spread:
    """The median of some values, the smallest and the largest."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread":
        return cls(statistics.median(values), min(values), max(values))

    def show(self, digits: int) -> str:
        if self.low == self.high:
            return f"{self.median:.{digits}f}"
        return f"{self.median:.{digits}f} ({self.low:.{digits}f} to {self.high:.{digits}f})"


def median_interval(values: Sequence[float], *, level: float = 0.95) -> Spread:
    """Return the median and its bootstrap confidence interval (percentiles of the medians of 10000
    resamples, always the same ones)."""
    rng = random.Random(0)
    medians = sorted(statistics.median(rng.choices(values, k=len(values))) for _ in range(10000))
    tail = (1 - level) / 2
    low = medians[int(tail * len(medians))]
    high = medians[min(int((1 - tail) * len(medians)), len(medians) - 1)]
    return Spread(statistics.median(values), low, high)


def progress(text: str) -> None:
    """One line about how far the benchmark is, kept out of the result."""
    print(text, file=sys.stderr, flush=True)


def print_table(rows: Sequence[Sequence[str]]) -> None:
    """Print rows, the first of them the head, in aligned columns."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for index, row in enumerate(rows):
        cells = [row[0].ljust(widths[0])]
        cells += [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
        print("  ".join(cells).rstrip())
        if index == 0:
            print("-" * len("  ".join(cells)))


def write_csv(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write rows that may lack columns."""
    columns = list(dict.fromkeys(name for row in rows for name in row))
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, columns, restval="")
        writer.writeheader()
        for row in rows:
            writer.writerow(
                {
                    name: f"{value:.6g}" if isinstance(value, float) else value
                    for name, value in row.items()
                }
            )
    progress(f"wrote {path}")


def write_bars(
    path: Path,
    *,
    title: str,
    unit: str,
    bars: Sequence[tuple[str, Spread]],
    line: float | None = None,
    line_label: str = "",
) -> None:
    """Draw one horizontal bar for each value, with its spread and a line to compare with."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axis = pyplot.subplots(figsize=(9, 1.2 + 0.5 * len(bars)))
    names = [name for name, _ in bars]
    values = [spread.median for _, spread in bars]
    below = [spread.median - spread.low for _, spread in bars]
    above = [spread.high - spread.median for _, spread in bars]
    axis.barh(names, values, xerr=[below, above], color="tab:blue", capsize=3)
    for index, (_, spread) in enumerate(bars):
        axis.annotate(
            f"{spread.median:.3f}",
            (spread.high, index),
            xytext=(5, 0),
            textcoords="offset points",
            va="center",
            fontsize=8,
        )
    if line is not None:
        axis.axvline(line, color="black", linestyle="--", linewidth=1, label=line_label)
        axis.legend(fontsize=8, loc="lower right")
    axis.invert_yaxis()
    axis.margins(x=0.12)
    axis.set_xlabel(unit)
    axis.set_title(title, fontsize=10)
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    pyplot.close(figure)
    progress(f"wrote {path}")
