"""Local non-persistent checkpoints, which nvidia-resiliency-ext writes: each rank its own file."""

from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.support.gpt import ASYNC, Value
from tests.support.steps import Outcome, Step, assert_continues, run_steps

pytest.importorskip("nvidia_resiliency_ext")

Flags = Mapping[str, Value]

STAGES_2: Flags = {**ASYNC, "pipeline_model_parallel_size": 2, "ckpt_format": "torch_dist"}
DISTRIBUTED: Flags = {
    **STAGES_2,
    "use_distributed_optimizer": True,
    "bf16": True,
    "delay_correction": "error-feedback",
}
TWO_RANKS: Mapping[str, Flags] = {
    "adam": {**STAGES_2, "delay_correction": "error-feedback"},
    "fresh": {**STAGES_2, "pipeline_schedule": "fresh-2bw"},
}
FOUR_RANKS: Mapping[str, Flags] = {
    "distributed": DISTRIBUTED,
    "atomic": DISTRIBUTED,
    "replicated": DISTRIBUTED,
}
# What is meant for local checkpoints alone.
FURTHER: Mapping[str, Flags] = {
    "atomic": {"non_persistent_local_ckpt_algo": "atomic"},
    "replicated": {"replication": True, "replication_jump": 2},
}
# A node has lost its disk: rank 1 has what rank 3 wrote.
LOST = """
import os, pathlib, shutil
if os.environ["RANK"] == "3":
    shutil.rmtree(pathlib.Path({directory!r}, "replicated", "local", "3"))
"""
ITERATION = 3


def _steps(name: str, flags: Flags, directory: Path) -> list[Step]:
    local: dict[str, Value] = {
        **flags,
        **FURTHER.get(name, {}),
        "non_persistent_ckpt_type": "local",
        "non_persistent_local_ckpt_dir": f"{{dir}}/{name}/local",
        # The one that persists is of another run's, so that there is none.
        "load": f"{{dir}}/{name}/nothing",
    }
    saving: dict[str, Value] = {
        **local,
        "save": f"{{dir}}/{name}/persistent",
        "save_interval": 100,
        "non_persistent_save_interval": ITERATION,
        "exit_interval": ITERATION + 1,
    }
    return [
        Step(f"{name} uninterrupted", flags),
        Step(f"{name} stopped", saving),
        Step(
            f"{name} resumed",
            local,
            LOST.format(directory=str(directory)) if name == "replicated" else "",
        ),
    ]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Outcome]:
    directory = tmp_path_factory.mktemp("local")
    found: dict[str, Outcome] = {}
    for ranks, cases in ((2, TWO_RANKS), (4, FOUR_RANKS)):
        steps = [step for name, flags in cases.items() for step in _steps(name, flags, directory)]
        found |= run_steps(ranks, steps, directory, may_fail=True)
        for name in cases:
            assert list((directory / name / "local" / "0").glob("*.pt"))
            assert not (directory / name / "nothing").exists()
    return found


@pytest.mark.parametrize("name", [*TWO_RANKS, *FOUR_RANKS])
def test_a_run_goes_on_where_it_was_saved(outcomes: dict[str, Outcome], name: str) -> None:
    for step in ("uninterrupted", "stopped", "resumed"):
        outcome = outcomes[f"{name} {step}"]
        assert not outcome.failed, outcome.log[-4000:]
    resumed = outcomes[f"{name} resumed"]
    assert_continues(resumed, outcomes[f"{name} uninterrupted"], done=ITERATION)
    assert f"resumes at iteration {ITERATION + 1}" in resumed.notices[-1]
