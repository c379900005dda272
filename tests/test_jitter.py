"""Stages that are late by chance neither deadlock nor change a digit."""

from typing import Any

import pytest

from tests.harness import REPOSITORY, gpt_args, run_torchrun


def losses(ranks: int, jitter_ms: float, **flags: Any) -> list[tuple[int, str]]:
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
    runner = (str(REPOSITORY / "tests" / "jitter_runner.py"), "--cpu")
    env = {"JITTER_MS": str(jitter_ms)}
    return run_torchrun(ranks, argv, launcher=runner, env=env, timeout=540).losses


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
    calm = losses(ranks, 0, **flags)
    assert len(calm) == flags["train_iters"]
    assert losses(ranks, 4, **flags) == calm
