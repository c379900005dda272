"""Runs that are saved, stopped and resumed; checkpoints of one kind of run loaded by another."""

import math
import pickletools
import shutil
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.checkpoint.old_formats import write_as
from tests.support.gpt import ASYNC, Value, gpt_args
from tests.support.preludes import signalled
from tests.support.steps import (
    COMMON_FLAGS,
    Outcome,
    Step,
    assert_continues,
    loads,
    run_steps,
    saves,
)
from tests.support.torchrun import run_torchrun

pytestmark = pytest.mark.core

CORRECTED: Mapping[str, Value] = {**ASYNC, "delay_correction": "error-feedback"}
ADAPTIVE: Mapping[str, Value] = {**CORRECTED, "delay_correction_adaptive_strength": True}
NESTEROV: Mapping[str, Value] = {**ASYNC, "delay_correction": "nesterov"}
TORCH: Mapping[str, Value] = {"ckpt_format": "torch"}
TORCH_DIST: Mapping[str, Value] = {"ckpt_format": "torch_dist"}
NO_DROPOUT: Mapping[str, Value] = {"hidden_dropout": 0, "attention_dropout": 0}
STAGES_2: Mapping[str, Value] = {"pipeline_model_parallel_size": 2}
STAGES_4: Mapping[str, Value] = {"pipeline_model_parallel_size": 4}
DISTRIBUTED: Mapping[str, Value] = {**STAGES_2, "use_distributed_optimizer": True, "bf16": True}
MUON: Mapping[str, Value] = {**STAGES_2, "optimizer": "muon", "bf16": True}


# No file can grow beyond 64 KiB: what a full disk does to a save.
FULL_DISK = """
import resource
resource.setrlimit(resource.RLIMIT_FSIZE, (65536, 65536))
"""


# What a later version of the package would write, and what earlier ones did.
LATER_FORMAT = """
from megatron_async.checkpoint import state
state.FORMAT = 4
"""
FORMAT_2 = """
from megatron_async.checkpoint import session
from tests.checkpoint.old_formats import flat
packed = session.packed
session.packed = lambda state: flat(packed(state), 2)
"""

# Refuses a state that Adam does not have, as Transformer Engine's FusedAdam does.
STRICT = """
import torch
load_state_dict = torch.optim.Optimizer.load_state_dict
def strict(self, state_dict):
    for state in state_dict["state"].values():
        if set(state) - {"step", "exp_avg", "exp_avg_sq"}:
            raise KeyError(str(set(state)))
    return load_state_dict(self, state_dict)
torch.optim.Optimizer.load_state_dict = strict
"""


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture(scope="module")
def one_rank(directory: Path) -> dict[str, Outcome]:
    """Checkpoints of one kind of run loaded by another, on one stage."""
    evaluating: dict[str, Value] = {"eval_interval": 3, "eval_iters": 2}
    # The sizes of the data sets are those of a run that evaluates, but it does not.
    silent: dict[str, Value] = {**evaluating, "start_eval_at_iter": 100}
    delayed: dict[str, Value] = {**ASYNC, **TORCH, "async_start_iteration": 3}
    corrected: dict[str, Value] = {**CORRECTED, **TORCH}
    half: dict[str, Value] = {"delay_correction_strength": 0.5}
    sharded: dict[str, Value] = {**CORRECTED, **TORCH_DIST, **silent}
    plain: dict[str, Value] = {**silent, "skip_train": True}
    distributed: dict[str, Value] = {**ASYNC, **TORCH, "use_distributed_optimizer": True}
    randomless: dict[str, Value] = {**ASYNC, **TORCH, "no_save_rng": True}
    # Later than the checkpoint of iteration 3, and still there at the end.
    passing: dict[str, Value] = {**ASYNC, **TORCH_DIST, "non_persistent_ckpt_type": "global"}
    return run_steps(
        1,
        [
            Step("synchronous", {**TORCH, **saves("synchronous", exit_interval=3)}),
            Step("from synchronous", {**ASYNC, **TORCH, **loads("synchronous")}),
            Step("delayed", {**delayed, **saves("delayed", 2)}),
            Step("delayed from 2", {**delayed, **loads("delayed", 2)}),
            Step("delayed from 4", {**delayed, **loads("delayed", 4)}),
            Step("corrected", {**corrected, **silent, **saves("corrected", exit_interval=3)}),
            Step("uninterrupted", {**corrected, **evaluating}),
            Step("plain evaluates", {**TORCH, **plain, **loads("corrected")}),
            Step("evaluates", {**corrected, **plain, **loads("corrected")}),
            Step("saves sharded", {**sharded, **saves("sharded", exit_interval=3)}),
            Step(
                "saves another format",
                {**sharded, **saves("sharded-format", exit_interval=1)},
                prelude=LATER_FORMAT,
            ),
            Step(
                "saves format 2",
                {**sharded, **saves("sharded-2", exit_interval=3)},
                prelude=FORMAT_2,
            ),
            Step("plain evaluates sharded", {**TORCH_DIST, **plain, **loads("sharded")}),
            Step("plain goes on", {**TORCH, **loads("corrected")}, prelude=STRICT),
            Step("default", {**TORCH, "pipeline_schedule": "default", **loads("corrected")}),
            Step("off", {**ASYNC, **TORCH, **loads("corrected")}, prelude=STRICT),
            Step("on", {**delayed, **CORRECTED, **loads("delayed", 4)}),
            Step("half", {**corrected, **half, **loads("corrected")}),
            Step("another", {**NESTEROV, **TORCH, **loads("corrected")}),
            Step("finetune", {**corrected, **loads("corrected"), "finetune": True}),
            Step("no optimizer", {**corrected, **loads("corrected"), "no_load_optim": True}),
            Step("arguments", {**corrected, **loads("corrected"), "use_checkpoint_args": True}),
            Step("saves distributed", {**distributed, **saves("halved", exit_interval=3)}),
            Step("saves no random state", {**randomless, **saves("randomless", exit_interval=3)}),
            Step("no random state", {**ASYNC, **TORCH, **loads("randomless"), "no_load_rng": True}),
            Step("passing", {**passing, **saves("passing", non_persistent_save_interval=4)}),
            Step("passed by", {**passing, **loads("passing", 3)}),
        ],
        directory,
    )


@pytest.fixture(scope="module")
def two_ranks(directory: Path) -> dict[str, Outcome]:
    plain: dict[str, Value] = {**ASYNC, **TORCH, **STAGES_2}
    evaluating: dict[str, Value] = {"eval_interval": 2, "eval_iters": 2}
    handled = {**plain, **saves("signalled", 100), "exit_signal_handler": True}
    sharded: dict[str, Value] = {
        **ADAPTIVE,
        **TORCH_DIST,
        "use_distributed_optimizer": True,
        "bf16": True,
        "dist_ckpt_optim_fully_reshardable": True,
    }
    fresh: dict[str, Value] = {**plain, **CORRECTED, "pipeline_schedule": "fresh-2bw"}
    return run_steps(
        2,
        [
            Step("uninterrupted", plain),
            Step("stopped", {**plain, **evaluating, **saves("stopped", 2, exit_interval=5)}),
            Step("resumed from 4", {**plain, **evaluating, **loads("stopped", 4)}),
            Step("resumed from 5", {**plain, **loads("stopped")}),
            Step("signalled", handled, prelude=signalled("SIGTERM", iteration=3, rank=1)),
            Step("resumed from signal", {**plain, **loads("signalled")}),
            Step("synchronous", {**STAGES_2, **TORCH, **saves("stages-torch", exit_interval=3)}),
            Step("as torch", {**plain, **loads("stages-torch")}),
            Step("as torch_dist", {**plain, **TORCH_DIST, **loads("stages-torch")}),
            Step("detected", {**plain, **loads("stages-torch"), "auto_detect_ckpt_format": True}),
            Step("two stages", {**plain, **NO_DROPOUT, **TORCH_DIST, **saves("stages", 3)}),
            Step("sharded", {**sharded, **saves("sharded", 3)}),
            Step("sharded resumed", {**sharded, **loads("sharded", 3)}),
            Step("fresh uninterrupted", fresh),
            Step("fresh", {**fresh, **saves("fresh", exit_interval=3)}),
            Step("fresh resumed", {**fresh, **loads("fresh")}),
            Step("fresh to all", {**fresh, "delayed_microbatches": "all", **loads("fresh")}),
            Step("fresh to 2bw", {**plain, **CORRECTED, **loads("fresh")}),
        ],
        directory,
    )


@pytest.fixture(scope="module")
def four_ranks(directory: Path, two_ranks: dict[str, Outcome]) -> dict[str, Outcome]:
    distributed: dict[str, Value] = {**CORRECTED, **DISTRIBUTED}
    muon: dict[str, Value] = {**CORRECTED, **MUON, **TORCH}
    tied: dict[str, Value] = {**CORRECTED, **STAGES_4, **TORCH}
    more_stages: dict[str, Value] = {**ASYNC, **STAGES_4, **NO_DROPOUT, **TORCH_DIST}
    return run_steps(
        4,
        [
            Step("distributed", {**distributed, **TORCH_DIST, **saves("distributed")}),
            Step("distributed resumed", {**distributed, **TORCH_DIST, **loads("distributed", 3)}),
            Step("torch", {**distributed, **TORCH, **saves("torch", exit_interval=5)}),
            Step("torch resumed", {**distributed, **TORCH, **loads("torch", 3)}),
            Step("muon", {**muon, **saves("muon")}),
            Step("muon resumed", {**muon, **loads("muon", 3)}),
            Step("tied", {**tied, **saves("tied")}),
            Step("tied resumed", {**tied, **loads("tied", 3)}),
            Step("four stages", {**more_stages, **loads("stages", 3)}),
        ],
        directory,
    )


# The same layout: to the last digit, dropout on


def test_a_fresher_run_goes_on_where_it_was_saved(two_ranks: dict[str, Outcome]) -> None:
    assert_continues(two_ranks["fresh resumed"], two_ranks["fresh uninterrupted"], done=3)


def test_how_many_microbatches_are_delayed_may_change(two_ranks: dict[str, Outcome]) -> None:
    """One of four was delayed, then all: the others too run on the weights before the newest. A
    run that starts afresh from the same checkpoint has them all on the newest."""
    changed, same = two_ranks["fresh to all"], two_ranks["fresh resumed"]
    afresh = two_ranks["fresh to 2bw"]
    assert (changed.first, len(changed.losses)) == (4, 4)
    assert any("resumes at iteration 4" in line for line in changed.notices)
    assert "starts afresh at iteration 4" in afresh.notices[-1]
    assert len({changed.losses[0], same.losses[0], afresh.losses[0]}) == 3


def test_a_run_goes_on_where_it_was_saved_after_an_evaluation(
    two_ranks: dict[str, Outcome],
) -> None:
    assert_continues(two_ranks["resumed from 4"], two_ranks["uninterrupted"], done=4)
    assert any("resumes at iteration 5" in line for line in two_ranks["resumed from 4"].notices)


def test_a_run_goes_on_where_it_was_stopped(two_ranks: dict[str, Outcome]) -> None:
    assert two_ranks["stopped"].codes == [0, 0]
    assert two_ranks["stopped"].ran == [5, 5]
    assert_continues(two_ranks["resumed from 5"], two_ranks["uninterrupted"], done=5)


def test_saving_and_evaluating_change_nothing(two_ranks: dict[str, Outcome]) -> None:
    expected = two_ranks["uninterrupted"].by_iteration
    assert two_ranks["stopped"].by_iteration == {i: expected[i] for i in range(1, 6)}
    assert [done for done, _ in two_ranks["stopped"].validation] == [2, 4]
    # Behind the resume comes that of iteration 6, and two at the end of training.
    assert [done for done, _ in two_ranks["resumed from 4"].validation] == [2, 3, 3]


def test_a_run_goes_on_where_a_signal_stopped_it(two_ranks: dict[str, Outcome]) -> None:
    done = len(two_ranks["signalled"].losses)
    assert 3 <= done <= 5
    assert_continues(two_ranks["resumed from signal"], two_ranks["uninterrupted"], done=done)


@pytest.mark.parametrize("name", ["distributed", "muon", "tied"])
def test_a_layout_resumes_exactly(four_ranks: dict[str, Outcome], name: str) -> None:
    assert_continues(four_ranks[f"{name} resumed"], four_ranks[name], done=3)
    assert "delay correction error-feedback" in four_ranks[f"{name} resumed"].notices[-1]


def test_the_torch_format_resumes_exactly(four_ranks: dict[str, Outcome]) -> None:
    expected = four_ranks["distributed"].by_iteration
    assert four_ranks["torch"].by_iteration == {i: expected[i] for i in range(1, 6)}
    assert_continues(four_ranks["torch resumed"], four_ranks["distributed"], done=3)


def test_the_fully_reshardable_format_resumes_exactly(two_ranks: dict[str, Outcome]) -> None:
    """With two buffers of the correction."""
    assert_continues(two_ranks["sharded resumed"], two_ranks["sharded"], done=3)
    notice = two_ranks["sharded resumed"].notices[-1]
    assert notice.endswith("delay correction error-feedback with adaptive strength")


# Another layout: to rounding, dropout off


def test_more_stages_agree_to_rounding(
    two_ranks: dict[str, Outcome], four_ranks: dict[str, Outcome]
) -> None:
    found, expected = four_ranks["four stages"], two_ranks["two stages"].by_iteration
    assert list(found.by_iteration) == [4, 5, 6, 7]
    for iteration, loss in found.by_iteration.items():
        assert loss == pytest.approx(expected[iteration], rel=2e-6)


# Other kinds of run


def test_a_synchronous_checkpoint_starts_an_asynchronous_run(one_rank: dict[str, Outcome]) -> None:
    assert_continues(one_rank["from synchronous"], one_rank["delayed"], done=3)
    assert one_rank["from synchronous"].notices[-1] == (
        "pipedream-2bw starts afresh at iteration 4, whose weights are version 0: the checkpoint "
        "holds no asynchronous state"
    )


@pytest.mark.parametrize("name", ["as torch_dist", "detected"])
def test_a_torch_checkpoint_of_stages_is_read_whatever_format_is_asked_for(
    two_ranks: dict[str, Outcome], name: str
) -> None:
    """Megatron looks into the first stage's file on all ranks before it reads each one's own."""
    assert list(two_ranks[name].by_iteration) == [4, 5, 6, 7]
    assert two_ranks[name].by_iteration == two_ranks["as torch"].by_iteration
    assert "starts afresh at iteration 4" in two_ranks[name].notices[-1]


def test_a_late_start_holds_across_resumes(one_rank: dict[str, Outcome]) -> None:
    assert_continues(one_rank["delayed from 2"], one_rank["delayed"], done=2)
    assert_continues(one_rank["delayed from 4"], one_rank["delayed"], done=4)


def test_an_asynchronous_checkpoint_is_megatrons_own_of_the_newest_version(
    one_rank: dict[str, Outcome], directory: Path
) -> None:
    done, expected = one_rank["uninterrupted"].validation[0]
    assert done == 3
    # The validation set comes first, then the test set.
    assert one_rank["plain evaluates"].validation[0] == (0, expected)
    assert one_rank["evaluates"].validation == one_rank["plain evaluates"].validation
    assert one_rank["plain evaluates sharded"].validation == one_rank["evaluates"].validation
    goes_on = one_rank["plain goes on"]
    assert list(goes_on.by_iteration) == [4, 5, 6, 7]
    assert all(math.isfinite(loss) for loss in goes_on.losses)
    # Nothing that is needed to read the file comes from this package.
    with zipfile.ZipFile(checkpoint_file(directory / "corrected")) as file:
        [pickled] = [name for name in file.namelist() if name.endswith("data.pkl")]
        operations = list(pickletools.genops(file.read(pickled)))
    imported = [argument for code, argument, _ in operations if "GLOBAL" in code.name]
    assert imported
    assert not [name for name in imported if name is None or "megatron_async" in name]


def test_megatron_without_any_hook_evaluates_to_the_same_loss(
    one_rank: dict[str, Outcome], directory: Path
) -> None:
    flags: dict[str, Value] = {
        **COMMON_FLAGS,
        **TORCH,
        "eval_interval": 3,
        "eval_iters": 2,
        "start_eval_at_iter": 100,
        "skip_train": True,
        "load": str(directory / "corrected"),
    }
    result = run_torchrun(1, gpt_args(**flags), launcher="plain")
    where, found = result.validation_losses[0]
    assert where == "iteration 3 on validation set"
    assert float(found) == pytest.approx(one_rank["uninterrupted"].validation[0][1], rel=1e-6)


def test_the_schedule_can_be_left_at_a_resume(one_rank: dict[str, Outcome]) -> None:
    assert one_rank["default"].losses == one_rank["plain goes on"].losses
    assert one_rank["default"].notices[-1] == (
        "the checkpoint was saved by pipedream-2bw; Megatron's schedule goes on from its newest "
        "weights, version 3, and the version before is dropped; what the delay correction added "
        "last stays in the weights"
    )


@pytest.mark.parametrize(
    ("name", "notice"),
    [
        ("off", "the delay correction error-feedback is off from now on"),
        ("half", "strength 0.5 instead of 1.0 from the next update on"),
        ("no optimizer", "starts with the next update, which is not corrected"),
        (
            "another",
            "nesterov starts with the next update, and what error-feedback added last stays",
        ),
    ],
)
def test_the_correction_can_be_changed_at_a_resume(
    one_rank: dict[str, Outcome], name: str, notice: str
) -> None:
    assert notice in one_rank[name].notices[-1]
    found, expected = one_rank[name].by_iteration, one_rank["uninterrupted"].by_iteration
    # Both weight versions are those that were saved; the next one is another.
    assert [found[4], found[5]] == [expected[4], expected[5]]
    assert found[6] != expected[6]
    assert math.isfinite(found[7])


def test_the_correction_can_be_switched_on_at_a_resume(one_rank: dict[str, Outcome]) -> None:
    found, expected = one_rank["on"].by_iteration, one_rank["delayed"].by_iteration
    assert "starts with the next update, which is not corrected" in one_rank["on"].notices[-1]
    # Its first update, of iteration 5, is as it would be without.
    assert [found[5], found[6], found[7]] == [expected[5], expected[6], expected[7]]


def test_finetuning_takes_the_weights_alone(one_rank: dict[str, Outcome]) -> None:
    assert list(one_rank["finetune"].by_iteration) == list(range(1, 8))
    assert one_rank["finetune"].notices[-1].endswith("the checkpoint's weights alone are taken")


def test_the_arguments_can_be_those_of_the_checkpoint(one_rank: dict[str, Outcome]) -> None:
    assert "from checkpoint" in one_rank["arguments"].log
    assert_continues(one_rank["arguments"], one_rank["uninterrupted"], done=3)


def test_an_older_checkpoint_is_chosen_before_a_later_one_that_does_not_persist(
    one_rank: dict[str, Outcome], directory: Path
) -> None:
    assert (directory / "passing" / "non_persistent" / "iter_0000004").exists()
    assert_continues(one_rank["passed by"], one_rank["passing"], done=3)


def test_a_run_goes_on_without_the_random_state(one_rank: dict[str, Outcome]) -> None:
    assert list(one_rank["no random state"].by_iteration) == [4, 5, 6, 7]


# What cannot be loaded


def checkpoint_file(checkpoint: Path, step: int = 3) -> Path:
    return checkpoint / f"iter_{step:07d}" / "mp_rank_00" / "model_optim_rng.pt"


def edit(file: Path, change: Any) -> None:
    state = torch.load(file, weights_only=False)
    change(state)
    torch.save(state, file)


def halve(file: Path) -> None:
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def rename_model(state: dict[str, Any]) -> None:
    state["model"] = {f"transformer.{name}": value for name, value in state["model"].items()}


@pytest.fixture(scope="module")
def broken(one_rank: dict[str, Outcome], directory: Path) -> dict[str, Outcome]:
    names = ["format", "truncated", "foreign", "tracker", "full", "old", "older"]
    untrained: dict[str, Value] = {"eval_interval": 3, "eval_iters": 2, "skip_train": True}
    for name in names:
        shutil.copytree(directory / "corrected", directory / name)
    edit(checkpoint_file(directory / "format"), lambda s: s["megatron_async"].update(format=4))
    edit(checkpoint_file(directory / "old"), lambda s: write_as(s, 2))
    edit(checkpoint_file(directory / "older"), lambda s: write_as(s, 1))
    halve(checkpoint_file(directory / "truncated"))
    halve(checkpoint_file(directory / "halved").with_name("distrib_optim.pt"))
    edit(checkpoint_file(directory / "foreign"), rename_model)
    (directory / "tracker" / "latest_checkpointed_iteration.txt").write_text("")
    flags: dict[str, Value] = {**CORRECTED, **TORCH}
    steps = [Step(name, {**flags, **loads(name)}) for name in names[:-3]]
    distributed: dict[str, Value] = {**ASYNC, **TORCH, "use_distributed_optimizer": True}
    full = {**flags, **loads("full"), **saves("full", 5)}
    return run_steps(
        1,
        [
            *steps,
            Step("truncated, no training", {**flags, **untrained, **loads("truncated")}),
            Step("tracker, no training", {**flags, **untrained, **loads("tracker")}),
            Step(
                "truncated, arguments",
                {**flags, **loads("truncated"), "use_checkpoint_args": True},
            ),
            Step("tracker unread", {**flags, **loads("tracker", 3)}),
            Step("old", {**flags, **loads("old")}),
            Step("older", {**flags, **loads("older")}),
            Step("older, off", {**ASYNC, **TORCH, **loads("older")}, prelude=STRICT),
            Step("sharded-2", {**CORRECTED, **TORCH_DIST, **loads("sharded-2")}),
            Step("halved", {**distributed, **loads("halved")}),
            Step("randomless", {**ASYNC, **TORCH, **loads("randomless")}),
            Step("sharded-format", {**CORRECTED, **TORCH_DIST, **loads("sharded-format")}),
            Step("sharded", {**CORRECTED, **TORCH_DIST, **loads("sharded"), "hidden_size": 64}),
            Step("full", full, prelude=FULL_DISK),
            Step("emptied", {**flags, **loads("full")}),
        ],
        directory,
        may_fail=True,
    )


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("format", "has format 4"),
        ("truncated", "cannot be read"),
        ("foreign", "it is of another model"),
        ("tracker", "cannot be read"),
        ("truncated, no training", "cannot be read"),
        ("tracker, no training", "cannot be read"),
        ("truncated, arguments", "cannot be read"),
        ("halved", "cannot be read"),
        ("randomless", "Add --no-load-rng"),
        ("sharded-format", "has format 4"),
        ("sharded", "cannot be read"),  # of a smaller model
    ],
)
def test_what_cannot_be_loaded_is_named(
    broken: dict[str, Outcome], directory: Path, name: str, message: str
) -> None:
    assert broken[name].failed
    assert all(code not in (0, None) for code in broken[name].codes)
    start = "RuntimeError: megatron_async: "
    [line, *_] = [row for row in broken[name].log.splitlines() if row.startswith(start)]
    assert message in line
    assert str(directory / name.partition(",")[0]) in line


def test_a_broken_tracker_file_does_not_matter_to_a_chosen_iteration(
    broken: dict[str, Outcome], one_rank: dict[str, Outcome]
) -> None:
    assert_continues(broken["tracker unread"], one_rank["uninterrupted"], done=3)


@pytest.mark.parametrize("name", ["old", "older", "sharded-2"])
def test_a_checkpoint_of_an_earlier_format_is_read(
    broken: dict[str, Outcome], one_rank: dict[str, Outcome], name: str
) -> None:
    assert_continues(broken[name], one_rank["uninterrupted"], done=3)


def test_buffers_of_the_first_format_are_dropped_without_a_correction(
    broken: dict[str, Outcome], one_rank: dict[str, Outcome]
) -> None:
    assert broken["older, off"].by_iteration == one_rank["off"].by_iteration


def test_a_full_disk_leaves_the_last_checkpoint_whole(
    broken: dict[str, Outcome], one_rank: dict[str, Outcome]
) -> None:
    assert broken["full"].failed
    assert_continues(broken["emptied"], one_rank["uninterrupted"], done=3)
