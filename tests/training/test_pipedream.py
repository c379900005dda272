"""PipeDream with weight stashing: as a real pipeline, emulated on one stage, and in plain PyTorch.

All jobs start from one torch_dist checkpoint, without dropout. Stage s of P is P - 1 - s updates
late; a real pipeline and its emulation share nothing but the optimizer's step.
"""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.support.output import read_scalars
from tests.support.references import CONSTANT, STAGED, Weights, distance, run_references
from tests.support.shared_jobs import Job, Results, job, job_argv
from tests.support.steps import Outcome, Step, run_steps
from tests.training.cases import (
    BF16,
    CLIP,
    DISTRIBUTED,
    MUON,
    OVERLAPPED,
    PER_TOKEN,
    RECOMPUTED,
    Case,
    check_agreement,
    check_close,
    parameters,
)

PIPEDREAM: Mapping[str, Any] = {"pipeline_schedule": "pipedream"}


def emulated(stages: int, ranks: int = 1, *, model: str = "tied", **flags: Any) -> Job:
    """A job on one pipeline stage."""
    flags = {**PIPEDREAM, "clip_grad": CLIP, "emulate_pipeline_stages": stages, **flags}
    return job(ranks, model=model, **flags)


def real(stages: int, ranks: int | None = None, *, model: str = "tied", **flags: Any) -> Job:
    """A job on as many pipeline stages."""
    flags = {**PIPEDREAM, "clip_grad": CLIP, "pipeline_model_parallel_size": stages, **flags}
    return job(ranks or stages, model=model, **flags)


ONE_MICROBATCH: Mapping[str, Any] = {"global_batch_size": 2}
MANY: Mapping[str, Any] = {"micro_batch_size": 1, "global_batch_size": 12}
SHARDED: Mapping[str, Any] = {**DISTRIBUTED, **OVERLAPPED}
LATE: Mapping[str, Any] = {"async_start_iteration": 3}

CASES = [
    Case("pp2", real(2), emulated(2)),
    Case("pp4", real(4), emulated(4)),
    Case("untied-pp4", real(4, model="untied"), emulated(4, model="untied")),
    Case("untied-pp2", real(2, model="untied"), emulated(2, model="untied"), slow=True),
    Case("one-microbatch-pp4", real(4, **ONE_MICROBATCH), emulated(4, **ONE_MICROBATCH)),
    Case("many-microbatches", real(2, **MANY), emulated(2, **MANY), slow=True),
    Case("muon-pp2", real(2, **MUON), emulated(2, **MUON)),
    Case("muon-pp4", real(4, **MUON), emulated(4, **MUON), slow=True),
    Case("recomputed-pp2", real(2, **RECOMPUTED), emulated(2), slow=True),
    Case("recomputed-emulated", emulated(4, **RECOMPUTED), emulated(4)),
    Case("late-pp4", real(4, **LATE), emulated(4, **LATE), slow=True),
    Case("bf16-pp2", real(2, bf16=True), emulated(2, bf16=True), **BF16, slow=True),
    Case("moe-pp2", real(2, model="moe"), emulated(2, model="moe"), slow=True),
    Case("per-token-pp2", real(2, **PER_TOKEN), emulated(2, **PER_TOKEN), slow=True),
    Case(
        "nesterov-pp4",
        real(4, delay_correction="nesterov", delay_correction_momentum=0.9),
        emulated(4, delay_correction="nesterov", delay_correction_momentum=0.9),
        slow=True,
    ),
    Case(
        "prediction-pp4",
        real(4, model="untied", delay_correction="weight-prediction"),
        emulated(4, model="untied", delay_correction="weight-prediction"),
        slow=True,
    ),
    Case(
        "prediction-bf16-distopt",
        real(2, model="untied", delay_correction="weight-prediction", bf16=True),
        emulated(
            2, 2, model="untied", delay_correction="weight-prediction", bf16=True, **DISTRIBUTED
        ),
        **BF16,
        slow=True,
    ),
    # Data parallelism, with whole parameters and with shards of them.
    Case("emulated-dp2", emulated(4, 2), emulated(4)),
    Case("emulated-dp2-distopt", emulated(4, 2, **DISTRIBUTED), emulated(4)),
    Case(
        "emulated-dp2-overlapped",
        emulated(4, 2, **DISTRIBUTED, **OVERLAPPED),
        emulated(4),
        slow=True,
    ),
    Case("emulated-dp2-muon", emulated(4, 2, **MUON), emulated(4, **MUON), slow=True),
    Case("pp2-dp2", real(2, 4), emulated(2), slow=True),
    Case("pp2-dp2-distopt", real(2, 4, **DISTRIBUTED), emulated(2)),
    Case("pp2-dp2-overlapped", real(2, 4, **SHARDED), emulated(2), slow=True),
    Case("emulated-tp2", emulated(4, 2, tensor_model_parallel_size=2), emulated(4), slow=True),
]


@pytest.mark.parametrize("case", parameters(CASES))
def test_pipelines_and_emulations_agree(results: Results, case: Case) -> None:
    check_agreement(results, case)
    norms = results[case.like].norms.values()
    assert sum(norm > CLIP for norm in norms) > len(norms) / 2


@dataclasses.dataclass(frozen=True)
class Jobs:
    jobs: tuple[Job, ...]


SYNCHRONOUS = job(clip_grad=CLIP)


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(Jobs((emulated(1), SYNCHRONOUS)), id="one"),
        # Nothing is to be predicted without a delay.
        pytest.param(
            Jobs((emulated(1, delay_correction="weight-prediction"), SYNCHRONOUS)), id="predicted"
        ),
    ],
)
def test_one_emulated_stage_is_synchronous_training(results: Results, case: Jobs) -> None:
    found, wanted = (results[each] for each in case.jobs)
    assert found.losses == wanted.losses
    assert found.reported == wanted.reported


@pytest.mark.parametrize("case", [Jobs((emulated(2), emulated(4), SYNCHRONOUS))], ids=["stages"])
def test_more_stages_have_other_delays(results: Results, case: Jobs) -> None:
    two, four, none = (results[each].losses for each in case.jobs)
    # The first two batches run on what is the first update at most.
    assert two[0] == four[0] == none[0]
    for one, other in ((two, four), (two, none), (four, none)):
        assert max(abs(a / b - 1) for a, b in zip(one, other, strict=True)) > 1e-3


EVALUATED: Mapping[str, Any] = {"eval_interval": 3, "eval_iters": 2}


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(Jobs((real(2, **EVALUATED), real(2))), id="pp2"),
        pytest.param(Jobs((emulated(2, **EVALUATED), emulated(2))), id="emulated"),
        pytest.param(Jobs((real(4, **EVALUATED), real(4))), id="pp4", marks=pytest.mark.slow),
    ],
)
def test_evaluation_leaves_training_alone(results: Results, case: Jobs) -> None:
    found, without = (results[each] for each in case.jobs)
    assert found.losses == without.losses
    assert found.norms == without.norms
    assert [done for done, _ in found.validation] == [3, 6, 9, 10, 10]
    like = results[emulated(2, **EVALUATED)]
    if dict(case.jobs[0].flags).get("pipeline_model_parallel_size") == 2:
        check_close(
            "validation losses",
            dict(enumerate(loss for _, loss in found.validation)),
            dict(enumerate(loss for _, loss in like.validation)),
            1e-6,
        )


# The reference shares nothing with the package.

RTOL = 1e-5


@dataclasses.dataclass(frozen=True)
class Setting:
    """What is trained, on one stage that emulates ``stages``."""

    name: str
    stages: int
    optimizer: str
    lr: float
    weight_decay: float
    model: str = "tied"

    @property
    def jobs(self) -> tuple[Job]:
        flags: dict[str, Any] = {
            **PIPEDREAM,
            **CONSTANT,
            "optimizer": self.optimizer,
            "lr": self.lr,
            "min_lr": self.lr,
            "weight_decay": self.weight_decay,
            "emulate_pipeline_stages": self.stages,
        }
        return (job(model=self.model, dump=("trajectory",), **flags),)


SETTINGS = (
    Setting("sgd", 4, "sgd", 0.1, 0.01),
    Setting("adamw", 4, "adam", 1e-3, 0.1),
    Setting("adamw-untied", 4, "adam", 1e-3, 0.1, model="untied"),
    Setting("adamw-2", 2, "adam", 1e-3, 0.1),
)


@pytest.fixture(scope="module")
def references(
    results: Results, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, list[Weights]]:
    """W(1), W(2), ... of each setting, computed in one process."""
    runs = {
        setting.name: {
            "start": str(results[setting.jobs[0]].directory / "rank0.pt"),
            "stages": setting.stages,
            "optimizer": {"adam": "adamw"}.get(setting.optimizer, setting.optimizer),
            "lr": setting.lr,
            "weight_decay": setting.weight_decay,
        }
        for setting in SETTINGS
    }
    argv = job_argv(job(**CONSTANT))
    directory = tmp_path_factory.mktemp("reference")
    return run_references(STAGED, runs, argv=argv, directory=directory)


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda setting: setting.name)
def test_emulation_follows_the_reference(
    results: Results, references: dict[str, list[Weights]], setting: Setting
) -> None:
    found, wanted = results[setting.jobs[0]].tensors(), references[setting.name]
    start = found["initial"]
    assert len(found["steps"]) == len(wanted) == 10
    for k, (these, those) in enumerate(zip(found["steps"], wanted, strict=True)):
        assert these.keys() == those.keys() == start.keys()
        # Relative to the way that the parameters have gone, not to their size.
        way = distance(these, start)
        off = distance(these, those)
        assert off <= RTOL * way, f"step {k}: off by {off / way:.1e}"


def test_reference_tells_numbers_of_stages_apart(references: dict[str, list[Weights]]) -> None:
    four, two = references["adamw"], references["adamw-2"]
    assert distance(four[0], two[0]) == 0.0
    assert distance(four[-1], two[-1]) > 1000 * RTOL * distance(four[-1], four[0])


# Saving and resuming

TORCH_DIST: Mapping[str, Any] = {**PIPEDREAM, "ckpt_format": "torch_dist"}
NO_DROPOUT: Mapping[str, Any] = {"hidden_dropout": 0, "attention_dropout": 0}
STAGES: Mapping[str, Any] = {"pipeline_model_parallel_size": 2}
EMULATED: Mapping[str, Any] = {"emulate_pipeline_stages": 2}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("pipedream")


@pytest.fixture(scope="module")
def outcomes(directory: Path) -> dict[str, Outcome]:
    """A run of two stages, and its checkpoint resumed in every way, without dropout."""
    flags: dict[str, Any] = {**TORCH_DIST, **STAGES}
    saves: dict[str, Any] = {"save": "{dir}/saved", "save_interval": 4, "exit_interval": 4}
    loads: dict[str, Any] = {
        **NO_DROPOUT,
        "load": "{dir}/saved",
        "no_load_rng": True,
        "ckpt_format": "torch_dist",
    }
    logs: dict[str, Any] = {"tensorboard_dir": "{dir}/tensorboard"}
    two = [
        Step("uninterrupted", flags),
        Step("saved", {**flags, **saves}),
        Step("resumed", {**flags, **loads, **logs}),
        Step("pipedream-2bw", {**flags, **loads, "pipeline_schedule": "pipedream-2bw"}),
    ]
    one = [
        Step("emulated", {**TORCH_DIST, **EMULATED, **loads}),
        Step("synchronous", loads),
    ]
    return run_steps(2, two, directory) | run_steps(1, one, directory)


def test_saving_and_stopping_change_nothing(outcomes: dict[str, Outcome]) -> None:
    expected = outcomes["uninterrupted"].losses
    assert len(expected) == 7
    # The pipeline drains before the exit, of which both stages know.
    assert outcomes["saved"].losses == expected[:4]


def test_a_resumed_run_starts_afresh_from_the_newest_weights(outcomes: dict[str, Outcome]) -> None:
    resumed = outcomes["resumed"]
    begin = "starts afresh at iteration 5, whose weights are version 0: "
    assert resumed.notices[-1].startswith(f"pipedream {begin}the batches that were in flight")
    assert outcomes["pipedream-2bw"].notices[-1] == (
        f"pipedream-2bw {begin}the checkpoint was saved by pipedream"
    )
    assert list(resumed.by_iteration) == [5, 6, 7]
    # Its first batch runs on the checkpoint's weights on all stages, whatever the schedule.
    for name in ("synchronous", "pipedream-2bw"):
        assert resumed.losses[0] == pytest.approx(outcomes[name].losses[0], rel=1e-6)
        assert abs(resumed.losses[2] / outcomes[name].losses[2] - 1) > 1e-5


def test_an_emulation_resumes_as_the_pipeline_does(outcomes: dict[str, Outcome]) -> None:
    found, wanted = outcomes["emulated"], outcomes["resumed"]
    assert found.notices[-1] == wanted.notices[-1]
    check_close("losses", found.by_iteration, wanted.by_iteration, 2e-6)
    check_close("norms", found.norms, wanted.norms, 5e-6)


def test_the_stages_mean_delay_is_logged(outcomes: dict[str, Outcome], directory: Path) -> None:
    assert not outcomes["resumed"].failed
    scalars = read_scalars(directory / "tensorboard")
    assert scalars["gradient-delay"] == {5: 0.0, 6: 0.5, 7: 0.5}
    assert scalars["weight-version"] == {5: 1.0, 6: 2.0, 7: 3.0}
