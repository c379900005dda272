"""What is said of a checkpoint whose weights or experts do not fit the run."""

import argparse

import pytest

from megatron_async.checkpoint.weights import check_experts


def arguments(experts: int, **others: object) -> argparse.Namespace:
    values = {"num_experts": 4, "no_load_optim": None, "finetune": False, **others}
    return argparse.Namespace(expert_model_parallel_size=experts, **values)


@pytest.mark.parametrize(("before", "now"), [(1, 2), (4, 1)])
def test_expert_parallelism_is_taken_up_or_dropped(before: int, now: int) -> None:
    with pytest.raises(RuntimeError, match=r"^megatron_async: the checkpoint in there ") as error:
        check_experts(arguments(now), arguments(before), "there")
    assert f"saved with --expert-model-parallel-size {before}" in str(error.value)
    assert f"Go on with --expert-model-parallel-size {before}" in str(error.value)
    assert "--no-load-optim" in str(error.value)


@pytest.mark.parametrize(
    "args",
    [
        arguments(1),
        arguments(2, no_load_optim=True),
        arguments(2, finetune=True),
        arguments(2, num_experts=None),
    ],
)
def test_what_megatron_can_load(args: argparse.Namespace) -> None:
    check_experts(args, arguments(1), "there")
    check_experts(args, None, "there")


def test_between_two_numbers_of_expert_ranks() -> None:
    check_experts(arguments(2), arguments(4), "there")
