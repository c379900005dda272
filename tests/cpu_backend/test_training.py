"""Megatron on CPU ranks: it trains alike in all layouts, saves, and resumes exactly.

Jobs use the plain launcher: Megatron's own schedules and none of the package's other hooks.
"""

import math
from pathlib import Path
from typing import Any

import pytest

from tests.support.gpt import gpt_args
from tests.support.output import RunResult, read_scalars
from tests.support.torchrun import run_python, run_torchrun

NO_DROPOUT = {"hidden_dropout": 0, "attention_dropout": 0}


def assert_same(result: RunResult, reference: RunResult, first: int, last: int) -> None:
    """Compare losses to 6 digits and gradient norms to the last printed one, with rounding."""
    assert [number for number, _ in result.losses] == list(range(first, last + 1))
    losses, expected = result.loss_values, reference.loss_values
    # The second printed loss of a run has fewer digits, see the harness.
    for number in (number for number in losses if number != first + 1):
        assert losses[number] == pytest.approx(expected[number], rel=2e-6), f"loss {number}"
    norms, expected_norms = dict(result.grad_norms), dict(reference.grad_norms)
    for number in norms:
        assert float(norms[number]) == pytest.approx(float(expected_norms[number]), abs=1.1e-3)


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> tuple[RunResult, Path]:
    """Six iterations on one rank without dropout, and its checkpoint after the third."""
    directory = tmp_path_factory.mktemp("reference")
    result = run_torchrun(1, gpt_args(**NO_DROPOUT, train_iters=6, save=directory, save_interval=3))
    assert len(result.losses) == 6
    return result, directory


# Each goes on from the reference's checkpoint, whose weights and Adam states it reshards.
LAYOUTS: dict[str, dict[str, Any]] = {
    "pipeline": {"pipeline_model_parallel_size": 2},
    "interleaved, recomputed": {
        "pipeline_model_parallel_size": 2,
        "num_layers_per_virtual_pipeline_stage": 1,
        "recompute_granularity": "full",
        "recompute_method": "uniform",
        "recompute_num_layers": 1,
    },
    "tensor, sequence": {"tensor_model_parallel_size": 2, "sequence_parallel": True},
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_agree_with_one_rank(layout: str, reference: tuple[RunResult, Path]) -> None:
    expected, checkpoint = reference
    argv = gpt_args(**NO_DROPOUT, **LAYOUTS[layout], train_iters=6, load=checkpoint, ckpt_step=3)
    assert_same(run_torchrun(2, argv), expected, 4, 6)


def test_distributed_optimizer_with_overlaps_agrees_with_one_rank(
    reference: tuple[RunResult, Path],
) -> None:
    argv = gpt_args(
        **NO_DROPOUT,
        train_iters=4,
        use_distributed_optimizer=True,
        overlap_grad_reduce=True,
        overlap_param_gather=True,
    )
    assert_same(run_torchrun(2, argv), reference[0], 1, 4)


def resumed(nproc: int, directory: Path, argv: dict[str, Any]) -> tuple[RunResult, RunResult]:
    """Run four iterations at once, and the last two again from the checkpoint in between."""
    argv = {**argv, "train_iters": 4, "save": directory, "save_interval": 2}
    whole = run_torchrun(nproc, gpt_args(**argv))
    rest = run_torchrun(nproc, gpt_args(**argv, load=directory, ckpt_step=2))
    return whole, rest


def assert_exact(whole: RunResult, rest: RunResult) -> None:
    """Compare a resumed run's losses, norms and validation losses, digit by digit."""
    assert [number for number, _ in rest.losses] == [3, 4]
    # The loss of the fourth iteration is printed as the mean of two.
    third, fourth = (float(loss) for _, loss in whole.losses[2:])
    assert rest.losses[0] == whole.losses[2]
    assert float(rest.losses[1][1]) == pytest.approx((third + fourth) / 2, rel=2e-7)
    assert rest.grad_norms == whole.grad_norms[2:]
    assert rest.learning_rates == whole.learning_rates[2:]


@pytest.fixture(scope="module")
def indexed_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A .bin/.idx dataset of 40 documents, written by Megatron."""
    prefix = tmp_path_factory.mktemp("data") / "tokens"
    run_python(
        """
        import sys
        from megatron_async import cpu_backend
        cpu_backend.install()
        import numpy, torch
        from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder
        builder = IndexedDatasetBuilder(sys.argv[1] + ".bin", dtype=numpy.uint16)
        for document in range(40):
            tokens = (torch.arange(90) * (document % 7 + 1) + document) % 255
            builder.add_document(tokens, [len(tokens)])
        builder.finalize(sys.argv[1] + ".idx")
        print("null")
        """,
        str(prefix),
    )
    return prefix


@pytest.mark.slow
def test_resumes_exactly_in_torch_format_with_dropout_on_indexed_data(
    tmp_path: Path, indexed_data: Path
) -> None:
    whole, rest = resumed(
        2,
        tmp_path / "checkpoint",
        {
            "ckpt_format": "torch",
            "pipeline_model_parallel_size": 2,
            "mock_data": None,
            "data_path": indexed_data,
            "data_cache_path": tmp_path / "cache",
            "split": "80,10,10",
            "num_workers": 1,
            "eval_iters": 1,
            "eval_interval": 4,
            "tensorboard_dir": tmp_path / "tensorboard",
            "tensorboard_log_interval": 1,
            "wandb_project": "test",
            "wandb_exp_name": "test",
            "wandb_save_dir": tmp_path,
            "log_memory_to_tensorboard": True,
        },
    )
    assert_exact(whole, rest)
    assert whole.validation_losses == rest.validation_losses
    assert len(whole.validation_losses) == 3  # at 4, and at the end on both sets
    assert list(tmp_path.glob("wandb/offline-run-*/run-*.wandb"))
    scalars = read_scalars(tmp_path / "tensorboard")
    assert set(scalars["lm loss"]) == {1, 2, 3, 4}
    assert scalars["lm loss"][4] == pytest.approx(whole.loss_values[4], rel=1e-6)
    assert all(value > 0 for value in scalars["mem-allocated-bytes"].values())


def test_resumes_exactly_in_torch_dist_format_with_dropout_in_bf16(tmp_path: Path) -> None:
    whole, rest = resumed(
        2,
        tmp_path,
        {
            "bf16": True,
            "use_distributed_optimizer": True,
            "overlap_grad_reduce": True,
            "overlap_param_gather": True,
        },
    )
    assert_exact(whole, rest)


@pytest.mark.slow
def test_dist_muon_agrees_with_muon_on_one_rank_in_bf16() -> None:
    argv = {**NO_DROPOUT, "bf16": True, "train_iters": 3}
    muon = run_torchrun(1, gpt_args(**argv, optimizer="muon"))
    dist_muon = run_torchrun(2, gpt_args(**argv, optimizer="dist_muon"))
    for number, loss in muon.loss_values.items():
        assert dist_muon.loss_values[number] == pytest.approx(loss, rel=1e-3)
    assert muon.loss_values[3] < muon.loss_values[1] - 0.1


def test_expert_parallelism_agrees_with_one_rank(tmp_path: Path) -> None:
    # Experts start from other seeds on other ranks, so both start from one checkpoint; Megatron
    # cannot reshard the optimizer over expert parallelism, so it is one without state.
    argv: dict[str, Any] = {
        **NO_DROPOUT,
        "num_experts": 4,
        "moe_router_topk": 2,
        "moe_token_dispatcher_type": "alltoall",
        "moe_router_load_balancing_type": "aux_loss",
        "moe_aux_loss_coeff": "1e-2",
        "swiglu": True,
        "disable_bias_linear": True,
        "optimizer": "sgd",
        "sgd_momentum": 0,
        "lr": 0.5,
        "min_lr": 0.5,
        "train_iters": 4,
    }
    one = run_torchrun(1, gpt_args(**argv, save=tmp_path, save_interval=1, save_retain_interval=1))
    two = run_torchrun(
        2,
        gpt_args(
            **argv, expert_model_parallel_size=2, load=tmp_path, ckpt_step=1, no_load_optim=True
        ),
    )
    assert_same(two, one, 2, 4)


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["sgd", "soap", "lion", "muon"])
def test_other_optimizers_train(optimizer: str) -> None:
    result = run_torchrun(
        2,
        gpt_args(
            optimizer=optimizer, pipeline_model_parallel_size=2, sgd_momentum=0, train_iters=4
        ),
    )
    losses = list(result.loss_values.values())
    assert len(losses) == 4
    assert all(math.isfinite(loss) for loss in losses)
    assert losses[-1] < losses[0]


@pytest.mark.slow
@pytest.mark.parametrize("layout", [{}, {"tensor_model_parallel_size": 2}])
def test_other_layouts_agree_with_one_rank(
    layout: dict[str, Any], reference: tuple[RunResult, Path]
) -> None:
    expected, checkpoint = reference
    argv = gpt_args(**NO_DROPOUT, **layout, train_iters=6, load=checkpoint, ckpt_step=3)
    assert_same(run_torchrun(2, argv), expected, 4, 6)


@pytest.mark.slow
def test_resumes_exactly_after_an_asynchronous_save(tmp_path: Path) -> None:
    whole, rest = resumed(
        2,
        tmp_path,
        {
            "async_save": True,
            "use_persistent_ckpt_worker": True,
            "pipeline_model_parallel_size": 2,
        },
    )
    assert_exact(whole, rest)


@pytest.mark.slow
def test_a_modern_model_trains() -> None:
    result = run_torchrun(
        1,
        gpt_args(
            position_embedding_type="rope",
            normalization="RMSNorm",
            swiglu=True,
            disable_bias_linear=True,
            untie_embeddings_and_output_weights=True,
            group_query_attention=True,
            num_query_groups=2,
            train_iters=3,
        ),
    )
    assert result.loss_values[3] < result.loss_values[1]
    assert "--no-rope-fusion" in result.stdout.splitlines()[0]
