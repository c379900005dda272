"""What concerns the files of a checkpoint: the one that names the latest, the process that Megatron
writes them with, and what is said where reading or writing fails."""

import argparse
import contextlib
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any

import torch
from megatron.core.msc_utils import MultiStorageClientFeature
from megatron.training import checkpointing as megatron_checkpointing
from megatron.training import get_args
from torch.distributed.checkpoint.api import CheckpointException

from megatron_async.megatron import saves
from megatron_async.runtime.run import run

__all__ = [
    "keep_helper_from_exit_signal",
    "open_file",
    "read_errors",
    "save_directory",
    "write_errors",
]


def open_file(
    original: Callable[..., Any], path: Any, mode: str = "r", *args: Any, **kwargs: Any
) -> Any:
    """Open a file; that which names the latest checkpoint, for writing, through one beside it.

    Megatron empties it before it writes it. A job that is killed in between could not be resumed
    without mending the file by hand.

    Args:
        original: Megatron's ``open`` of megatron/core/msc_utils.py.
        path: the file.
        mode: as for the builtin function, as the other arguments.
    """
    if (
        mode == "w"
        and run.engine is not None
        and not MultiStorageClientFeature.is_enabled()
        and Path(path)
        == Path(megatron_checkpointing.get_checkpoint_tracker_filename(Path(path).parent))
    ):
        return _replaced(Path(path))
    return original(path, mode, *args, **kwargs)


@contextlib.contextmanager
def _replaced(path: Path) -> Iterator[Any]:
    temporary = path.with_name(f"{path.name}.{os.getpid()}")
    with temporary.open("w") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


_LONGEST_CAUSE = 300
"""Characters; the whole of it stands in the traceback above our message."""


def save_directory(args: argparse.Namespace, *, non_persistent: bool) -> str:
    """Where Megatron saves, as in its ``save_checkpoint``."""
    if not non_persistent:
        return str(args.save)
    if args.non_persistent_ckpt_type == "local":
        return str(Path(args.non_persistent_local_ckpt_dir) / str(torch.distributed.get_rank()))
    subdirectory = saves.non_persistent_subdirectory()
    return str(args.non_persistent_global_ckpt_dir or Path(args.save) / subdirectory)


@contextlib.contextmanager
def write_errors(directory: str | None = None, iteration: int = -1) -> Iterator[None]:
    """Say where a checkpoint could not be written, and which one is whole.

    Of a full disk Megatron's own message may say "unexpected pos 704 vs 598".

    Args:
        directory: where it is written; None for the last one that was, which is written in the
            background.
        iteration: that of the checkpoint.

    Raises:
        RuntimeError: in the place of what was raised inside.
    """
    if directory is not None:
        run.last_save = directory, iteration
    try:
        yield
    except (CheckpointException, OSError, RuntimeError) as error:
        if run.last_save is None or str(error).startswith("megatron_async: "):
            raise
        directory, iteration = run.last_save
        cause = (str(error).strip() or type(error).__name__).splitlines()[-1].strip(" .")
        if cause.startswith("CheckpointException"):  # Rank 0 has the reasons of all ranks.
            cause = "see rank 0"
        left = ""
        with contextlib.suppress(OSError):
            left = f", where {shutil.disk_usage(directory).free / 2**30:.1f} GiB are free"
        raise RuntimeError(
            f"megatron_async: the checkpoint could not be written to {directory}{left}: {cause}. "
            f"{_what_is_whole(directory, iteration)}."
        ) from error


def _what_is_whole(directory: str, iteration: int) -> str:
    local = sorted(Path(directory).glob("iter_*_local.pt"))
    if local:
        return f"This rank's part of that of iteration {int(local[-1].name.split('_')[1])} is whole"
    try:
        tracker = megatron_checkpointing.get_checkpoint_tracker_filename(directory)
        tracked = int(Path(tracker).read_text())
    except (OSError, ValueError):
        return "There is no whole one in it"
    if tracked == iteration:
        return (
            f"It was to replace that of iteration {iteration}, which may be whole no more; an "
            "older one can be resumed from with --ckpt-step ITERATION"
        )
    return f"The last whole one is that of iteration {tracked}"


@contextlib.contextmanager
def read_errors(
    directory: str | None, args: argparse.Namespace, *, files_read: bool = False
) -> Iterator[None]:
    """Name the checkpoint and the remedy where it cannot be read.

    Megatron ends with exit code 0 if it cannot read a torch checkpoint.

    Args:
        directory: that of the checkpoint.
        args: Megatron's.
        files_read: False while the model's file is read, where Megatron ends at whatever is wrong
            with it; True around all of the loading, where it ends at what that file lacks, and
            where what it asserts is about flags and stays as it is.

    Raises:
        RuntimeError: in the place of what was raised inside.
        SystemExit: --exit-on-missing-checkpoint has found none.
    """
    place = f"megatron_async: the checkpoint in {directory}"
    remedy = (
        "It may be truncated, or of another model, optimizer or program. An older one can be "
        "resumed from with --ckpt-step ITERATION; --no-load-optim takes the weights alone."
    )
    if getattr(args, "non_persistent_ckpt_type", None) == "local":
        local = args.non_persistent_local_ckpt_dir
        place = f"{place}, or the local one in {local},"
        remedy = (
            f"A local one may be of another number of ranks or layout: without {local} on all "
            f"nodes the run resumes from --load. {remedy.partition(' An older')[0]}"
        )
    try:
        yield
    except SystemExit:
        if _misses(directory, args):
            raise
        if files_read:
            raise RuntimeError(
                f"{place} lacks the random state (--no-save-rng leaves it out) or the iteration. "
                "Add --no-load-rng to go on from the random state of a new run, or --finetune to "
                "take the weights alone."
            ) from None
        raise RuntimeError(f"{place} cannot be read. {remedy}") from None
    except (Exception, CheckpointException) as error:
        if str(error).startswith("megatron_async: "):
            raise
        if files_read and isinstance(error, AssertionError):
            raise
        if _is_another_ranks(error):
            raise RuntimeError(
                f"{place} was not read, since another rank has ended: see what it said."
            ) from error
        raise RuntimeError(f"{place} cannot be read: {_cause(error)}. {remedy}") from error


def _is_another_ranks(error: BaseException) -> bool:
    text = str(error)
    return isinstance(error, RuntimeError) and (
        "Connection closed by peer" in text or "Connection reset by peer" in text
    )


def _cause(error: BaseException) -> str:
    """The error in a line; a CheckpointException's text is the tracebacks of all ranks."""
    if isinstance(error, CheckpointException) and error.failures:
        rank, (first, _) = min(error.failures.items())
        return f"rank {rank}: {_cause(first)}"
    text = (str(error).strip() or type(error).__name__).rstrip(" .")
    lines = text.splitlines()
    if len(lines) > 1 and "Traceback" in text:
        text = lines[-1]
    if len(text) > _LONGEST_CAUSE:
        text = f"{text[:_LONGEST_CAUSE]} ..."
    return f"it lacks {text}" if isinstance(error, KeyError) else text


def _misses(directory: str | None, args: argparse.Namespace) -> bool:
    """Whether Megatron ends since there is no checkpoint and --exit-on-missing-checkpoint."""
    return bool(
        getattr(args, "exit_on_missing_checkpoint", False)
        and not getattr(args, "ckpt_step", None)
        and not megatron_checkpointing.checkpoint_exists(directory)
    )


def keep_helper_from_exit_signal() -> None:
    """Start the process that collects what a torch_dist save has written, deaf to --exit-signal.

    Megatron starts it in the first save and needs it in all later ones
    (megatron/core/dist_checkpointing/strategies/filesystem_async.py). torchrun sends a signal to
    all processes of a rank; it would end this one, and the save at the signal would fail.
    """
    args = get_args()
    started = saves.results_queue() is not None
    if started or not args.exit_signal_handler or args.ckpt_format != "torch_dist":
        return
    # A process inherits what is blocked. Starting this tracker would unblock SIGTERM.
    resource_tracker.ensure_running()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {args.exit_signal})
    try:
        saves.start_results_queue()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
