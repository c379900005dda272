"""Gap and recovery of several studies against a flag in which they differ.

``megatron-async study against FLAG DIR... --output OUT``: the studies in the folders are one study
run with several values of FLAG, such as the number of iterations or the batch size. Each value has
its own synchronous runs, so each point is a gap between runs that ended, with their whole schedule
of the learning rate.
"""

import csv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_async.study import runner
from megatron_async.study.analysis import Group, analyse
from megatron_async.study.config import NONE, ConfigError, load
from megatron_async.study.plots import draw_estimates, mark_places, panels
from megatron_async.study.report import MEASURES, markdown_table, measured, with_error

__all__ = ["Series", "read", "write"]


@dataclass(frozen=True, kw_only=True)
class Series:
    """One optimizer in one mode, at the values of a flag.

    Attributes:
        variant: the optimizer.
        mode: delay and correction, for people.
        groups: by the flag's value, rising.
    """

    variant: str
    mode: str
    groups: Mapping[float, Group]


def read(flag: str, directories: Sequence[Path]) -> list[Series]:
    """Read the results of studies.

    Args:
        flag: without dashes in front.
        directories: the studies' ``--output``.

    Raises:
        ConfigError: a folder holds no study, its study has no number for the flag, two have the
            same number, or a study runs every learning rate.
    """
    found: dict[tuple[str, str], dict[float, Group]] = {}
    places: dict[float, Path] = {}
    for directory in directories:
        path = directory / runner.CONFIG_FILE
        if not path.is_file():
            raise ConfigError(f"{directory} holds no study: there is no {path}.")
        study = load(str(path))
        if study.tuning_seed is None:
            raise ConfigError(f"{directory}: its study runs every learning rate; set tuning.")
        value = _value(flag, study.flags, directory)
        if value in places:
            raise ConfigError(f"{directory} and {places[value]} have the same {flag}, {value:g}.")
        places[value] = directory
        identity = (directory / runner.DATASET_FILE).read_text(encoding="utf-8")
        analysis = analyse(
            study, runner.read_results(directory), identity=runner.identity_of(study, identity)
        )
        for group in analysis.groups:
            found.setdefault((group.cell.variant, group.mode), {})[value] = group
    return [
        Series(variant=variant, mode=mode, groups=dict(sorted(groups.items())))
        for (variant, mode), groups in found.items()
    ]


def _value(flag: str, flags: Mapping[str, Sequence[str]], directory: Path) -> float:
    words = flags.get(flag, ())
    try:
        (word,) = words
        return float(word)
    except ValueError:
        raise ConfigError(f"{directory}: flags.{flag} of its study is no number.") from None


def write(flag: str, series: Sequence[Series], directory: Path) -> list[Path]:
    """Write ``against-FLAG.md``, ``.csv`` and, where there are gaps, ``.png``.

    Args:
        flag: see :func:`read`.
        series: of :func:`read`.
        directory: made if needed.

    Returns:
        The paths of what was written.
    """
    directory.mkdir(parents=True, exist_ok=True)
    stem = f"against-{flag}"
    text, table = directory / f"{stem}.md", directory / f"{stem}.csv"
    text.write_text(_markdown(flag, series), encoding="utf-8")
    _write_csv(flag, series, table)
    figure = _figure(flag, series)
    if figure is None:
        return [text, table]
    picture = directory / f"{stem}.png"
    figure.savefig(picture, dpi=150)
    return [text, table, picture]


def _markdown(flag: str, series: Sequence[Series]) -> str:
    values = sorted({value for one in series for value in one.groups})
    rows = [
        [one.variant, one.mode, *(_cell(one.groups.get(value)) for value in values)]
        for one in series
    ]
    head = ["optimizer", "mode", *(f"{flag} {value:g}" for value in values)]
    return (
        f"# Against {flag}\n\n{markdown_table(head, rows)}\n\n"
        "Final validation loss of synchronous training; of the other modes the gap to it, "
        "± its standard error over seeds, and how much of the delay's gap a correction wins back.\n"
    )


def _cell(group: Group | None) -> str:
    if group is None or group.loss is None:
        return "–"
    if group.gap is None:
        return with_error(group.loss)
    back = "" if group.recovery is None else f", {group.recovery.value:.0%} back"
    return with_error(group.gap, sign=True) + back


def _write_csv(flag: str, series: Sequence[Series], path: Path) -> None:
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        head = ("optimizer", "delay", "correction", flag, "learning_rate", "seeds")
        writer.writerow([*head, *MEASURES])
        for one in series:
            for value, group in one.groups.items():
                cell = group.cell
                row: list[object] = [one.variant, cell.delay, cell.correction, f"{value:g}"]
                row += [f"{cell.learning_rate:g}", len(group.losses)]
                writer.writerow([*row, *measured(group)])


def _figure(flag: str, series: Sequence[Series]) -> Any:
    """Gap against the flag: a panel for each optimizer, a line for each mode."""
    lines = [
        (one, {value: group.gap for value, group in one.groups.items() if group.gap is not None})
        for one in series
    ]
    lines = [(one, gaps) for one, gaps in lines if gaps]
    variants = list(dict.fromkeys(one.variant for one, _ in lines))
    if not variants:
        return None
    modes = list(dict.fromkeys(one.mode for one, _ in lines))
    figure, all_axes = panels(len(variants))
    for axes, variant in zip(all_axes, variants, strict=True):
        for one, gaps in lines:
            if one.variant != variant:
                continue
            corrected = any(group.cell.correction != NONE for group in one.groups.values())
            draw_estimates(
                axes,
                list(gaps.items()),
                color=f"C{modes.index(one.mode)}",
                linestyle="--" if corrected else "-",
                label=one.mode,
            )
        places = {value for one, gaps in lines if one.variant == variant for value in gaps}
        mark_places(axes, places, scale="log")
        axes.axhline(0, color="black", linewidth=0.8)
        axes.set_title(variant, fontsize=9)
        axes.set_xlabel(flag)
        axes.grid(alpha=0.3)
    all_axes[0].set_ylabel("gap (nats a token)")
    all_axes[0].legend(fontsize=7)
    figure.suptitle("Final validation loss above synchronous training", fontsize=10)
    return figure
