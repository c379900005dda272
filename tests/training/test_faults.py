"""Runs that fail: each rank ends by itself, the message says why, the last checkpoint is whole.

The ranks here have no launcher that would end them when one of them fails; under torchrun the same
faults are among the slow tests.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.support.datasets import write_data
from tests.support.gpt import ASYNC
from tests.support.preludes import UNREADABLE, WRITTEN, killed, poisoned
from tests.support.steps import (
    Outcome,
    Step,
    assert_continues,
    loads,
    run_steps,
    saves,
    tracked,
)

CORRECTED: Mapping[str, Any] = {**ASYNC, "delay_correction": "error-feedback"}
STAGES_2: Mapping[str, Any] = {"pipeline_model_parallel_size": 2}
TORCH: Mapping[str, Any] = {"ckpt_format": "torch"}
PLAIN: Mapping[str, Any] = {**ASYNC, **STAGES_2, **TORCH}
SHARDED: Mapping[str, Any] = {**CORRECTED, **STAGES_2, "ckpt_format": "torch_dist"}
UNCHECKED: Mapping[str, Any] = {"no_check_for_nan_in_loss_and_grad": True}
BACKGROUND: Mapping[str, Any] = {"async_save": True, "use_persistent_ckpt_worker": True}
REPLICAS_2: Mapping[str, Any] = {**ASYNC, **TORCH, "use_distributed_optimizer": True}


# From iteration 5 on no file of this rank, or of a process that writes for it, can grow beyond
# 128 KiB: what a full disk does to a save.
FULL_DISK = """
import os, psutil, resource
from megatron.training import get_args, training
train_step = training.train_step
def filling(*args, **kwargs):
    if get_args().curr_iteration == 4:
        me = psutil.Process()
        for process in (me, *me.children(recursive=True)):
            resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (1 << 17, 1 << 17))
    return train_step(*args, **kwargs)
training.train_step = filling
"""

# A combination that is refused, if it were not.
UNREFUSED = """
from megatron_async.config.validation import own_flags
kept = [rule for rule in own_flags.RULES if rule.name != "second_grad_buffer_fp32_accumulation"]
assert len(kept) == len(own_flags.RULES) - 1
own_flags.RULES = tuple(kept)
"""
TWO_REDUCTIONS: Mapping[str, Any] = {
    **REPLICAS_2,
    "overlap_grad_reduce": True,
    "ddp_bucket_size": 3000,
    "second_grad_buffer": True,
}
ACCUMULATED: Mapping[str, Any] = {"ddp_reduce_scatter_with_fp32_accumulation": True}


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("faults")


@pytest.fixture(scope="module")
def outcomes(directory: Path) -> dict[str, Outcome]:
    cut(write_data(directory).with_suffix(".bin"))
    short: dict[str, Any] = {
        **PLAIN,
        "mock_data": None,
        "data_path": "{dir}/data",
        "split": "100,0,0",
        "vocab_size": 256,
    }
    full: dict[str, Any] = {**SHARDED, **saves("full")}
    background: dict[str, Any] = {**SHARDED, **BACKGROUND, **saves("background")}
    unended: dict[str, Any] = {**SHARDED, **BACKGROUND, **saves("unended")}
    return run_steps(
        2,
        [
            Step("uninterrupted", PLAIN),
            # Megatron's own check is off: nobody but the update looks.
            Step("nan", {**PLAIN, **saves("nan", 1), **UNCHECKED}, prelude=poisoned(1, "nan")),
            Step("nan resumed", {**PLAIN, **loads("nan")}),
            Step("inf", {**REPLICAS_2, **saves("inf", 1)}, prelude=poisoned(1, "inf")),
            Step("inf resumed", {**REPLICAS_2, **loads("inf")}),
            Step("killed", {**PLAIN, **saves("killed")}, prelude=killed(iteration=4)),
            Step("killed resumed", {**PLAIN, **loads("killed")}),
            Step("unreadable", {**PLAIN, **saves("unreadable")}, prelude=UNREADABLE),
            Step("unreadable resumed", {**PLAIN, **loads("unreadable")}),
            Step("short data", short),
            Step("sharded", SHARDED),
            Step("full", full, prelude=FULL_DISK),
            Step("full resumed", {**SHARDED, **loads("full")}),
            Step("background", background, prelude=WRITTEN + FULL_DISK),
            Step("background resumed", {**SHARDED, **loads("background")}),
            Step("one reduction", {**TWO_REDUCTIONS, **ACCUMULATED, "second_grad_buffer": None}),
            Step("two reductions", {**TWO_REDUCTIONS, **ACCUMULATED}, prelude=UNREFUSED),
            Step("unended", unended, prelude=WRITTEN + killed(iteration=6)),
        ],
        directory,
        may_fail=True,
    )


def assert_ended_by_themselves(outcome: Outcome) -> None:
    assert outcome.failed
    assert all(code not in (0, None) for code in outcome.codes), outcome.codes


@pytest.mark.parametrize(
    ("name", "like"),
    [
        ("nan", "uninterrupted"),
        ("killed", "uninterrupted"),
        ("unreadable", "uninterrupted"),
        ("full", "sharded"),
        ("background", "sharded"),
    ],
)
def test_a_failed_run_goes_on_from_its_last_checkpoint(
    outcomes: dict[str, Outcome], directory: Path, name: str, like: str
) -> None:
    assert_ended_by_themselves(outcomes[name])
    assert tracked(directory / name) == 3
    resumed, expected = outcomes[f"{name} resumed"], outcomes[like]
    assert_continues(resumed, expected, done=3)


def own_errors(outcome: Outcome) -> set[str]:
    """The package's messages; each rank may print one."""
    return set(re.findall(r"^RuntimeError: (megatron_async: .*)$", outcome.log, flags=re.MULTILINE))


def rejected(outcome: Outcome) -> set[str]:
    """What ranks say of a gradient norm, each for itself, or whichever was first."""
    pattern = r"^RuntimeError: rank \d, (iteration \d+: the gradient norm is \w+)\."
    return set(re.findall(pattern, outcome.log, flags=re.MULTILINE))


def test_a_gradient_that_is_not_a_number_stops_the_run(
    outcomes: dict[str, Outcome], directory: Path
) -> None:
    assert_ended_by_themselves(outcomes["nan"])
    [message] = rejected(outcomes["nan"])
    assert message.endswith("the gradient norm is nan")
    assert tracked(directory / "nan") == 3
    assert not (directory / "nan" / "iter_0000004").exists()


def test_an_infinite_gradient_on_one_replica_stops_both(
    outcomes: dict[str, Outcome], directory: Path
) -> None:
    assert_ended_by_themselves(outcomes["inf"])
    [message] = rejected(outcomes["inf"])
    assert message.endswith("the gradient norm is inf")
    assert tracked(directory / "inf") == 3
    assert not (directory / "inf" / "iter_0000004").exists()
    assert list(outcomes["inf resumed"].by_iteration) == [4, 5, 6, 7]


def test_a_killed_rank_is_noticed_by_the_others(outcomes: dict[str, Outcome]) -> None:
    assert outcomes["killed"].codes == [1, -9]
    assert re.search(r"Connection (closed|reset) by peer", outcomes["killed"].log)


def test_a_checkpoint_written_in_the_background_counts_as_soon_as_it_is_written(
    outcomes: dict[str, Outcome], directory: Path
) -> None:
    assert_ended_by_themselves(outcomes["unended"])
    assert tracked(directory / "unended") == 3


def test_what_the_data_loader_raised_is_printed(outcomes: dict[str, Outcome]) -> None:
    assert "OSError: the file system went away" in outcomes["unreadable"].log


@pytest.mark.parametrize("name", ["full", "background"])
def test_what_could_not_be_written_where_is_printed(
    outcomes: dict[str, Outcome], directory: Path, name: str
) -> None:
    messages = own_errors(outcomes[name])
    assert messages
    for message in messages:
        assert f"the checkpoint could not be written to {directory / name}, where " in message
        assert message.endswith("The last whole one is that of iteration 3.")


def test_a_data_file_that_ends_early_is_named_before_training(
    outcomes: dict[str, Outcome], directory: Path
) -> None:
    assert_ended_by_themselves(outcomes["short data"])
    [message] = own_errors(outcomes["short data"])
    size = (directory / "data.bin").stat().st_size
    assert f"{directory / 'data.bin'} has {size} bytes" in message
    assert "the file ends early" in message
    assert not re.search(r" iteration +1/", outcomes["short data"].log)


def test_megatron_keeps_one_reduction_in_flight_with_fp32_accumulation(
    outcomes: dict[str, Outcome],
) -> None:
    """Why it is refused with --second-grad-buffer, which has two: a bucket's reduction finishes the
    one dispatched before it, which is then missing."""
    assert not outcomes["one reduction"].failed
    assert_ended_by_themselves(outcomes["two reductions"])
    assert (
        "Communication call has not been issued for this bucket" in outcomes["two reductions"].log
    )
