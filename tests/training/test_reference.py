"""The parameters of a run follow those of a reference that shares nothing with the package."""

import dataclasses
from typing import Any

import pytest
import torch

from tests.support.gpt import ASYNC
from tests.support.references import (
    CONSTANT,
    DELAYED,
    REFERENCES,
    Weights,
    distance,
    run_references,
)
from tests.support.shared_jobs import Job, Results, job, job_argv

RTOL = 1e-5
MICROBATCHES = 4
"""Of a batch, in all shared jobs."""


@dataclasses.dataclass(frozen=True)
class Setting:
    """What is trained.

    With the correction, weight decay would act at another point than in the formula, a difference
    of second order, so it is off there.
    """

    name: str
    optimizer: str
    lr: float
    weight_decay: float = 0.0
    correction: str | None = None
    strength: float = 1.0
    momentum: float = 0.99
    adaptive: bool = False
    delay: int = 1
    delayed: int | None = None
    rtol: float = RTOL

    def job(self, stages: int) -> Job:
        flags: dict[str, Any] = {
            **ASYNC,
            **CONSTANT,
            "optimizer": self.optimizer,
            "lr": self.lr,
            "min_lr": self.lr,
            "weight_decay": self.weight_decay,
            "pipeline_model_parallel_size": stages,
        }
        if self.delayed is not None:
            flags |= {"pipeline_schedule": "fresh-2bw", "delayed_microbatches": self.delayed}
        if self.correction == "nesterov":
            flags |= {"delay_correction": "nesterov", "delay_correction_momentum": self.momentum}
        elif self.correction is not None:
            flags |= {
                "delay_correction": self.correction,
                "delay_correction_strength": self.strength,
                "delay_correction_adaptive_strength": self.adaptive,
            }
        return job(stages, dump=("trajectory",), **flags)


SETTINGS = (
    Setting("sgd", "sgd", 0.1, weight_decay=0.01),
    Setting("sgd-corrected", "sgd", 0.1, correction="error-feedback", strength=0.5),
    Setting("adamw", "adam", 1e-3, weight_decay=0.1),
    Setting("adamw-corrected", "adam", 1e-3, correction="error-feedback"),
)
# On two stages alone.
OTHER_CORRECTIONS = (
    Setting("adamw-adaptive", "adam", 1e-3, correction="error-feedback", adaptive=True),
    Setting("sgd-predicted", "sgd", 0.1, correction="weight-prediction", strength=0.5),
    # The first step is a fifth as long, and what is rounded is the weights.
    Setting("adamw-nesterov", "adam", 1e-3, correction="nesterov", momentum=0.9, rtol=5e-5),
    Setting(
        "sgd-compensated",
        "sgd",
        0.1,
        correction="delay-compensation",
        strength=30.0,
        adaptive=True,
    ),
)
# One of four microbatches is delayed, and a correction is as strong as that.
FRESH = (
    Setting("sgd-fresh", "sgd", 0.1, weight_decay=0.01, delayed=1),
    Setting("adamw-fresh-corrected", "adam", 1e-3, correction="error-feedback", delayed=1),
)
# What a run must not follow.
OTHERS = (
    Setting("sgd-no-delay", "sgd", 0.1, weight_decay=0.01, delay=0),
    Setting("sgd-uncorrected", "sgd", 0.1),
    Setting("adamw-no-delay", "adam", 1e-3, weight_decay=0.1, delay=0),
    Setting("adamw-uncorrected", "adam", 1e-3),
)


@dataclasses.dataclass(frozen=True)
class Case:
    setting: Setting
    stages: int

    @property
    def jobs(self) -> tuple[Job, Job]:
        return self.setting.job(self.stages), STARTING


STARTING = SETTINGS[0].job(1)
"""All jobs start from its weights, which are those of the whole model."""

CORE = {"sgd-1", "sgd-2", "adamw-2", "adamw-corrected-2", "adamw-adaptive-2", "sgd-fresh-2"}
"""Optimizers and corrections as such are the same with every release of Megatron."""
CASES = [
    pytest.param(
        Case(setting, stages),
        id=(name := f"{setting.name}-{stages}"),
        marks=[pytest.mark.core] if name in CORE else [],
    )
    for stages, settings in ((1, SETTINGS), (2, (*SETTINGS, *OTHER_CORRECTIONS, *FRESH)))
    for setting in settings
]


@pytest.fixture(scope="module")
def references(
    results: Results, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, list[Weights]]:
    """W(1), W(2), ... of each setting, computed in one process."""
    runs = {
        setting.name: {
            "start": str(results[STARTING].directory / "rank0.pt"),
            "delay": setting.delay,
            "delayed": setting.delayed,
            "optimizer": {"adam": "adamw"}.get(setting.optimizer, setting.optimizer),
            "lr": setting.lr,
            "weight_decay": setting.weight_decay,
            "correction": setting.correction,
            "strength": setting.strength * (setting.delayed or MICROBATCHES) / MICROBATCHES,
            "momentum": setting.momentum,
            "adaptive": setting.adaptive,
            "clipped_stages": 1,
        }
        for setting in (*SETTINGS, *OTHER_CORRECTIONS, *FRESH, *OTHERS)
    }
    argv = job_argv(job(**CONSTANT))
    directory = tmp_path_factory.mktemp("reference")
    return run_references(DELAYED, runs, argv=argv, directory=directory)


def _stages(found: Results, case: Case) -> list[dict[str, Any]]:
    result = found[case.setting.job(case.stages)]
    return [result.tensors(rank) for rank in range(case.stages)]


def _reference_name(name: str) -> str:
    # The last stage's copy of the tied embedding.
    return {"output_layer.weight": "embedding.word_embeddings.weight"}.get(name, name)


def _distance(these: Weights, those: Weights) -> float:
    return distance(these, {name: those[_reference_name(name)] for name in these})


@pytest.mark.parametrize("case", CASES)
def test_parameters_follow_the_reference(
    results: Results, references: dict[str, list[Weights]], case: Case
) -> None:
    reference = references[case.setting.name]
    start: Weights = results[STARTING].tensors()["initial"]
    covered = set()
    for stage in _stages(results, case):
        assert all(torch.equal(v, start[_reference_name(n)]) for n, v in stage["initial"].items())
        assert len(stage["steps"]) == len(reference) == 10
        for k, (found, wanted) in enumerate(zip(stage["steps"], reference, strict=True)):
            assert found.keys() == stage["initial"].keys()
            # Relative to the way that the parameters have gone, not to their size.
            way = _distance(found, start)
            off = _distance(found, wanted)
            assert off <= case.setting.rtol * way, f"step {k}: off by {off / way:.1e}"
        covered |= {_reference_name(name) for name in stage["initial"]}
    assert covered == start.keys()


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("sgd", "sgd-no-delay"),
        ("sgd-corrected", "sgd-uncorrected"),
        ("adamw", "adamw-no-delay"),
        ("adamw-corrected", "adamw-uncorrected"),
        ("adamw-adaptive", "adamw-corrected"),
        ("sgd-compensated", "sgd-uncorrected"),
        ("sgd-fresh", "sgd"),
        ("sgd-fresh", "sgd-no-delay"),
        ("adamw-fresh-corrected", "adamw-corrected"),
    ],
)
def test_reference_tells_trajectories_apart(
    results: Results, references: dict[str, list[Weights]], one: str, other: str
) -> None:
    start = results[STARTING].tensors()["initial"]
    # The first update is the same, to the order in which a batch's two parts are summed; then they
    # part.
    first = _distance(references[one][0], start)
    assert _distance(references[one][0], references[other][0]) <= RTOL * first
    way = _distance(references[one][1], start)
    assert _distance(references[one][1], references[other][1]) > 1000 * RTOL * way


@pytest.mark.parametrize(
    ("one", "other"),
    [("sgd-predicted", "sgd-corrected"), ("adamw-nesterov", "adamw-uncorrected")],
)
def test_reference_tells_trajectories_apart_from_the_first_update_on(
    references: dict[str, list[Weights]], results: Results, one: str, other: str
) -> None:
    way = _distance(references[one][0], results[STARTING].tensors()["initial"])
    assert _distance(references[one][0], references[other][0]) > 1000 * RTOL * way


def test_reference_uses_nothing_of_the_package() -> None:
    for script in REFERENCES.glob("*.py"):
        assert "megatron_async" not in script.read_text(), script
