"""Runs that fail: each rank ends by itself, the message says why, the last checkpoint is whole.

The ranks here have no launcher that would end them when one of them fails; under torchrun the same
faults are among the slow tests.
"""

import argparse
import json
import re
import traceback
from collections.abc import Mapping
from pathlib import Path

import pytest
from torch.distributed.checkpoint.api import CheckpointException

from megatron_async.hooks import datasets as data_files
from tests.support.gpt import ASYNC, Value
from tests.support.steps import Outcome, Step, run_steps

CORRECTED: Mapping[str, Value] = {**ASYNC, "delay_correction": "error-feedback"}
STAGES_2: Mapping[str, Value] = {"pipeline_model_parallel_size": 2}
TORCH: Mapping[str, Value] = {"ckpt_format": "torch"}
PLAIN: Mapping[str, Value] = {**ASYNC, **STAGES_2, **TORCH}
SHARDED: Mapping[str, Value] = {**CORRECTED, **STAGES_2, "ckpt_format": "torch_dist"}
BACKGROUND: Mapping[str, Value] = {"async_save": True, "use_persistent_ckpt_worker": True}
REPLICAS_2: Mapping[str, Value] = {**ASYNC, **TORCH, "use_distributed_optimizer": True}

# A gradient that is not finite, of one parameter on one rank, in iteration 4.
_POISON = """
import torch
from megatron.training import get_args, training
train_step = training.train_step
def poisoned(forward_step_func, data_iterator, model, *args, **kwargs):
    if get_args().curr_iteration == 3 and get_args().rank == {rank}:
        parameter = next(p for p in model[0].parameters() if p.requires_grad)
        parameter.register_hook(lambda gradient: torch.full_like(gradient, float("{value}")))
    return train_step(forward_step_func, data_iterator, model, *args, **kwargs)
training.train_step = poisoned
"""

# A rank is killed amid the backward passes of an iteration.
_KILL = """
import os, signal
from megatron.core.pipeline_parallel import schedules
from megatron.training import get_args
backward_step = schedules.backward_step
def killed(*args, **kwargs):
    if get_args().curr_iteration == {iteration} - 1 and get_args().rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return backward_step(*args, **kwargs)
schedules.backward_step = killed
"""

# Iteration 4 begins when the checkpoint that was saved behind iteration 3 is written.
_WRITTEN = """
import time
from megatron.training import async_utils, get_args, training
next_step = training.train_step
def late(*args, **kwargs):
    if get_args().curr_iteration == 3:
        caller = async_utils._async_calls_queue.async_calls[0].async_caller
        stop = time.monotonic() + 60
        while caller._persistent_comp_q.empty() and time.monotonic() < stop:
            time.sleep(0.01)
    return next_step(*args, **kwargs)
training.train_step = late
"""

# The data of one rank cannot be read any more in iteration 4.
_UNREADABLE = """
from megatron.core.datasets.gpt_dataset import GPTDataset
from megatron.training import get_args
get = GPTDataset.__getitem__
def unreadable(self, index):
    if getattr(get_args(), "curr_iteration", 0) == 3 and get_args().rank == 0:
        raise OSError("the file system went away")
    return get(self, index)
GPTDataset.__getitem__ = unreadable
"""

# From iteration 5 on no file of this rank, or of a process that writes for it, can grow beyond
# 128 KiB: what a full disk does to a save.
_FULL_DISK = """
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


def poisoned(rank: int, value: str) -> str:
    return _POISON.format(rank=rank, value=value)


def killed(*, iteration: int) -> str:
    return _KILL.format(iteration=iteration)


def saves(name: str, interval: int = 3) -> dict[str, Value]:
    return {"save": f"{{dir}}/{name}", "save_interval": interval}


def loads(name: str) -> dict[str, Value]:
    return {"load": f"{{dir}}/{name}"}


def write_data(folder: Path) -> Path:
    """Write a data set of 40 documents; return its prefix."""
    from megatron_async.tools import data

    lines = [json.dumps({"text": f"{number} " * 40}) for number in range(40)]
    (folder / "text.jsonl").write_text("\n".join(lines))
    argv = ["--input", str(folder / "text.jsonl"), "--output", str(folder / "data")]
    assert data.main(argv) == 0
    return folder / "data"


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("faults")


@pytest.fixture(scope="module")
def outcomes(directory: Path) -> dict[str, Outcome]:
    cut(write_data(directory).with_suffix(".bin"))
    synchronous: dict[str, Value] = {**STAGES_2, **TORCH, "rerun_mode": "disabled"}
    short: dict[str, Value] = {
        **PLAIN,
        "mock_data": None,
        "data_path": "{dir}/data",
        "split": "100,0,0",
        "vocab_size": 256,
    }
    full: dict[str, Value] = {**SHARDED, **saves("full")}
    background: dict[str, Value] = {**SHARDED, **BACKGROUND, **saves("background")}
    unended: dict[str, Value] = {**SHARDED, **BACKGROUND, **saves("unended")}
    return run_steps(
        2,
        [
            Step("uninterrupted", PLAIN),
            Step("Megatron", synchronous, prelude=poisoned(1, "nan")),
            Step("nan", {**PLAIN, **saves("nan", 1)}, prelude=poisoned(1, "nan")),
            Step("nan resumed", {**PLAIN, **loads("nan")}),
            Step("inf", {**REPLICAS_2, **saves("inf", 1)}, prelude=poisoned(1, "inf")),
            Step("inf resumed", {**REPLICAS_2, **loads("inf")}),
            Step("killed", {**PLAIN, **saves("killed")}, prelude=killed(iteration=4)),
            Step("killed resumed", {**PLAIN, **loads("killed")}),
            Step("unreadable", {**PLAIN, **saves("unreadable")}, prelude=_UNREADABLE),
            Step("unreadable resumed", {**PLAIN, **loads("unreadable")}),
            Step("short data", short),
            Step("sharded", SHARDED),
            Step("full", full, prelude=_FULL_DISK),
            Step("full resumed", {**SHARDED, **loads("full")}),
            Step("background", background, prelude=_WRITTEN + _FULL_DISK),
            Step("background resumed", {**SHARDED, **loads("background")}),
            Step("unended", unended, prelude=_WRITTEN + killed(iteration=6)),
        ],
        directory,
        may_fail=True,
    )


def assert_ended_by_themselves(outcome: Outcome) -> None:
    assert outcome.failed
    assert all(code not in (0, None) for code in outcome.codes), outcome.codes


def tracked(checkpoint: Path) -> int:
    return int((checkpoint / "latest_checkpointed_iteration.txt").read_text())


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
    assert not resumed.failed, resumed.log[-3000:]
    assert resumed.by_iteration == {i: expected.by_iteration[i] for i in range(4, 8)}
    assert resumed.norms == {i: expected.norms[i] for i in range(4, 8)}


def own_errors(outcome: Outcome) -> set[str]:
    """The package's messages; each rank may print one."""
    return set(re.findall(r"^RuntimeError: (megatron_async: .*)$", outcome.log, flags=re.MULTILINE))


def rejected(outcome: Outcome) -> list[str]:
    """Megatron's message, which names the rank and the iteration."""
    return re.findall(r"^RuntimeError: (Rank .*)$", outcome.log, flags=re.MULTILINE)


def test_a_gradient_that_is_not_a_number_stops_the_run_with_megatrons_message(
    outcomes: dict[str, Outcome], directory: Path
) -> None:
    [message] = rejected(outcomes["nan"])
    assert message.startswith("Rank 1, ")
    assert "found NaN in local grad norm" in message
    assert [message] == rejected(outcomes["Megatron"])
    assert not (directory / "nan" / "iter_0000004").exists()


def test_an_infinite_gradient_on_one_replica_stops_both(
    outcomes: dict[str, Outcome], directory: Path
) -> None:
    assert_ended_by_themselves(outcomes["inf"])
    [message] = rejected(outcomes["inf"])
    assert message.startswith("Rank 1, ")
    assert "found Inf in local grad norm" in message
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


# The same without a job


def test_a_whole_data_set_passes(tmp_path: Path) -> None:
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    prefix = str(write_data(tmp_path))
    with data_files.named_in_errors(prefix):
        data_files.check(IndexedDataset(prefix))
        data_files.check(IndexedDataset(prefix, mmap=False))


@pytest.mark.parametrize("mmap", [True, False])
def test_a_short_data_file_is_named(tmp_path: Path, mmap: bool) -> None:
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    prefix = write_data(tmp_path)
    file = prefix.with_suffix(".bin")
    file.write_bytes(file.read_bytes()[:-1])
    dataset = IndexedDataset(str(prefix), mmap=mmap)
    with pytest.raises(RuntimeError, match=r"data\.bin has \d+ bytes, and data\.idx says"):
        data_files.check(dataset)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # Megatron's __del__
@pytest.mark.parametrize(("suffix", "keep"), [(".idx", 0.5), (".idx", 0.001), (".bin", 0.0)])
def test_files_that_megatron_cannot_open_are_named(
    tmp_path: Path, suffix: str, keep: float
) -> None:
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    prefix = write_data(tmp_path)
    file = prefix.with_suffix(suffix)
    content = file.read_bytes()
    file.write_bytes(content[: max(10 if keep else 0, int(len(content) * keep))])
    with (
        pytest.raises(RuntimeError, match=f"the data set {prefix} cannot be read"),
        data_files.named_in_errors(str(prefix)),
    ):
        IndexedDataset(str(prefix))


@pytest.mark.parametrize(
    ("tracked", "end"),
    [
        ("3", r"The last whole one is that of iteration 3\."),
        ("6", r"It was to replace that of iteration 6, which may be whole no more; .*"),
        (None, r"There is no whole one in it\."),
        ("", r"There is no whole one in it\."),
    ],
)
def test_what_is_whole_behind_a_failed_save(tmp_path: Path, tracked: str | None, end: str) -> None:
    """Of a save at iteration 6, and of one that is written in the background."""
    from megatron_async.checkpoint.files import write_errors

    if tracked is not None:
        (tmp_path / "latest_checkpointed_iteration.txt").write_text(tracked)
    expected = rf"could not be written to {re.escape(str(tmp_path))}, where .*: no space\. {end}$"
    with pytest.raises(RuntimeError, match=expected), write_errors(str(tmp_path), 6):
        raise OSError("no space")
    with pytest.raises(RuntimeError, match=expected), write_errors():
        raise OSError("no space")


def test_where_a_checkpoint_that_is_replaced_by_the_next_one_is_saved() -> None:
    from megatron_async.checkpoint.files import save_directory

    args = argparse.Namespace(save="/here", non_persistent_global_ckpt_dir=None)
    assert save_directory(args, non_persistent=False) == "/here"
    assert save_directory(args, non_persistent=True) == "/here/non_persistent"
    args.non_persistent_global_ckpt_dir = "/there"
    assert save_directory(args, non_persistent=True) == "/there"


def _failure(error: Exception) -> tuple[Exception, traceback.StackSummary]:
    return error, traceback.StackSummary()


@pytest.mark.parametrize(
    ("error", "files_read", "kind", "message"),
    [
        (SystemExit(), False, RuntimeError, r"cannot be read\. It may be truncated"),
        (SystemExit(), True, RuntimeError, r"Add --no-load-rng"),
        (ValueError("bad file."), True, RuntimeError, r"cannot be read: bad file\. It may be"),
        (KeyError("optimizer"), True, RuntimeError, r"cannot be read: it lacks 'optimizer'\. It"),
        (AssertionError("magic"), False, RuntimeError, r"cannot be read: magic\. It may be"),
        (RuntimeError("pair.cc: Connection closed by peer"), True, RuntimeError, "another rank"),
        (
            CheckpointException("", {1: _failure(EOFError()), 0: _failure(OSError("no file."))}),
            True,
            RuntimeError,
            r"cannot be read: rank 0: no file\. It may be",
        ),
        (
            KeyError("x" * 1000),
            True,
            RuntimeError,
            r"cannot be read: it lacks 'x{299} \.\.\.\. It may be",
        ),
        (AssertionError("num_layers differs"), True, AssertionError, r"^num_layers differs$"),
        (RuntimeError("megatron_async: no"), True, RuntimeError, r"^megatron_async: no$"),
    ],
)
def test_what_is_said_of_a_checkpoint_that_cannot_be_read(
    tmp_path: Path,
    error: BaseException,
    files_read: bool,
    kind: type[BaseException],
    message: str,
) -> None:
    from megatron_async.checkpoint.files import read_errors

    (tmp_path / "latest_checkpointed_iteration.txt").write_text("3")
    args = argparse.Namespace(exit_on_missing_checkpoint=True)
    with (
        pytest.raises(kind, match=message),
        read_errors(str(tmp_path), args, files_read=files_read),
    ):
        raise error


def test_a_missing_checkpoint_may_end_a_run(tmp_path: Path) -> None:
    """With --exit-on-missing-checkpoint, and Megatron's exit code."""
    from megatron_async.checkpoint.files import read_errors

    args = argparse.Namespace(exit_on_missing_checkpoint=True)
    with (
        pytest.raises(SystemExit),
        read_errors(str(tmp_path), args, files_read=True),
        read_errors(str(tmp_path), args),
    ):
        raise SystemExit
