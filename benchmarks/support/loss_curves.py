"""Loss curves of the schedules on real text, as a study of the package.

All are trained on one rank, where the numbers are those of any number of stages: the first c
microbatches of a batch run on the version before the newest. Of PACI, whose forwards and backwards
differ from stage to stage, the stages are emulated.

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
from megatron_async.schedules.emulation import EMULATE_PIPELINE_STAGES
from megatron_async.schedules.fresh_2bw import DELAYED_MICROBATCHES, FRESH_2BW
from megatron_async.schedules.paci import PACI
from megatron_async.schedules.pipedream_2bw import PIPEDREAM_2BW
from megatron_async.study import config, runner
from megatron_async.study.cells import Cell, choose, plan
from megatron_async.study.config import NONE, Study
from megatron_async.study.datasets import Prepared, prepare
from megatron_async.study.launch import ForkLauncher
from megatron_async.study.results import FINISHED
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

_SCHEDULE = "pipeline-schedule"
_DELAYED, _EMULATED = (
    flag.name.removeprefix("--") for flag in (DELAYED_MICROBATCHES, EMULATE_PIPELINE_STAGES)
)
_FOLDER = "one-rank"


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

    def study(self, learning_rates: Sequence[float]) -> Study:
        """Return the study of all runs."""
        delays: list[Any] = [NONE, {"name": "2bw", "flags": {_SCHEDULE: PIPEDREAM_2BW.name}}]
        of_stages = {_EMULATED: self.stages}
        for name, schedule, more in (("fresh", FRESH_2BW, {}), ("paci", PACI, of_stages)):
            for m in self.microbatches:
                flags = {
                    _SCHEDULE: schedule.name,
                    _DELAYED: self.stages - 1,
                    "micro-batch-size": self.batch // m,
                    **more,
                }
                delays.append({"name": f"{name}-{m}", "flags": flags})
        corrected = ["2bw", *(f"fresh-{m}" for m in self.microbatches)]
        own, _ = OPTIMIZERS[self.optimizer]
        document = {
            "ranks": 1,
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
                "pipeline-model-parallel-size": 1,
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
            "corrections": [NONE, {"name": CORRECTION, "delays": corrected}],
            "seeds": [*self.seeds],
        }
        return config.parse(document, name=_FOLDER)


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
    study = training.study(training.learning_rates)
    dataset = prepare(study.dataset, output)
    folder = output / _FOLDER
    folder.mkdir(exist_ok=True)
    outcome = runner.run(
        study,
        folder,
        dataset=dataset,
        launcher=ForkLauncher(log=folder / "launcher.log"),
        environments=[{}] * jobs,
    )
    return outcome.complete


def find(training: Training, output: Path) -> dict[tuple[str, int], dict[int, Pair]]:
    """Return the curves that are there: by mode and m those of each seed.

    The losses of a run that diverged are infinite.
    """
    study = training.study(training.learning_rates)
    dataset = prepare(study.dataset, output)
    rate = _rate(training, output, dataset)
    found: dict[tuple[str, int], dict[int, Pair]] = {}
    if rate is None:
        return found
    study = training.study([rate])
    results = runner.read_results(output / _FOLDER)
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
                found.setdefault(key, {})[cell.seed] = pair
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
    study = training.study(training.learning_rates)
    identity = runner.identity_of(study, dataset.identity)
    results = runner.read_results(output / _FOLDER)
    choice = choose(study, study.variants[0], results, identity=identity)
    return None if choice is None else choice.learning_rate
