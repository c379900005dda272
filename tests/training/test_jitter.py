"""Stages that are late by chance neither deadlock nor change a digit."""

import re
from typing import Any

import pytest

from tests.support.gpt import gpt_args
from tests.support.output import RankLog, RunResult
from tests.support.torchrun import run_torchrun


def run(ranks: int, jitter_ms: float, **flags: Any) -> RunResult:
    argv = gpt_args(
        pipeline_model_parallel_size=4,
        pipeline_schedule="pipedream-2bw",
        delay_correction="error-feedback",
        num_layers=4,
        hidden_size=32,
        seq_length=32,
        max_position_embeddings=32,
        micro_batch_size=1,
        **flags,
    )
    runner = ("-m", "tests.support.launchers.late_stages", "--cpu")
    env = {"JITTER_MS": str(jitter_ms)}
    return run_torchrun(ranks, argv, launcher=runner, env=env, timeout=540)


def delays(rank: RankLog) -> tuple[int, float]:
    """How often a rank was delayed, and how many seconds in all."""
    found = re.search(r"^delayed (\d+) times, ([\d.]+) s$", rank.stdout, re.MULTILINE)
    return (int(found[1]), float(found[2])) if found else (0, 0.0)


@pytest.mark.parametrize(
    ("ranks", "flags"),
    [
        pytest.param(4, {"train_iters": 30, "global_batch_size": 3}, id="pp4-least-microbatches"),
        pytest.param(
            8,
            {
                "train_iters": 200,
                "global_batch_size": 8,
                "use_distributed_optimizer": True,
                "overlap_grad_reduce": True,
                "overlap_param_gather": True,
            },
            id="pp4-dp2",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_late_stages_change_nothing(ranks: int, flags: dict[str, Any]) -> None:
    calm, late = run(ranks, 0, **flags), run(ranks, 4, **flags)
    assert len(calm.losses) == flags["train_iters"]
    assert late.losses == calm.losses
    assert all(delays(rank) == (0, 0.0) for rank in calm.ranks)
    of_a_stage = ranks // 4
    microbatches = flags["global_batch_size"] // of_a_stage
    for rank, log in enumerate(late.ranks):
        pauses = 2 if rank // of_a_stage == 2 else 0
        times, seconds = delays(log)
        assert times == 2 * flags["train_iters"] * microbatches + pauses
        assert seconds > pauses
