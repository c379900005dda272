"""A study's pictures: curves, gaps, recovery, gaps by delay, loss by momentum and learning rate."""

import statistics
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

from megatron_async.study.analysis import Analysis, Estimate, Group
from megatron_async.study.config import NONE

__all__ = ["draw_estimates", "mark_places", "panels", "write"]

_POINTS = 60  # a curve's points are means over so many parts of the run, at most
_PANEL = (4.2, 3.2)  # inches
_ERRORS = "; bars: standard error over seeds"
_NO_GAP = Estimate(value=0.0, error=None, count=0)


def write(analysis: Analysis, directory: Path) -> list[Path]:
    """Write those pictures that the results allow and return their paths."""
    found = []
    for name, draw in (
        ("curves", _curves),
        ("gaps", _gaps),
        ("recovery", _recovery),
        ("delays", _delays),
        ("momentum", _momentum),
        ("learning-rates", _learning_rates),
    ):
        figure = draw(analysis)
        if figure is not None:
            path = directory / f"{name}.png"
            figure.savefig(path, dpi=150)
            found.append(path)
    return found


def _new_figure(width: float, height: float) -> Any:
    from matplotlib.figure import Figure  # without pyplot: no display is looked for

    return Figure(figsize=(width, height), layout="constrained")


def panels(count: int) -> tuple[Any, list[Any]]:
    """A figure of so many panels, three in a row at most, and their axes."""
    columns = min(3, count)
    rows = -(-count // columns)
    figure = _new_figure(columns * _PANEL[0], rows * _PANEL[1])
    axes = [figure.add_subplot(rows, columns, index + 1) for index in range(count)]
    return figure, axes


def draw_estimates(axes: Any, points: Sequence[tuple[float, Estimate]], **style: Any) -> None:
    """A line through estimates, with their standard errors.

    Args:
        axes: where.
        points: the places, and what stands there.
        style: of matplotlib's ``errorbar``: color, label, linestyle.
    """
    axes.errorbar(
        [place for place, _ in points],
        [estimate.value for _, estimate in points],
        yerr=[estimate.error or 0.0 for _, estimate in points],
        marker="o",
        markersize=3,
        capsize=2,
        **style,
    )


def mark_places(axes: Any, places: Collection[float], *, scale: str) -> None:
    """Have ticks where there are points, and nowhere else."""
    axes.set_xscale(scale)
    axes.set_xticks(sorted(places), [f"{place:g}" for place in sorted(places)])
    axes.minorticks_off()


def _title(variant: str, rate: float | None) -> str:
    return variant if rate is None else f"{variant}, learning rate {rate:g}"


def _modes(groups: Sequence[Group]) -> list[str]:
    return list(dict.fromkeys(group.mode for group in groups))


def _curves(analysis: Analysis) -> Any:
    """Training loss by iteration: the mean over seeds, and the band from lowest to highest."""
    groups = [
        group
        for group in analysis.groups
        if group.losses and all(_smooth(group.results[seed].losses) for seed in group.losses)
    ]
    rows = list(dict.fromkeys(group.row for group in groups))
    if not rows:
        return None
    colors = {mode: f"C{index}" for index, mode in enumerate(_modes(groups))}
    figure, all_axes = panels(len(rows))
    for axes, (variant, rate) in zip(all_axes, rows, strict=True):
        for group in groups:
            if group.row != (variant, rate):
                continue
            curves = [_smooth(group.results[seed].losses) for seed in group.losses]
            shared = min(len(curve) for curve in curves)
            columns = [[curve[i][1] for curve in curves] for i in range(shared)]
            at = [curves[0][i][0] for i in range(shared)]
            color = colors[group.mode]
            axes.plot(at, [statistics.fmean(one) for one in columns], color=color, label=group.mode)
            axes.fill_between(
                at,
                [min(one) for one in columns],
                [max(one) for one in columns],
                color=color,
                alpha=0.2,
                linewidth=0,
            )
            assert group.loss is not None
            axes.plot(at[-1:], [group.loss.value], "o", color=color, markersize=4)
        _zoom(axes, [group for group in groups if group.cell.variant == variant])
        axes.set_title(_title(variant, rate), fontsize=9)
        axes.grid(alpha=0.3)
        axes.set_xlabel("iteration")
    all_axes[0].set_ylabel("loss (nats a token)")
    all_axes[0].legend(fontsize=7)
    figure.suptitle("Training loss; dots: validation loss at the end", fontsize=10)
    return figure


def _smooth(losses: Sequence[float | None]) -> list[tuple[float, float]]:
    """Means over equal parts of a run: (iteration, loss), at most :data:`_POINTS`."""
    width = max(1, -(-len(losses) // _POINTS))
    points = []
    for start in range(0, len(losses), width):
        part = [loss for loss in losses[start : start + width] if loss is not None]
        if part:
            points.append((start + (len(part) + 1) / 2, statistics.fmean(part)))
    return points


def _zoom(axes: Any, groups: Sequence[Group]) -> None:
    """Leave out the fall from the first losses, which hides all differences."""
    ends = [loss for group in groups for loss in group.losses.values()]
    curves = [_smooth(group.results[seed].losses) for group in groups for seed in group.losses]
    middles = [points[len(points) // 4][1] for points in curves]
    low = min([*ends, *(points[-1][1] for points in curves)])
    high = max([*ends, *middles])
    margin = 0.1 * (high - low) or 0.1
    axes.set_ylim(low - margin, high + margin)


def _bars(
    analysis: Analysis, value: Callable[[Group], Estimate | None], label: str, title: str
) -> Any:
    """Horizontal bars, a block for each optimizer and a colour for each mode."""
    groups = [group for group in analysis.groups if value(group) is not None]
    if not groups:
        return None
    modes = _modes(groups)
    several = len({group.row[1] for group in groups}) > 1
    rows = list(dict.fromkeys(group.row for group in groups))
    legend = -(-len(modes) // 2)  # rows of it, below the axes: bars may be anywhere in them
    figure = _new_figure(7.5, 1.2 + 0.2 * legend + 0.28 * len(rows) * (len(modes) + 1))
    axes = figure.add_subplot()
    height = 0.8 / len(modes)
    with_errors = False
    for index, mode in enumerate(modes):
        places, lengths, errors = [], [], []
        for group in groups:
            estimate = value(group)
            if group.mode == mode and estimate is not None:
                places.append(rows.index(group.row) - 0.4 + (index + 0.5) * height)
                lengths.append(estimate.value)
                errors.append(estimate.error or 0.0)
        with_errors = with_errors or any(errors)
        axes.barh(
            places,
            lengths,
            height=0.9 * height,
            xerr=errors if any(errors) else None,
            capsize=2,
            color=f"C{index + 1}",
            label=mode,
            error_kw={"linewidth": 0.8},
        )
    axes.axvline(0, color="black", linewidth=0.8)
    axes.set_yticks(
        range(len(rows)),
        [
            variant if rate is None or not several else f"{variant}, {rate:g}"
            for variant, rate in rows
        ],
    )
    axes.invert_yaxis()
    axes.set_xlabel(label)
    axes.set_title(title + (_ERRORS if with_errors else ""), fontsize=10)
    axes.grid(alpha=0.3, axis="x")
    figure.legend(fontsize=8, loc="outside lower center", ncols=2)
    return figure


def _gaps(analysis: Analysis) -> Any:
    return _bars(
        analysis,
        lambda group: group.gap,
        "final validation loss above synchronous (nats a token)",
        "What the delay costs",
    )


def _recovery(analysis: Analysis) -> Any:
    def in_percent(group: Group) -> Estimate | None:
        found = group.recovery
        if found is None:
            return None
        error = None if found.error is None else 100 * found.error
        return Estimate(value=100 * found.value, error=error, count=found.count)

    return _bars(
        analysis,
        in_percent,
        "percent of the delay's gap",
        "What the correction wins back",
    )


def _delays(analysis: Analysis) -> Any:
    """Gap against the mean delay in steps: a panel for each optimizer, a line for each correction.

    Synchronous training is the point at zero; a delay whose stages differ has no place here.
    """
    shares = analysis.delay_shares
    lines: dict[tuple[str, float | None], dict[str, list[tuple[float, Estimate]]]] = {}
    for group in sorted(analysis.groups, key=lambda group: shares.get(group.cell.delay, 0.0)):
        if group.gap is not None and group.cell.delay in shares:
            panel = lines.setdefault(group.row, {})
            point = (shares[group.cell.delay], group.gap)
            panel.setdefault(group.cell.correction, []).append(point)
    lines = {
        key: {name: points for name, points in panel.items() if len({x for x, _ in points}) > 1}
        for key, panel in lines.items()
    }
    lines = {key: panel for key, panel in lines.items() if panel}
    if not lines:
        return None
    names = list(dict.fromkeys(name for panel in lines.values() for name in panel))
    figure, all_axes = panels(len(lines))
    for axes, ((variant, rate), panel) in zip(all_axes, lines.items(), strict=True):
        for name, points in panel.items():
            draw_estimates(
                axes,
                [(0.0, _NO_GAP), *points],
                color=f"C{names.index(name)}",
                label="no correction" if name == NONE else name,
            )
        axes.axhline(0, color="black", linewidth=0.8)
        axes.set_title(_title(variant, rate), fontsize=9)
        axes.set_xlabel("mean delay (steps)")
        axes.grid(alpha=0.3)
    all_axes[0].set_ylabel("loss above synchronous (nats a token)")
    all_axes[0].legend(fontsize=7)
    with_errors = any(
        estimate.error
        for panel in lines.values()
        for points in panel.values()
        for _, estimate in points
    )
    figure.suptitle(
        "What a delay costs, by its size" + (_ERRORS if with_errors else ""), fontsize=10
    )
    return figure


def _momentum(analysis: Analysis) -> Any:
    """Loss, and gap to synchronous training, against momentum: a panel for each optimizer."""
    groups = [g for g in analysis.groups if g.cell.momentum is not None and g.loss is not None]
    settings = {group.row for group in groups}
    one_rate = len(settings) == len({variant for variant, _ in settings})
    return _against(
        groups,
        lambda group: group.cell.momentum or 0.0,
        # A rate that was chosen for each momentum does not set lines apart.
        key=lambda group: 0.0 if one_rate else group.cell.learning_rate,
        label="momentum",
        scale="linear",
    )


def _learning_rates(analysis: Analysis) -> Any:
    """Loss against learning rate, where every rate was run."""
    groups = [group for group in analysis.groups if group.loss is not None]
    return _against(
        groups,
        lambda group: group.cell.learning_rate,
        key=lambda group: group.cell.momentum or 0.0,
        label="learning rate",
        scale="log",
    )


def _against(
    groups: Sequence[Group],
    at: Callable[[Group], float],
    *,
    key: Callable[[Group], float],
    label: str,
    scale: str,
) -> Any:
    """Loss against a number: a panel for each optimizer, a line for each mode and key."""
    optimizers = [
        name
        for name in dict.fromkeys(group.cell.optimizer for group in groups)
        if len({at(group) for group in groups if group.cell.optimizer == name}) > 1
    ]
    lines: dict[tuple[str, str, float], list[Group]] = {}
    for group in groups:
        if group.cell.optimizer in optimizers:
            lines.setdefault((group.cell.optimizer, group.mode, key(group)), []).append(group)
    lines = {name: line for name, line in lines.items() if len(line) > 1}
    optimizers = [name for name in optimizers if any(line[0] == name for line in lines)]
    if not optimizers:
        return None
    colors = {mode: f"C{index}" for index, mode in enumerate(_modes(groups))}
    figure, all_axes = panels(len(optimizers))
    for axes, optimizer in zip(all_axes, optimizers, strict=True):
        keys = {name[2] for name in lines if name[0] == optimizer}
        for (name, mode, one), line in lines.items():
            if name != optimizer:
                continue
            line.sort(key=at)
            draw_estimates(
                axes,
                [(at(group), group.loss) for group in line if group.loss is not None],
                color=colors[mode],
                label=mode if len(keys) == 1 else f"{mode}, {one:g}",
            )
        mark_places(
            axes,
            {at(one) for each, line in lines.items() if each[0] == optimizer for one in line},
            scale=scale,
        )
        axes.set_title(optimizer, fontsize=9)
        axes.set_xlabel(label)
        axes.grid(alpha=0.3)
    all_axes[0].set_ylabel("final validation loss (nats a token)")
    all_axes[0].legend(fontsize=7)
    return figure
