"""A schedule and a correction from outside of the package, each with a flag of its own.

A training script registers them (``tests/support/toys.py``) and trains through the launcher, on one
stage and on two. The weights follow a plain reference.
"""

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from megatron_async.config.settings import AsyncConfig
from megatron_async.corrections import CORRECTIONS
from megatron_async.planning.candidates import candidates
from megatron_async.schedules import SCHEDULES
from megatron_async.schedules.schedule import Pipeline, action_lists
from megatron_async.schedules.validator import validate
from megatron_async.study import config as study_config
from tests.config.cases import FACTS, PLAIN, parse, problems
from tests.support import toys
from tests.support.references import CONSTANT, DELAYED, Weights, distance, run_references
from tests.support.shared_jobs import Job, Results, job, job_argv

RTOL = 1e-5
REGISTER = "from tests.support import toys; toys.register()"
RATE, DECAY = 1e-3, 0.1


@dataclasses.dataclass(frozen=True)
class Setting:
    """What is trained."""

    name: str
    updates: int
    share: float | None = None

    def job(self, stages: int) -> Job:
        flags: dict[str, Any] = {
            **CONSTANT,
            "lr": RATE,
            "min_lr": RATE,
            "weight_decay": DECAY if self.share is None else 0.0,
            "pipeline_model_parallel_size": stages,
            "pipeline_schedule": "late",
            # Two, the default, is left out.
            "late_updates": None if self.updates == 2 else self.updates,
        }
        if self.share is not None:
            flags |= {"delay_correction": "damping", "damping_share": self.share}
        return job(stages, prelude=REGISTER, dump=("trajectory",), **flags)

    @property
    def reference(self) -> dict[str, Any]:
        return {
            "delay": self.updates,
            "optimizer": "adamw",
            "lr": RATE,
            "weight_decay": DECAY if self.share is None else 0.0,
            "correction": None if self.share is None else "damping",
            "strength": self.share,
            "momentum": 0.0,
            "adaptive": False,
            "clipped_stages": 1,
        }


SETTINGS = (
    Setting("two-updates", 2),
    Setting("three-updates", 3),
    Setting("two-updates-damped", 2, share=0.25),
)


@dataclasses.dataclass(frozen=True)
class Case:
    setting: Setting
    stages: int

    @property
    def jobs(self) -> tuple[Job, ...]:
        return self.setting.job(self.stages), SETTINGS[0].job(1)


CASES = [
    pytest.param(Case(setting, stages), id=f"{setting.name}-{stages}")
    for setting in SETTINGS
    for stages in (1, 2)
]


@pytest.fixture(scope="module")
def references(
    results: Results, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, list[Weights]]:
    start = str(results[SETTINGS[0].job(1)].directory / "rank0.pt")
    runs = {setting.name: {"start": start, **setting.reference} for setting in SETTINGS}
    return run_references(
        DELAYED,
        runs,
        argv=job_argv(job(**CONSTANT)),
        directory=tmp_path_factory.mktemp("reference"),
    )


@pytest.mark.parametrize("case", CASES)
def test_weights_follow_the_reference(
    results: Results, references: dict[str, list[Weights]], case: Case
) -> None:
    wanted = references[case.setting.name]
    start = results[SETTINGS[0].job(1)].tensors()["initial"]
    result = results[case.setting.job(case.stages)]
    covered = set()
    for rank in range(case.stages):
        found = result.tensors(rank)
        assert len(found["steps"]) == len(wanted) == 10
        # The last stage's copy of the tied embedding.
        names = {
            name: name.replace("output_layer", "embedding.word_embeddings")
            for name in found["initial"]
        }
        covered |= set(names.values())
        for k, weights in enumerate(found["steps"]):
            expected = {name: wanted[k][names[name]] for name in weights}
            way = distance(weights, {name: start[names[name]] for name in weights})
            assert distance(weights, expected) <= RTOL * way, f"step {k}"
    assert covered == start.keys()


def test_the_reference_tells_them_apart(
    results: Results, references: dict[str, list[Weights]]
) -> None:
    start = results[SETTINGS[0].job(1)].tensors()["initial"]
    two, three, damped = (references[setting.name] for setting in SETTINGS)
    way = distance(two[-1], start)
    assert distance(two[2], three[2]) == 0.0  # batches 0 to 2 run on the initial weights
    assert distance(two[-1], three[-1]) > 1000 * RTOL * way
    assert distance(two[-1], damped[-1]) > 1000 * RTOL * way


SYNCHRONOUS = job(dump=("trajectory",), **{**CONSTANT, "lr": RATE, "min_lr": RATE})


@dataclasses.dataclass(frozen=True)
class Undelayed:
    jobs = (
        job(
            prelude=REGISTER,
            dump=("trajectory",),
            **{**CONSTANT, "lr": RATE, "min_lr": RATE},
            pipeline_schedule="late",
            late_updates=0,
        ),
        SYNCHRONOUS,
    )


@pytest.mark.parametrize("case", [Undelayed()], ids=["synchronous"])
def test_without_a_delay_it_is_megatrons_own_training(results: Results, case: Undelayed) -> None:
    found, wanted = (results[each] for each in case.jobs)
    assert found.losses == wanted.losses
    for these, those in zip(found.tensors()["steps"], wanted.tensors()["steps"], strict=True):
        assert all(torch.equal(these[name], those[name]) for name in those)


# What else reads the registries


@pytest.fixture
def registered() -> Iterator[None]:
    toys.register()
    yield
    SCHEDULES.unregister(toys.LATE.name)
    CORRECTIONS.unregister(toys.DAMPING.name)


@pytest.mark.parametrize("stages", range(1, 6))
@pytest.mark.parametrize("updates", range(4))
def test_its_lists_are_valid(stages: int, updates: int) -> None:
    pipeline = Pipeline(stages=stages, deferred=False, flags={toys.UPDATES.dest: updates})
    counts = [3, 5, 5, 2, 7]
    for drain in (True, False):
        lists = action_lists(toys.LATE, pipeline, counts, drain=drain)
        validate(lists, schedule=toys.LATE, pipeline=pipeline, microbatches=counts)


@pytest.mark.usefixtures("registered")
def test_the_command_line_and_the_checks_know_them() -> None:
    import argparse

    from megatron.training.arguments import add_megatron_arguments

    from megatron_async.config.arguments import add_arguments, mend_help
    from megatron_async.optimizers import add_optimizer_arguments

    parser = add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))
    parser = add_optimizer_arguments(add_arguments(parser))
    assert "'late' runs 1F1B on weights that are some updates old" in " ".join(
        mend_help(parser).format_help().split()
    )
    late = [*PLAIN, "--pipeline-schedule", "late"]
    args = parse(parser, [*late, "--late-updates", "3", "--delay-correction", "damping"])
    assert problems(args) == ([], [])
    config = AsyncConfig.from_args(args)
    assert config.schedule_record is toys.LATE
    assert not config.deferred_update
    assert config.correction_settings == {"damping_share": 0.5}

    def refused(*argv: str) -> list[str]:
        return problems(parse(parser, [*late, *argv]), FACTS)[0]

    (message,) = refused("--late-updates", "-1")
    assert message == (
        "--late-updates: -1 is not a number of updates, 0 or more. Give a number of updates, 0 or "
        "more."
    )
    (message,) = refused("--damping-share", "0.3")
    assert "--damping-share: it belongs to --delay-correction damping" in message
    (message,) = refused("--delay-correction", "damping", "--damping-share", "2")
    assert message.startswith("--damping-share: 2.0 is not a number above 0 and at most 1")
    (message,) = refused("--deferred-update")
    assert message.startswith("--deferred-update: the gradients of late's last stage")
    # Its delay is more than a step.
    (message,) = refused("--delay-correction", "error-feedback")
    assert "damping" in message


@pytest.mark.usefixtures("registered")
def test_planner_and_study_know_them() -> None:
    assert "late" in {each.name for each in candidates()}
    study = study_config.parse(
        {
            "flags": {"train-iters": 10},
            "optimizers": {"adam": {"learning-rates": [1e-3]}},
            "delays": ["none", "late"],
            "corrections": ["none", "damping"],
            "seeds": [1],
        },
        name="test",
    )
    modes = {(mode.delay, mode.correction) for mode in study.modes}
    assert ("late", "damping") in modes
