"""What is said where a checkpoint cannot be read or written, and the process that writes it."""

import argparse
import re
import traceback
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.api import CheckpointException

from tests.support.torchrun import run_python


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


def test_of_local_checkpoints_the_latest_whole_one_is_named(tmp_path: Path) -> None:
    from megatron_async.checkpoint.files import write_errors

    for name in ("iter_0000006_1_local.pt", "iter_0000009_1_local.dirty.pt"):
        (tmp_path / name).touch()
    expected = r": no space\. This rank's part of that of iteration 6 is whole\.$"
    with pytest.raises(RuntimeError, match=expected), write_errors(str(tmp_path), 9):
        raise OSError("no space")


def test_where_a_checkpoint_that_is_replaced_by_the_next_one_is_saved(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from megatron_async.checkpoint.files import save_directory

    args = argparse.Namespace(
        save="/here", non_persistent_ckpt_type="global", non_persistent_global_ckpt_dir=None
    )
    assert save_directory(args, non_persistent=False) == "/here"
    assert save_directory(args, non_persistent=True) == "/here/non_persistent"
    args.non_persistent_global_ckpt_dir = "/there"
    assert save_directory(args, non_persistent=True) == "/there"
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 3)
    args.non_persistent_ckpt_type, args.non_persistent_local_ckpt_dir = "local", "/disk"
    assert save_directory(args, non_persistent=False) == "/here"
    assert save_directory(args, non_persistent=True) == "/disk/3"


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


def test_it_may_be_a_local_one_that_cannot_be_read(tmp_path: Path) -> None:
    """Whose older ones are gone: --ckpt-step does not help."""
    from megatron_async.checkpoint.files import read_errors

    args = argparse.Namespace(
        non_persistent_ckpt_type="local", non_persistent_local_ckpt_dir="/disk"
    )
    expected = r", or the local one in /disk, cannot be read: bad file\. (?!.*--ckpt-step)"
    with pytest.raises(RuntimeError, match=expected), read_errors(str(tmp_path), args):
        raise ValueError("bad file")


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


def test_the_process_that_a_save_needs_outlives_the_exit_signal() -> None:
    """torchrun signals it, too; Megatron starts it afresh on GPUs, where it inherits no handler."""
    code = """
        import argparse, json, os, signal
        from megatron.core.dist_checkpointing.strategies import filesystem_async
        from megatron.training import global_vars
        from megatron_async.checkpoint.files import keep_helper_from_exit_signal

        def outlives():
            process = filesystem_async.get_write_results_queue()._manager._process
            os.kill(process.pid, signal.SIGTERM)
            process.join(1)
            return process.is_alive()

        if __name__ == "__main__":
            args = argparse.Namespace(
                exit_signal_handler=True, exit_signal=signal.SIGTERM, ckpt_format="torch_dist"
            )
            global_vars.set_args(args)
            alone = outlives()
            filesystem_async._results_queue = None
            keep_helper_from_exit_signal()
            blocked = bool(signal.pthread_sigmask(signal.SIG_BLOCK, ()))
            print(json.dumps([alone, outlives(), blocked]))
    """
    assert run_python(code) == [False, True, False]
