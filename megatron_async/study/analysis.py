"""What the results of a study say: means over seeds, gaps to synchronous training, recovery.

Runs with the same seed start from the same weights and see the same batches, so differences are
taken seed by seed. With l the final validation losses, over the seeds that have all of them:

    gap      = mean(l_mode - l_synchronous)
    recovery = mean(l_delayed - l_corrected) / mean(l_delayed - l_synchronous)

Standard errors are those of a mean over n seeds, s / sqrt(n); that of the recovery, a ratio of two
means of pairs, is the delta method's.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from megatron_async.study.cells import Cell, Choice, choose, plan, tuned_modes
from megatron_async.study.config import NONE, Mode, Study
from megatron_async.study.delay_shares import delay_shares
from megatron_async.study.results import DIVERGED, CellResult

__all__ = ["Analysis", "Estimate", "Group", "analyse", "mean_of", "ratio_of"]


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """A mean over seeds.

    Attributes:
        value: the mean, or the ratio of two.
        error: its standard error; None with a single seed.
        count: number of seeds.
    """

    value: float
    error: float | None
    count: int


@dataclass(frozen=True, kw_only=True)
class Group:
    """The runs that differ by their seeds alone.

    Attributes:
        cell: one of them.
        results: of those that are done, by seed.
        missing: how many are not.
        row: what it is compared with stands in the same row of a table: the optimizer, and the
            learning rate, which is None where each mode has its own.
        loss: of the runs that did not diverge.
        gap: to synchronous training; None for that itself, and where there is none to compare with.
        recovery: of the gap of the same delay without a correction, as a fraction; None where
            there is nothing to recover.
        in_noise: whether there is no recovery because that gap is within two standard errors of
            zero.
    """

    cell: Cell
    results: Mapping[int, CellResult]
    missing: int
    row: tuple[str, float | None]
    loss: Estimate | None
    gap: Estimate | None = None
    recovery: Estimate | None = None
    in_noise: bool = False

    @property
    def diverged(self) -> int:
        """How many runs diverged."""
        return sum(one.status == DIVERGED for one in self.results.values())

    @property
    def synchronous(self) -> bool:
        """Whether there is no delay."""
        return self.cell.delay == NONE

    @property
    def mode(self) -> str:
        """Delay and correction, for people."""
        return _mode_name(self.cell.delay, self.cell.correction)

    @property
    def losses(self) -> dict[int, float]:
        """Final validation losses by seed, diverged runs left out."""
        return {
            seed: one.validation_loss
            for seed, one in sorted(self.results.items())
            if one.validation_loss is not None
        }


@dataclass(frozen=True, kw_only=True)
class Analysis:
    """All groups of a study, in its order, and the learning rates of its optimizers.

    Attributes:
        choices: by variant, or by ``VARIANT, MODE`` where each mode has its own; None where the
            runs that choose are not all done.
        delay_shares: mean delay in steps by the name of the delay, where flags tell it.
    """

    groups: Sequence[Group]
    choices: Mapping[str, Choice | None]
    delay_shares: Mapping[str, float] = field(default_factory=dict)

    def of(
        self, variant: str, delay: str, correction: str, learning_rate: float | None = None
    ) -> Group | None:
        """A group by its settings; any learning rate, unless one is given."""
        for group in self.groups:
            cell = group.cell
            if (cell.variant, cell.delay, cell.correction) == (variant, delay, correction) and (
                learning_rate is None or cell.learning_rate == learning_rate
            ):
                return group
        return None


def _mode_name(delay: str, correction: str) -> str:
    if delay == NONE:
        return "synchronous"
    return delay if correction == NONE else f"{delay} + {correction}"


def mean_of(values: Sequence[float]) -> Estimate | None:
    """The mean and its standard error; None of no values."""
    if not values:
        return None
    error = None
    if len(values) > 1:
        error = statistics.stdev(values) / math.sqrt(len(values))
    return Estimate(value=statistics.fmean(values), error=error, count=len(values))


def ratio_of(numerators: Sequence[float], denominators: Sequence[float]) -> Estimate | None:
    """The ratio of the means of pairs, with the delta method's standard error.

    Returns:
        None if the denominator's mean is not positive.
    """
    count = len(denominators)
    if not count or (below := statistics.fmean(denominators)) <= 0:
        return None
    ratio = statistics.fmean(numerators) / below
    error = None
    if count > 1:
        rest = [up - ratio * down for up, down in zip(numerators, denominators, strict=True)]
        error = math.sqrt(sum(one**2 for one in rest) / (count * (count - 1))) / below
    return Estimate(value=ratio, error=error, count=count)


def analyse(
    study: Study, results: Mapping[str, CellResult], *, identity: Sequence[str]
) -> Analysis:
    """Sort a study's results into groups and compare them.

    Runs that only chose a learning rate make no group.
    """
    choices = {
        _choice_name(variant.name, mode): choose(
            study, variant, results, identity=identity, mode=mode
        )
        for variant in study.variants
        for mode in tuned_modes(study, variant)
    }
    cells: dict[tuple[str, str, str, float], list[Cell]] = {}
    for cell in plan(study, results, identity=identity):
        choice = choices[_choice_name(cell.variant, cell if study.tuned_per_mode else None)]
        chosen = None if choice is None else choice.learning_rate
        if cell.seed not in study.seeds or (
            study.tuning_seed is not None and cell.learning_rate != chosen
        ):
            continue
        key = (cell.variant, cell.delay, cell.correction, cell.learning_rate)
        cells.setdefault(key, []).append(cell)
    # The order of the configuration; the plan's is by seed.
    order = {variant.name: index for index, variant in enumerate(study.variants)}
    modes = {(mode.delay, mode.correction): index for index, mode in enumerate(study.modes)}
    keys = sorted(
        (key for key in cells if (key[1], key[2]) in modes),
        key=lambda key: (
            order[key[0]],
            0.0 if study.tuned_per_mode else key[3],
            modes[key[1], key[2]],
        ),
    )
    plain: dict[_Key, Group] = {}
    for key in keys:
        row = (key[0], None if study.tuned_per_mode else key[3])
        plain[row, key[1], key[2]] = _group(cells[key], results, row=row)
    return Analysis(
        groups=[_compared(key, plain) for key in plain],
        choices=choices,
        delay_shares=delay_shares(study),
    )


type _Key = tuple[tuple[str, float | None], str, str]
"""Row, delay and correction."""


def _choice_name(variant: str, of: Mode | Cell | None) -> str:
    return variant if of is None else f"{variant}, {_mode_name(of.delay, of.correction)}"


def _group(
    cells: Sequence[Cell], results: Mapping[str, CellResult], *, row: tuple[str, float | None]
) -> Group:
    done = {cell.seed: results[cell.name] for cell in cells if cell.name in results}
    losses = [one.validation_loss for one in done.values() if one.validation_loss is not None]
    return Group(
        cell=cells[0],
        results=done,
        missing=len(cells) - len(done),
        row=row,
        loss=mean_of(losses),
    )


def _compared(key: _Key, groups: Mapping[_Key, Group]) -> Group:
    row, delay, correction = key
    group = groups[key]
    synchronous = groups.get((row, NONE, NONE))
    if group.synchronous or synchronous is None:
        return group
    own, base = group.losses, synchronous.losses
    gap = mean_of([own[seed] - base[seed] for seed in own if seed in base])
    recovery, in_noise = None, False
    delayed = groups.get((row, delay, NONE))
    if correction != NONE and delayed is not None:
        plain = delayed.losses
        seeds = [seed for seed in own if seed in base and seed in plain]
        lost = [plain[seed] - base[seed] for seed in seeds]
        whole = mean_of(lost)
        in_noise = whole is not None and whole.error is not None and whole.value < 2 * whole.error
        if not in_noise:
            recovery = ratio_of([plain[seed] - own[seed] for seed in seeds], lost)
    return replace(group, gap=gap, recovery=recovery, in_noise=in_noise)
