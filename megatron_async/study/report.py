"""A study's report: Markdown, CSV files and pictures."""

import csv
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final

from megatron_async.study import plots
from megatron_async.study.analysis import Analysis, Estimate, Group
from megatron_async.study.config import Study
from megatron_async.study.results import CellResult

__all__ = ["MEASURES", "main_table", "markdown_table", "measured", "with_error", "write"]

_DASH = "–"
MEASURES: Final = ("loss", "loss_se", "gap", "gap_se", "recovery", "recovery_se")
"""Columns of CSV files."""


def write(study: Study, analysis: Analysis, directory: Path) -> list[Path]:
    """Write ``report.md``, ``summary.csv``, ``cells.csv``, ``curves.csv`` and the pictures.

    Args:
        study: what was run.
        analysis: of what is done so far; must hold a group with a result.
        directory: made if needed.

    Returns:
        The paths of what was written.
    """
    directory.mkdir(parents=True, exist_ok=True)
    tables = [directory / name for name in ("summary.csv", "cells.csv", "curves.csv")]
    _write_summary(analysis, tables[0])
    _write_cells(analysis, tables[1])
    _write_curves(analysis, tables[2])
    pictures = plots.write(analysis, directory)
    text = directory / "report.md"
    text.write_text(_markdown(study, analysis, pictures), encoding="utf-8")
    return [text, *tables, *pictures]


def main_table(analysis: Analysis) -> str:
    """A row for each optimizer, a column for each mode: loss, gap and recovery, as Markdown."""
    modes = list(dict.fromkeys(group.mode for group in analysis.groups))
    rows: dict[tuple[str, float | None], dict[str, Group]] = {}
    for group in analysis.groups:
        rows.setdefault(group.row, {})[group.mode] = group
    table = [
        [
            variant,
            "per mode" if rate is None else f"{rate:g}",
            *(_cell(groups.get(mode)) for mode in modes),
        ]
        for (variant, rate), groups in rows.items()
    ]
    return markdown_table(["optimizer", "learning rate", *modes], table)


def _cell(group: Group | None) -> str:
    """A loss, for example ``2.181 ±0.004 (+0.151, 55 % back)``."""
    if group is None:
        return ""
    if group.loss is None:
        return "diverged" if group.diverged else _DASH
    details = []
    if group.row[1] is None:
        details.append(f"rate {group.cell.learning_rate:g}")
    if group.gap is not None:
        details.append(f"{group.gap.value:+.4f}")
    if group.recovery is not None:
        details.append(f"{group.recovery.value:.0%} back")
    if group.diverged:
        details.append(f"{group.diverged} diverged")
    return with_error(group.loss) + (f" ({', '.join(details)})" if details else "")


def _markdown(study: Study, analysis: Analysis, pictures: Sequence[Path]) -> str:
    parts = [f"# Study {study.name}", study.description, _setting(study, analysis)]
    parts += ["## Final validation loss", main_table(analysis)]
    parts.append(
        "Mean over seeds ± its standard error; in brackets the gap to synchronous training and how "
        "much of the delay's gap the correction wins back."
    )
    parts += ["## Gap and recovery", _gap_table(analysis)]
    parts.append(
        "Differences are taken seed by seed, since runs with the same seed start from the same "
        "weights and see the same batches. The recovery is a ratio of two means, with the delta "
        "method's standard error; where the gap itself is within two standard errors of zero, it "
        "says nothing."
    )
    tuning = _tuning_table(analysis)
    if tuning:
        parts += ["## Learning rates", tuning]
        by = (
            "Runs of each mode with one seed; each optimizer has the best rate of each mode in it."
            if study.tuned_per_mode
            else "Synchronous runs with one seed; each optimizer keeps its best rate in all modes."
        )
        parts.append(f"{by} A rate at the edge of its grid may not be the best there is.")
    notes = _notes(analysis)
    if notes:
        parts += ["## Notes", "\n".join(f"- {note}" for note in notes)]
    parts += [f"![{picture.stem}]({picture.name})" for picture in pictures]
    return "\n\n".join(part for part in parts if part) + "\n"


def _setting(study: Study, analysis: Analysis) -> str:
    flags = study.flags
    known = {
        "layers": "num-layers",
        "hidden": "hidden-size",
        "sequence": "seq-length",
        "batch": "global-batch-size",
        "iterations": "train-iters",
    }
    shape = [f"{text} {flags[flag][0]}" for text, flag in known.items() if flag in flags]
    seeds = ", ".join(map(str, study.seeds))
    text = f"{', '.join(shape)}; dataset {study.dataset.kind}; seeds {seeds}."
    results = [result for group in analysis.groups for result in group.results.values()]
    if results:
        hours = sum(result.seconds for result in results) / 3600
        versions = ", ".join(f"{name} {number}" for name, number in results[0].versions.items())
        text += (
            f" {len(results)} runs, {hours:.1f} hours without those that chose rates. {versions}."
        )
    return text[:1].upper() + text[1:]


def _gap_table(analysis: Analysis) -> str:
    rows = [
        [
            group.cell.variant,
            f"{group.cell.learning_rate:g}",
            group.mode,
            with_error(group.gap, sign=True) if group.gap else _DASH,
            _recovery(group),
            str(len(group.losses)),
        ]
        for group in analysis.groups
        if not group.synchronous
    ]
    return markdown_table(["optimizer", "learning rate", "mode", "gap", "recovery", "seeds"], rows)


def _recovery(group: Group) -> str:
    if group.in_noise:
        return "gap within noise"
    if group.recovery is None:
        return _DASH
    error = group.recovery.error
    spread = "" if error is None else f" ± {error:.1%}"
    return f"{group.recovery.value:.1%}{spread}"


def _tuning_table(analysis: Analysis) -> str:
    tried = {name: choice for name, choice in analysis.choices.items() if choice and choice.losses}
    if not tried:
        return ""
    rows = []
    for name, choice in tried.items():
        losses = ", ".join(
            f"{rate:g}: {loss:.4f}" if loss < float("inf") else f"{rate:g}: diverged"
            for rate, loss in choice.losses.items()
        )
        best = _DASH if choice.learning_rate is None else f"{choice.learning_rate:g}"
        rows.append([name, best + (" (edge)" if choice.at_edge else ""), losses])
    return markdown_table(["optimizer", "chosen", "validation loss by rate"], rows)


def _notes(analysis: Analysis) -> list[str]:
    notes = [
        f"{group.cell.variant}, {group.mode}: {group.missing} of "
        f"{group.missing + len(group.results)} runs are not done."
        for group in analysis.groups
        if group.missing
    ]
    notes += [
        f"{group.cell.variant}, {group.mode}: {group.diverged} of {len(group.results)} runs "
        "diverged and are left out of the means."
        for group in analysis.groups
        if group.diverged
    ]
    for name, choice in analysis.choices.items():
        if choice is None:
            notes.append(f"{name}: no learning rate is chosen yet.")
        elif choice.learning_rate is None:
            notes.append(f"{name}: diverged at every learning rate.")
    return notes


def with_error(estimate: Estimate, *, sign: bool = False) -> str:
    """``2.1810 ± 0.0040``, or without the error of a single seed."""
    value = f"{estimate.value:+.4f}" if sign else f"{estimate.value:.4f}"
    return value if estimate.error is None else f"{value} ± {estimate.error:.4f}"


def markdown_table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Rows of as many cells as the head has, as Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _write_summary(analysis: Analysis, path: Path) -> None:
    head = ("optimizer", "momentum", "delay", "correction", "learning_rate", "seeds", "diverged")
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow([*head, *MEASURES])
        for group in analysis.groups:
            cell = group.cell
            row: list[object] = [
                cell.variant,
                "" if cell.momentum is None else f"{cell.momentum:g}",
            ]
            row += [cell.delay, cell.correction, f"{cell.learning_rate:g}"]
            row += [len(group.losses), group.diverged]
            writer.writerow([*row, *measured(group)])


def measured(group: Group) -> list[str]:
    """A group's numbers for the columns :data:`MEASURES`."""
    row = []
    for one in (group.loss, group.gap, group.recovery):
        row.append("" if one is None else f"{one.value:.6g}")
        row.append("" if one is None or one.error is None else f"{one.error:.6g}")
    return row


def _write_cells(analysis: Analysis, path: Path) -> None:
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(
            (
                *("optimizer", "momentum", "delay", "correction", "learning_rate", "seed"),
                *("status", "validation_loss", "seconds_per_iteration", "seconds", "name"),
            )
        )
        for group, seed, result in _runs(analysis):
            cell = group.cell
            loss = result.validation_loss
            pace = result.seconds_per_iteration
            writer.writerow(
                (
                    cell.variant,
                    "" if cell.momentum is None else f"{cell.momentum:g}",
                    cell.delay,
                    cell.correction,
                    f"{cell.learning_rate:g}",
                    seed,
                    result.status,
                    "" if loss is None else f"{loss:.7g}",
                    "" if pace is None else f"{pace:.4f}",
                    f"{result.seconds:.1f}",
                    result.name,
                )
            )


def _write_curves(analysis: Analysis, path: Path) -> None:
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(
            (
                "optimizer",
                "delay",
                "correction",
                "learning_rate",
                "seed",
                "iteration",
                "kind",
                "loss",
            )
        )
        for group, seed, result in _runs(analysis):
            cell = group.cell
            key = (cell.variant, cell.delay, cell.correction, f"{cell.learning_rate:g}", seed)
            for number, loss in enumerate(result.losses, start=1):
                if loss is not None:
                    writer.writerow((*key, number, "training", f"{loss:.7g}"))
            for number, loss in result.validation:
                writer.writerow((*key, number, "validation", f"{loss:.7g}"))


def _runs(analysis: Analysis) -> Iterable[tuple[Group, int, CellResult]]:
    for group in analysis.groups:
        for seed, result in sorted(group.results.items()):
            yield group, seed, result
