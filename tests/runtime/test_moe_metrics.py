"""The log lines of a mixture of experts."""

from typing import Any

import pytest

from tests.support.gpt import gpt_args
from tests.support.shared_jobs import MODELS
from tests.support.torchrun import run_torchrun

EXPERTS = {
    **MODELS["moe"],
    "pipeline_model_parallel_size": 2,
    "num_layers": 2,
    "train_iters": 5,
    "moe_z_loss_coeff": 0.001,
    "pipeline_schedule": "pipedream-2bw",
    "hidden_dropout": 0,
    "attention_dropout": 0,
}


def logged(**flags: Any) -> dict[str, list[float]]:
    lines = run_torchrun(2, gpt_args(**EXPERTS, **flags), launcher="plugin").iterations
    return {
        name: [float(line.fields[name]) for line in lines]
        for name in ("load_balancing_loss", "z_loss")
    }


@pytest.mark.slow
def test_metrics_are_the_same_with_a_second_gradient_buffer() -> None:
    plain = logged()
    late = logged(overlap_grad_reduce=True, second_grad_buffer=True)
    for name, values in plain.items():
        assert len(values) == 5
        assert min(values) > 0
        assert late[name] == pytest.approx(values, rel=1e-5)
