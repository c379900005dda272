"""What concerns the files of a checkpoint: the one that names the latest, the process that Megatron
writes them with, and what is said when that fails."""

import contextlib
import os
import shutil
import signal
from collections.abc import Iterator
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any

from megatron.core.msc_utils import MultiStorageClientFeature
from megatron.training import checkpointing as megatron_checkpointing
from megatron.training import get_args
from torch.distributed.checkpoint.api import CheckpointException

from megatron_async import engine

__all__ = ["WholeTrackerFile", "keep_helper_from_exit_signal", "write_errors"]


class WholeTrackerFile:
    """Megatron's file functions, but the file that names the latest checkpoint changes at once.

    Megatron empties it before it writes it. A job that is killed in between could not be resumed
    without mending the file by hand.

    Args:
        original: ``maybe_msc`` of megatron/core/msc_utils.py.
    """

    def __init__(self, original: Any) -> None:
        self._original = original

    def __getattr__(self, name: str) -> Any:
        return getattr(self._original, name)

    def open(self, path: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        """Open a file; the tracker file for writing through a temporary one beside it."""
        if (
            mode == "w"
            and engine.current() is not None
            and not MultiStorageClientFeature.is_enabled()
            and Path(path)
            == Path(megatron_checkpointing.get_checkpoint_tracker_filename(Path(path).parent))
        ):
            return _replaced(Path(path))
        return self._original.open(path, mode, *args, **kwargs)


@contextlib.contextmanager
def _replaced(path: Path) -> Iterator[Any]:
    temporary = path.with_name(f"{path.name}.{os.getpid()}")
    with temporary.open("w") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


@contextlib.contextmanager
def write_errors() -> Iterator[None]:
    """Say where a checkpoint could not be written, and which one is whole.

    Of a full disk Megatron's own message may say "unexpected pos 704 vs 598".

    Raises:
        RuntimeError: in the place of what was raised inside.
    """
    try:
        yield
    except (CheckpointException, OSError, RuntimeError) as error:
        if str(error).startswith("megatron_async: "):
            raise
        directory = get_args().save
        cause = (str(error).strip() or type(error).__name__).splitlines()[-1].strip(" .")
        if cause.startswith("CheckpointException"):  # Rank 0 has the reasons of all ranks.
            cause = "see rank 0"
        left, last = "", "There is no whole one in it"
        with contextlib.suppress(OSError):
            left = f", where {shutil.disk_usage(directory).free / 2**30:.1f} GiB are free"
        with contextlib.suppress(OSError, ValueError):
            tracker = megatron_checkpointing.get_checkpoint_tracker_filename(directory)
            last = f"The last whole one is that of iteration {int(Path(tracker).read_text())}"
        raise RuntimeError(
            f"megatron_async: the checkpoint could not be written to {directory}{left}: {cause}. "
            f"{last}."
        ) from error


def keep_helper_from_exit_signal() -> None:
    """Start the process that collects what a torch_dist save has written, deaf to --exit-signal.

    Megatron starts it in the first save and needs it in all later ones
    (megatron/core/dist_checkpointing/strategies/filesystem_async.py). torchrun sends a signal to
    all processes of a rank; it would end this one, and the save at the signal would fail.
    """
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    args = get_args()
    started = filesystem_async._results_queue is not None
    if started or not args.exit_signal_handler or args.ckpt_format != "torch_dist":
        return
    # A process inherits what is blocked. Starting this tracker would unblock SIGTERM.
    resource_tracker.ensure_running()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {args.exit_signal})
    try:
        filesystem_async.get_write_results_queue()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
