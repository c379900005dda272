"""Loss curves of the schedules on real text, as studies of the package.

Everything but PACI is trained on one rank, where the numbers are those of any number of stages:
the first c microbatches of a batch run on the version before the newest. PACI's forwards and
backwards differ from stage to stage, so it is trained on its real stages. There Megatron draws
other initial weights than on one rank; so synchronous training is there, too, to be compared with.

A batch has the same sequences for every number m of microbatches. So the synchronous run is one for
all m, and so is PipeDream-2BW's, whose whole batch is delayed; they are trained once. What depends
on m is which share of a batch fresh-2bw and PACI delay.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy

from megatron_async.corrections import RECOMMENDED as CORRECTION
from megatron_async.schedules.fresh_2bw import DELAYED_MICROBATCHES, FRESH_2BW
from megatron_async.schedules.paci import PACI
from megatron_async.schedules.pipedream_2bw import PIPEDREAM_2BW
from megatron_async.study import config, runner
from megatron_async.study.cells import Cell, choose, plan
from megatron_async.study.config import NONE, Study
from megatron_async.study.datasets import Prepared, prepare
from megatron_async.study.launch import CommandLauncher, ForkLauncher
from megatron_async.study.results import FINISHED
from megatron_async.tools.job import torchrun
from support.smoothing import Curve

__all__ = ["OPTIMIZERS", "Pair", "Training", "find", "modes_of", "train"]

OPTIMIZERS: dict[str, tuple[dict[str, Any], float]] = {
    "muon": (
        {
            "adam-beta2": 0.95,
            "muon-momentum": 0.95,
            "muon-nesterov": True,
            "muon-extra-scale-factor": 0.2,
        },
        2.5e-3,
    ),
    "adam": ({"adam-beta1": 0.9, "adam-beta2": 0.95}, 4e-3),
}
"""The flags of each optimizer, and its learning rate: of a grid by factors of two the best in 2000
iterations of synchronous training at the benchmark's default size."""

_DELAYED, _SCHEDULE = DELAYED_MICROBATCHES.name.removeprefix("--"), "pipeline-schedule"
_ONE_RANK, _STAGES = "one-rank", "stages"  # folders


@dataclass(frozen=True, kw_only=True)
class Pair:
    """The losses of a run, and of the synchronous one from the same initial weights."""

    losses: Curve
    reference: Curve


@dataclass(frozen=True, kw_only=True)
class Training:
    """What all curves have in common.

    Attributes:
        stages: p; c is p - 1.
        microbatches: the numbers m.
        iterations: of each run.
        batch: sequences a batch, a multiple of each m.
        layers: of the model, a multiple of the stages.
        hidden_size: of the model.
        sequence: length in bytes.
        warmup: iterations in which the learning rate rises. It is constant afterwards.
        optimizer: its name.
        learning_rates: if there are several, the best in synchronous training is taken.
        seeds: of the initial weights and of the order of the data.
        dataset: as a study has it.
    """

    stages: int
    microbatches: tuple[int, ...]
    iterations: int
    batch: int
    layers: int
    hidden_size: int
    sequence: int
    warmup: int
    optimizer: str
    learning_rates: tuple[float, ...]
    seeds: tuple[int, ...]
    dataset: Any

    def study(self, folder: str, *, learning_rates: Sequence[float]) -> Study:
        """Return the study of the runs on one rank, or of those on all stages."""
        delays: list[Any] = [NONE]
        corrections = [NONE]
        stages = self.stages
        if folder == _ONE_RANK:
            stages = 1
            corrections.append(CORRECTION)
            delays.append({"name": "2bw", "flags": {_SCHEDULE: PIPEDREAM_2BW.name}})
        name, schedule = ("fresh", FRESH_2BW) if folder == _ONE_RANK else ("paci", PACI)
        for m in self.microbatches:
            flags = {
                _SCHEDULE: schedule.name,
                _DELAYED: self.stages - 1,
                "micro-batch-size": self.batch // m,
            }
            delays.append({"name": f"{name}-{m}", "flags": flags})
        own, _ = OPTIMIZERS[self.optimizer]
        document = {
            "ranks": stages,
            "dataset": self.dataset,
            "flags": {
                "num-layers": self.layers,
                "hidden-size": self.hidden_size,
                "num-attention-heads": 4,
                "seq-length": self.sequence,
                "max-position-embeddings": self.sequence,
                "normalization": "RMSNorm",
                # The initial values of learned positions would depend on the microbatch's size.
                "position-embedding-type": "rope",
                "untie-embeddings-and-output-weights": True,
                "disable-bias-linear": True,
                "pipeline-model-parallel-size": stages,
                "micro-batch-size": self.batch // min(self.microbatches),
                "global-batch-size": self.batch,
                "train-iters": self.iterations,
                "lr-decay-style": "constant",
                "lr-warmup-iters": self.warmup,
                "clip-grad": 1.0,
                "weight-decay": 0.1,
                "hidden-dropout": 0,
                "attention-dropout": 0,
                "split": "95,5,0",
                "eval-iters": 10,
                "num-workers": 0,
            },
            "min-lr-ratio": 1.0,
            "optimizers": {self.optimizer: {"flags": own, "learning-rates": [*learning_rates]}},
            "delays": delays,
            "corrections": corrections,
            "seeds": [*self.seeds],
        }
        return config.parse(document, name=folder)


def train(training: Training, output: Path, *, jobs: int) -> bool:
    """Train what is not there yet; return whether all is there now.

    Args:
        training: what.
        output: the folder of everything.
        jobs: runs of one rank at a time.

    Raises:
        RunError, LaunchError, ConfigError, DataError: it cannot be done.
    """
    output.mkdir(parents=True, exist_ok=True)
    study = training.study(_ONE_RANK, learning_rates=training.learning_rates)
    dataset = prepare(study.dataset, output)
    folder = output / _ONE_RANK
    folder.mkdir(exist_ok=True)
    outcome = runner.run(
        study,
        folder,
        dataset=dataset,
        launcher=ForkLauncher(log=folder / "launcher.log"),
        environments=[{}] * jobs,
    )
    rate = _rate(training, output, dataset)
    if not outcome.complete or rate is None:
        return False
    outcome = runner.run(
        training.study(_STAGES, learning_rates=[rate]),
        output / _STAGES,
        dataset=dataset,
        launcher=CommandLauncher(torchrun(training.stages)),
        environments=[{}],
    )
    return outcome.complete


def find(training: Training, output: Path) -> dict[tuple[str, int], dict[int, Pair]]:
    """Return the curves that are there: by mode and m those of each seed.

    The losses of a run that diverged are infinite.
    """
    study = training.study(_ONE_RANK, learning_rates=training.learning_rates)
    dataset = prepare(study.dataset, output)
    rate = _rate(training, output, dataset)
    found: dict[tuple[str, int], dict[int, Pair]] = {}
    if rate is None:
        return found
    for folder in (_ONE_RANK, _STAGES):
        study = training.study(folder, learning_rates=[rate])
        results = runner.read_results(output / folder)
        curves: list[tuple[Cell, Curve]] = []
        for cell in plan(study, results, identity=runner.identity_of(study, dataset.identity)):
            result = results.get(cell.name)
            if result is None:
                continue
            if result.status == FINISHED:
                losses = numpy.asarray(result.losses, dtype=numpy.float64)
            else:
                losses = numpy.full(training.iterations, numpy.inf)
            curves.append((cell, losses))
        references = {cell.seed: losses for cell, losses in curves if cell.delay == NONE}
        for cell, losses in curves:
            if cell.seed in references:
                pair = Pair(losses=losses, reference=references[cell.seed])
                for key in modes_of(cell, training.microbatches):
                    # Synchronous training on one rank comes first, and is the baseline's.
                    found.setdefault(key, {}).setdefault(cell.seed, pair)
    return found


def modes_of(cell: Cell, microbatches: Sequence[int]) -> list[tuple[str, int]]:
    """Which modes of the benchmark, with which m, a run is."""
    kind, _, number = cell.delay.partition("-")
    name = {NONE: "1f1b", "fresh": "fresh-2bw"}.get(kind, kind)
    if cell.correction != NONE:
        name += "-corrected"
    return [(name, m) for m in ([int(number)] if number else microbatches)]


def _rate(training: Training, output: Path, dataset: Prepared) -> float | None:
    """The learning rate that all runs have; None if it is not chosen yet."""
    study = training.study(_ONE_RANK, learning_rates=training.learning_rates)
    identity = runner.identity_of(study, dataset.identity)
    results = runner.read_results(output / _ONE_RANK)
    choice = choose(study, study.variants[0], results, identity=identity)
    return None if choice is None else choice.learning_rate
