"""The cells of a study: which runs it takes, and which learning rate each optimizer gets.

A learning rate is chosen by synchronous runs with one seed, and then serves all modes and seeds of
that optimizer, as in the paper; or each mode chooses its own, by runs in that mode. What is to be
run depends on results so far, so :func:`plan` is called again after every run.
"""

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from megatron_async.study.config import NONE, Flags, Mode, Study, Variant, flag_words
from megatron_async.study.results import CellResult

__all__ = [
    "Cell",
    "Choice",
    "choose",
    "count",
    "modes_of",
    "plan",
    "tuned_modes",
    "tuning_cells",
]


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One training run.

    Attributes:
        variant: the optimizer's name in results.
        optimizer: its key in the configuration.
        momentum: see :class:`~megatron_async.study.config.Variant`.
        delay, correction: names.
        learning_rate: the peak.
        seed: of the initial weights and of the order of the data.
        flags: all of Megatron's and ours, the dataset's path left out.
        identity: what else the result depends on: ranks, device, script and dataset.
    """

    variant: str
    optimizer: str
    momentum: float | None
    delay: str
    correction: str
    learning_rate: float
    seed: int
    flags: Flags
    identity: tuple[str, ...]

    @cached_property
    def name(self) -> str:
        """Of its folder: the settings, and a hash of the whole command.

        The order of flags does not count, nor does where the folder of the study lies.
        """
        whole = json.dumps([sorted(self.flags.items()), self.identity])
        digest = hashlib.sha256(whole.encode()).hexdigest()[:10]
        return f"{self.label.replace(' ', '_')}-{digest}"

    @property
    def label(self) -> str:
        """For people."""
        parts = [self.variant, "synchronous" if self.delay == NONE else self.delay]
        if self.correction != NONE:
            parts.append(self.correction)
        return " ".join([*parts, f"lr{self.learning_rate:g}", f"seed{self.seed}"])

    @property
    def words(self) -> list[str]:
        """The training script's arguments but for the dataset."""
        return flag_words(self.flags)


@dataclass(frozen=True, kw_only=True)
class Choice:
    """The learning rate of an optimizer.

    Attributes:
        losses: the final validation loss by learning rate; infinite where the run diverged. Empty
            if there was only one rate.
        learning_rate: the best one; None if none was any good.
    """

    losses: Mapping[float, float]
    learning_rate: float | None

    @property
    def at_edge(self) -> bool:
        """Whether a better rate may lie outside of those that were tried."""
        return len(self.losses) > 1 and self.learning_rate in (min(self.losses), max(self.losses))


def plan(study: Study, results: Mapping[str, CellResult], *, identity: Sequence[str]) -> list[Cell]:
    """The cells that are known to be needed, in the order to run them.

    Args:
        study: what to do.
        results: what is done, by the name of the cell.
        identity: see :class:`Cell`.
    """
    cells: dict[str, Cell] = {}
    if study.tuning_seed is not None:
        for variant in study.variants:
            for mode in tuned_modes(study, variant):
                for cell in tuning_cells(study, variant, identity=identity, mode=mode):
                    cells.setdefault(cell.name, cell)
    # A choice is the same for all seeds.
    runs = [
        (variant, mode, rates)
        for variant in study.variants
        for mode, rates in _rates(study, variant, results, identity=identity)
    ]
    # Seed by seed, so that a study that is stopped early still compares all there is.
    for seed in study.seeds:
        for variant, run_mode, rates in runs:
            for rate in rates:
                cell = _cell(study, variant, run_mode, rate=rate, seed=seed, identity=identity)
                cells.setdefault(cell.name, cell)
    return list(cells.values())


def _rates(
    study: Study, variant: Variant, results: Mapping[str, CellResult], *, identity: Sequence[str]
) -> list[tuple[Mode, Sequence[float]]]:
    """An optimizer's modes, each with the learning rates that are known to be needed."""
    modes = modes_of(study, variant)
    if study.tuning_seed is None:
        return [(mode, variant.learning_rates) for mode in modes]
    chosen: list[Sequence[float]] = []
    for mode in tuned_modes(study, variant):
        choice = choose(study, variant, results, identity=identity, mode=mode)
        rate = None if choice is None else choice.learning_rate
        chosen.append(() if rate is None else (rate,))
    return list(zip(modes, chosen if study.tuned_per_mode else chosen * len(modes), strict=True))


def tuned_modes(study: Study, variant: Variant) -> Sequence[Mode | None]:
    """The modes that choose a learning rate; None, alone, for a choice that serves them all."""
    return modes_of(study, variant) if study.tuned_per_mode else (None,)


def tuning_cells(
    study: Study, variant: Variant, *, identity: Sequence[str], mode: Mode | None = None
) -> list[Cell]:
    """The runs that choose an optimizer's learning rate; none if there is one rate.

    Args:
        mode: in which they run; synchronous training by default.
    """
    if study.tuning_seed is None or len(variant.learning_rates) == 1:
        return []
    if mode is None:
        synchronous = Mode(delay=NONE, correction=NONE, flags={})
        # A mode of the study may have flags of its own for synchronous training.
        mode = next((mode for mode in study.modes if mode.synchronous), synchronous)
    return [
        _cell(study, variant, mode, rate=rate, seed=study.tuning_seed, identity=identity)
        for rate in variant.learning_rates
    ]


def choose(
    study: Study,
    variant: Variant,
    results: Mapping[str, CellResult],
    *,
    identity: Sequence[str],
    mode: Mode | None = None,
) -> Choice | None:
    """The learning rate with the lowest validation loss, once all of them were tried.

    Args:
        mode: see :func:`tuning_cells`.
    """
    cells = tuning_cells(study, variant, identity=identity, mode=mode)
    if not cells:
        return Choice(losses={}, learning_rate=variant.learning_rates[0])
    if any(cell.name not in results for cell in cells):
        return None
    losses = {cell.learning_rate: results[cell.name].loss for cell in cells}
    best = min(losses, key=lambda rate: losses[rate])
    return Choice(losses=losses, learning_rate=best if math.isfinite(losses[best]) else None)


def count(study: Study, *, identity: Sequence[str]) -> int:
    """How many cells the study has in all, whichever learning rates are chosen."""
    total = 0
    for variant in study.variants:
        modes = modes_of(study, variant)
        if study.tuning_seed is None:
            total += len(variant.learning_rates) * len(modes) * len(study.seeds)
            continue
        total += len(modes) * len(study.seeds)
        for mode in tuned_modes(study, variant):
            tuning = tuning_cells(study, variant, identity=identity, mode=mode)
            total += len(tuning)
            # One of them is among the cells of the chosen rate.
            run_anyway = mode is not None or any(one.synchronous for one in modes)
            if tuning and study.tuning_seed in study.seeds and run_anyway:
                total -= 1
    return total


def modes_of(study: Study, variant: Variant) -> list[Mode]:
    """The modes in which an optimizer is run."""
    return [
        mode
        for mode in study.modes
        if mode.optimizers is None or variant.optimizer in mode.optimizers
    ]


def _cell(
    study: Study,
    variant: Variant,
    mode: Mode,
    *,
    rate: float,
    seed: int,
    identity: Sequence[str],
) -> Cell:
    flags = {
        # The study reads every line; and a loss that is NaN ends the run, in every mode at once.
        "log-interval": ("1",),
        "rerun-mode": ("disabled",),
        # At the end of training only.
        "eval-interval": (str(10 * study.iterations),),
        **study.flags,
        **variant.flags,
        **mode.flags,
        "lr": (f"{rate:g}",),
        "min-lr": (f"{rate * study.min_lr_ratio:g}",),
        "seed": (str(seed),),
    }
    return Cell(
        variant=variant.name,
        optimizer=variant.optimizer,
        momentum=variant.momentum,
        delay=mode.delay,
        correction=mode.correction,
        learning_rate=rate,
        seed=seed,
        flags=flags,
        identity=tuple(identity),
    )
