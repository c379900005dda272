"""NVIDIA's own pretrain_gpt.py, unmodified, on the Megatron of its checkout.

    MEGATRON_LM_CHECKOUT=PATH pytest -m checkout

The checkout has to be of the release that is installed, whose wheel has the compiled helpers of the
data sets.
"""

import os
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.support.gpt import ASYNC, PRETRAIN_GPT, Value, gpt_args
from tests.support.output import RunResult
from tests.support.torchrun import run_torchrun

pytestmark = [pytest.mark.slow, pytest.mark.checkout, pytest.mark.timeout(1200)]

STAGES: Mapping[str, Value] = {"pipeline_model_parallel_size": 2}
CORRECTED: Mapping[str, Value] = {**STAGES, **ASYNC, "delay_correction": "error-feedback"}


@pytest.fixture(scope="module")
def checkout() -> Path:
    folder = os.environ.get("MEGATRON_LM_CHECKOUT")
    if not folder:
        pytest.skip("set MEGATRON_LM_CHECKOUT to a checkout of Megatron-LM")
    return Path(folder).resolve()


def train(script: Path, checkout: Path, **flags: Value) -> RunResult:
    """Run a script on the checkout's Megatron."""
    path = os.pathsep.join(filter(None, [str(checkout), os.environ.get("PYTHONPATH")]))
    result = run_torchrun(
        2,
        gpt_args(**flags, hidden_dropout=0, attention_dropout=0),
        script=script,
        launcher="plugin",
        env={"PYTHONPATH": os.pathsep.join([path, str(Path(__file__).parents[2])])},
    )
    assert len(result.losses) == 6
    return result


@pytest.mark.parametrize("flags", [STAGES, CORRECTED], ids=["synchronous", "asynchronous"])
def test_it_trains_as_our_script_does(checkout: Path, flags: Mapping[str, Value]) -> None:
    """To the last printed digit."""
    theirs, ours = (
        train(script, checkout, **flags) for script in (checkout / "pretrain_gpt.py", PRETRAIN_GPT)
    )
    assert theirs.losses == ours.losses
    assert theirs.grad_norms == ours.grad_norms


def test_its_hybrid_models_train_as_ours_do(checkout: Path) -> None:
    flags: dict[str, Value] = {
        **CORRECTED,
        "hybrid_layer_pattern": "*-|*E",
        "num_experts": 4,
        "disable_bias_linear": True,
        "spec": ("megatron.core.models.hybrid.hybrid_layer_specs", "hybrid_stack_spec"),
    }
    theirs, ours = (
        train(script, checkout, **flags)
        for script in (checkout / "pretrain_hybrid.py", PRETRAIN_GPT)
    )
    assert theirs.losses == ours.losses
