"""``--grad-norm-scope stage`` clips each stage by its own norm, as a plain reference does."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.gpt import ASYNC
from tests.support.references import CONSTANT, DELAYED, distance, run_references
from tests.support.shared_jobs import Job, Results, job, job_argv

STAGES = 2
FLAGS: dict[str, Any] = {
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
    runs = {
        "each": {**run, "clipped_stages": STAGES},
        "together": {**run, "clipped_stages": 1},
    }
    argv = job_argv(job(model="untied", **FLAGS))
    found = run_references(DELAYED, runs, argv=argv, directory=tmp_path)
    wanted, all_together = found["each"], found["together"]
    assert len(wanted) == 10
    for stage in stages:
        assert len(stage["steps"]) == len(wanted)
        for k, weights in enumerate(stage["steps"]):
            way = distance(weights, start)
            assert distance(weights, wanted[k]) <= 1e-5 * way, f"step {k}"
            # Clipping by the norm over all stages would be seen.
            assert distance(weights, all_together[k]) > 1e-2 * way, f"step {k}"
