"""A mixture of experts with biases in its routers, which also predicts a further token: exactly
resumed, the biases of two weight versions included."""

from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.support.gpt import Value
from tests.support.steps import Outcome, Step, assert_continues, loads, run_steps, saves

MODEL: Mapping[str, Value] = {
    "num_experts": 4,
    "moe_router_topk": 2,
    "moe_router_score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
    # So large that another bias sends tokens to other experts.
    "moe_router_bias_update_rate": 0.05,
    "moe_router_load_balancing_type": "global_aux_loss",
    "moe_aux_loss_coeff": 0.1,
    "disable_bias_linear": True,
    "mtp_num_layers": 1,
    "position_embedding_type": "rope",
    "untie_embeddings_and_output_weights": True,
    "pipeline_model_parallel_size": 2,
    "pipeline_schedule": "fresh-2bw",
    "delayed_microbatches": 2,
}
FORMATS = ["torch_dist", "torch"]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Outcome]:
    directory: Path = tmp_path_factory.mktemp("balanced")
    steps = []
    for name in FORMATS:
        flags: dict[str, Value] = {**MODEL, "ckpt_format": name}
        steps.append(Step(name, {**flags, **saves(name)}))
        steps.append(Step(f"{name} resumed", {**flags, **loads(name, 3)}))
    return run_steps(2, steps, directory)


@pytest.mark.parametrize("name", FORMATS)
def test_it_goes_on_where_it_was_saved(outcomes: dict[str, Outcome], name: str) -> None:
    assert_continues(outcomes[f"{name} resumed"], outcomes[name], done=3)
    assert "with weight versions 2 and 3" in outcomes[f"{name} resumed"].notices[-1]
