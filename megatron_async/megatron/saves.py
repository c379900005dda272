"""Megatron's saves that are being written, and the helpers that write them.

Source: megatron/training/checkpointing.py and async_utils.py,
megatron/core/dist_checkpointing/strategies/async_utils.py and filesystem_async.py.
"""

from typing import Any

__all__ = [
    "async_calls",
    "is_written",
    "non_persistent_subdirectory",
    "results_queue",
    "start_results_queue",
]


def async_calls() -> Any:
    """Return the asynchronous saves under way, the oldest first."""
    from megatron.training import async_utils

    queue = async_utils._async_calls_queue
    return () if queue is None else queue.async_calls


def is_written(call: Any) -> bool:
    """Whether this rank's part of one of :func:`async_calls` is in its files."""
    caller = call.async_caller
    # A persistent worker lives on, and puts the number of each save that is written into a queue.
    # The names are Megatron's and those of nvidia-resiliency-ext.
    written = getattr(caller, "_persistent_comp_q", None) or getattr(caller, "comp_q", None)
    if written is not None:
        return not (caller.cur_item is None and bool(written.empty()))
    process = getattr(caller, "process", None)
    return process is None or not process.is_alive()


def non_persistent_subdirectory() -> str:
    """Return the folder of the global non-persistent checkpoints inside of ``--save``."""
    from megatron.training import checkpointing

    return str(checkpointing._NON_PERSISTENT_CKPT_SUBDIR)


def results_queue() -> Any:
    """Return the queue in which a torch_dist save collects what was written; None before the first
    save has started its process."""
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    return filesystem_async._results_queue


def start_results_queue() -> None:
    """Start the process of :func:`results_queue`."""
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    filesystem_async.get_write_results_queue()
