"""What Megatron offers to look at a run with: it changes nothing, and shows what is there."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.gpt import ASYNC
from tests.support.steps import Outcome, Step, run_steps

STAGES_2: Mapping[str, Any] = {"pipeline_model_parallel_size": 2}
REPLICAS_2: Mapping[str, Any] = {
    **ASYNC,
    "use_distributed_optimizer": True,
    "overlap_grad_reduce": True,
    "overlap_param_gather": True,
    "bf16": True,
}
FROM_FILES: Mapping[str, Any] = {
    **ASYNC,
    **STAGES_2,
    "mock_data": None,
    "train_data_path": "{dir}/train",
    "valid_data_path": "{dir}/valid",
    "data_cache_path": "{dir}/cache",
    "vocab_size": 256,
    # Stages exchange whole microbatches only, and a full validation ends with what is left.
    "micro_batch_size": 1,
    "global_batch_size": 4,
}

# Weights that no optimizer has, on both stages.
PARTLY_FROZEN = """
from megatron.core.models.gpt.gpt_model import GPTModel
make = GPTModel.__init__
def freeze(self, *args, **kwargs):
    make(self, *args, **kwargs)
    for name, parameter in self.named_parameters():
        if "position_embeddings" in name or "input_layernorm" in name:
            parameter.requires_grad = False
GPTModel.__init__ = freeze
"""
NORMED: Mapping[str, Any] = {**ASYNC, **STAGES_2, "log_params_norm": True, "ckpt_format": "torch"}
SHARDED: Mapping[str, Any] = {**REPLICAS_2, "log_params_norm": True}
UNDEFERRED: Mapping[str, Any] = {"no_deferred_update": True}
NORM_STEPS = (
    Step("norm undeferred", {**NORMED, **UNDEFERRED}, PARTLY_FROZEN),
    Step("norm", {**NORMED, "save": "{dir}/norm", "save_interval": 4}, PARTLY_FROZEN),
    Step("norm resumed", {**NORMED, "load": "{dir}/norm", "ckpt_step": 4}, PARTLY_FROZEN),
    Step("sharded norm undeferred", {**SHARDED, **UNDEFERRED}),
    Step("sharded norm", SHARDED),
)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from megatron_async.tools import data

    made = tmp_path_factory.mktemp("diagnostics")
    text = Path(__file__).read_text().replace("\n", " ")
    for name, part in (("train", text[:4000]), ("valid", text[4000:4400])):
        (made / f"{name}.txt").write_text(part)
        argv = ["--input", str(made / f"{name}.txt"), "--output", str(made / name)]
        assert data.main(argv) == 0
    return made


@pytest.fixture(scope="module")
def outcomes(directory: Path) -> dict[str, Outcome]:
    # A batch does not have all tokens, and the others' embeddings have no gradient.
    counted: dict[str, Any] = {
        **STAGES_2,
        "log_num_zeros_in_grad": True,
        "untie_embeddings_and_output_weights": True,
        "vocab_size": 512,
    }

    def kept(name: str) -> dict[str, Any]:
        more: dict[str, Any] = {"save": f"{{dir}}/{name}", "save_interval": 100}
        return {**counted, **more, "save_wgrads_interval": 1, "exit_interval": 1}

    return run_steps(
        2,
        [
            Step("no evaluation", {**FROM_FILES, "eval_interval": 1, "eval_iters": 0}),
            Step(
                "full validation",
                {
                    **FROM_FILES,
                    "eval_interval": 3,
                    "eval_iters": 1,
                    "full_validation": True,
                    "multiple_validation_sets": True,
                },
            ),
            Step("hashes", {**REPLICAS_2, "check_weight_hash_across_dp_replicas_interval": 2}),
            Step("no hashes", REPLICAS_2),
            Step("Megatron", {**kept("megatron"), "ckpt_format": "torch"}),
            Step(
                "undeferred",
                {**ASYNC, **kept("undeferred"), "no_deferred_update": True, "ckpt_format": "torch"},
            ),
            Step("deferred", {**ASYNC, **counted}),
            *NORM_STEPS,
        ],
        directory,
    )


def test_a_full_validation_leaves_training_alone(outcomes: dict[str, Outcome]) -> None:
    found, wanted = outcomes["full validation"], outcomes["no evaluation"]
    assert len(wanted.losses) == 7
    assert found.losses == wanted.losses
    assert found.norms == wanted.norms
    assert wanted.validation == []
    assert [done for done, _ in found.validation] == [3, 6, 7]
    assert "validation-0 loss at iteration 7 on validation set" in found.log


def test_weight_hashes_are_compared_and_leave_training_alone(
    outcomes: dict[str, Outcome],
) -> None:
    found = re.findall(r"Weight hashes match after (\d+) iterations", outcomes["hashes"].log)
    assert found == ["0", "2", "4", "6"]
    assert outcomes["hashes"].losses == outcomes["no hashes"].losses
    assert outcomes["hashes"].norms == outcomes["no hashes"].norms


def zeros(outcome: Outcome) -> dict[int, float]:
    """Iteration -> number of zeros in the gradient, as logged."""
    lines = re.findall(r" iteration +(\d+)/ *\d+ \|.* num zeros: ([\d.]+) \|", outcome.log)
    return {int(iteration): float(count) for iteration, count in lines}


def test_zeros_in_the_gradient_are_those_that_megatron_counts(
    outcomes: dict[str, Outcome],
) -> None:
    """In the first iteration nothing is delayed yet."""
    expected = zeros(outcomes["Megatron"])[1]
    assert expected > 0
    assert zeros(outcomes["undeferred"])[1] == expected
    # As the gradient norm's, a deferred update's is logged one iteration later.
    deferred = zeros(outcomes["deferred"])
    assert 1 not in deferred
    assert deferred[2] == expected


def params_norms(outcome: Outcome) -> dict[int, float]:
    """Iteration -> norm of the weights, as logged."""
    lines = re.findall(r" iteration +(\d+)/ *\d+ \|.* params norm: ([\d.]+) \|", outcome.log)
    return {int(iteration): float(norm) for iteration, norm in lines}


@pytest.mark.parametrize("name", ["norm", "sharded norm"])
def test_norm_of_the_weights_is_that_which_megatron_sums(
    outcomes: dict[str, Outcome], name: str
) -> None:
    """Undeferred it is Megatron's own sum over the weights that the iteration made; deferred it
    comes two iterations later, but where the pipeline is empty."""
    wanted = params_norms(outcomes[f"{name} undeferred"])
    assert len(set(wanted.values())) == 7
    found = params_norms(outcomes[name])
    assert list(found) == [2, 3, 4, 5, 6, 7]
    for iteration, norm in found.items():
        if iteration == 7:
            assert norm == pytest.approx(wanted[7], abs=1.5e-3)
        elif iteration > 2:
            assert norm == pytest.approx(wanted[iteration - 2], abs=1.5e-3)
    assert outcomes[name].losses == pytest.approx(outcomes[f"{name} undeferred"].losses, rel=1e-3)


def test_norm_of_the_weights_goes_on_after_a_resume(outcomes: dict[str, Outcome]) -> None:
    wanted = params_norms(outcomes["norm"])
    assert params_norms(outcomes["norm resumed"]) == {i: wanted[i] for i in (5, 6, 7)}
    assert outcomes["norm resumed"].losses == outcomes["norm"].losses[4:]


def test_saved_gradients_are_those_that_megatron_saves(
    outcomes: dict[str, Outcome], directory: Path
) -> None:
    assert outcomes["undeferred"].losses == outcomes["Megatron"].losses
    for stage in (0, 1):
        found, wanted = (
            gradients(directory / name / "wgrads" / "iter_0000001" / f"mp_rank_00_{stage:03d}.pth")
            for name in ("undeferred", "megatron")
        )
        assert wanted
        assert found.keys() == wanted.keys()
        for name, gradient in wanted.items():
            assert torch.equal(found[name], gradient), name
            assert gradient.any(), name


def gradients(file: Path) -> dict[str, Any]:
    [chunk] = torch.load(file).values()
    return dict(chunk)
