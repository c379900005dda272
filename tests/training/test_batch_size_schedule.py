"""A number of microbatches that grows while microbatches of the next batch are in flight."""

from pathlib import Path
from typing import Any

import pytest

from tests.support.gpt import gpt_args
from tests.support.torchrun import run_torchrun

SEQUENCE = 32
SCHEDULE = f"0:6 {18 * SEQUENCE}:8 {42 * SEQUENCE}:12"
"""Batches of 6 sequences for three iterations, of 8 for three more, then of 12; thresholds are
tokens."""
FLAGS: dict[str, Any] = {
    "pipeline_schedule": "pipedream-2bw",
    "num_layers": 4,
    "hidden_size": 32,
    "seq_length": SEQUENCE,
    "max_position_embeddings": SEQUENCE,
    "micro_batch_size": 2,
    "global_batch_size": None,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "train_iters": 9,
    "step_batch_size_schedule": SCHEDULE,
    "ckpt_format": "torch_dist",
}


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Flags that start a run of any layout from the same weights."""
    directory: Path = tmp_path_factory.mktemp("start")
    argv = gpt_args(
        **{
            **FLAGS,
            "pipeline_schedule": None,
            "step_batch_size_schedule": None,
            "global_batch_size": 12,
            "train_iters": 1,
            "save": directory,
            "save_interval": 1,
            "no_save_optim": True,
        }
    )
    run_torchrun(1, argv, launcher="plain")
    return {"load": directory, "finetune": True, "no_load_optim": True, "no_load_rng": True}


def test_losses_agree_across_stages(start: dict[str, Any]) -> None:
    """With one stage nothing is forwarded ahead, so it shows what each batch's delay has to be."""
    results = {}
    for stages in (1, 4):
        argv = gpt_args(**{**FLAGS, **start, "pipeline_model_parallel_size": stages})
        results[stages] = run_torchrun(stages, argv, launcher="plugin")
    sizes = [row.fields["global batch size"] for row in results[1].iterations]
    assert sizes == [row.fields["global batch size"] for row in results[4].iterations]
    assert len(set(sizes)) == 3
    alone, piped = (results[stages].loss_values for stages in (1, 4))
    assert piped == pytest.approx(alone, rel=2e-6)
