"""``--grad-norm-scope stage`` clips each stage by its own norm, as a plain reference does."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.gpt import ASYNC, Value
from tests.support.shared_jobs import Job, Results, job, job_argv
from tests.support.torchrun import run_torchrun
from tests.training.test_reference import CONSTANT, SCRIPT

pytestmark = pytest.mark.timeout(600)

STAGES = 2
FLAGS: dict[str, Value] = {
    **CONSTANT,
    "optimizer": "sgd",
    "lr": 0.1,
    "min_lr": 0.1,
    "weight_decay": 0.0,
    # Below the norm of each stage.
    "clip_grad": 0.3,
}


class Case:
    jobs = (
        job(
            STAGES,
            model="untied",
            dump=("trajectory",),
            pipeline_model_parallel_size=STAGES,
            grad_norm_scope="stage",
            **{**ASYNC, **FLAGS},
        ),
    )

    @property
    def job(self) -> Job:
        return self.jobs[0]


def distance(these: dict[str, torch.Tensor], those: dict[str, torch.Tensor]) -> float:
    return sum(float((these[n] - those[n]).double().square().sum()) for n in these) ** 0.5


@pytest.mark.parametrize("case", [pytest.param(Case(), id="pp2-untied")])
def test_each_stage_is_clipped_by_its_own_norm(
    results: Results, case: Case, tmp_path: Path
) -> None:
    stages = [results[case.job].tensors(rank) for rank in range(STAGES)]
    start = {name: value for stage in stages for name, value in stage["initial"].items()}
    torch.save({"initial": start}, tmp_path / "start.pt")
    run: dict[str, Any] = {
        "start": str(tmp_path / "start.pt"),
        "optimizer": "sgd",
        "lr": 0.1,
        "weight_decay": 0.0,
        "correction": None,
        "strength": 1.0,
        "momentum": 0.0,
        "adaptive": False,
        "delay": 1,
    }
    runs = [
        {**run, "clipped_stages": stages, "out": str(tmp_path / f"{stages}.pt")}
        for stages in (STAGES, 1)
    ]
    (tmp_path / "runs.json").write_text(json.dumps(runs))
    argv = ["--runs", str(tmp_path / "runs.json"), *job_argv(job(model="untied", **FLAGS))]
    run_torchrun(1, argv, launcher="plain", script=SCRIPT)
    wanted, all_together = (torch.load(each["out"]) for each in runs)
    assert len(wanted) == 10
    for stage in stages:
        assert len(stage["steps"]) == len(wanted)
        for k, found in enumerate(stage["steps"]):
            way = distance(found, start)
            assert distance(found, wanted[k]) <= 1e-5 * way, f"step {k}"
            # Clipping by the norm over all stages would be seen.
            assert distance(found, all_together[k]) > 1e-2 * way, f"step {k}"
