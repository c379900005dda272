"""Whether asynchronous saves are still being written, asked without a collective of its own.

Source: megatron/core/dist_checkpointing/strategies/async_utils.py, ``AsyncCallsQueue``, whose
polling sums over all ranks in every iteration.
"""

from typing import Any

__all__ = ["SaveWatch", "is_running"]


def _calls() -> Any:
    from megatron.training import async_utils

    queue = async_utils._async_calls_queue
    return () if queue is None else queue.async_calls


def is_running() -> bool:
    """Whether this rank's part of the oldest asynchronous save is still being written."""
    calls = _calls()
    if not calls:
        return False
    caller = calls[0].async_caller
    # A persistent worker lives on, and puts the number of each save that is written into a queue.
    # The names are Megatron's and those of nvidia-resiliency-ext.
    written = getattr(caller, "_persistent_comp_q", None) or getattr(caller, "comp_q", None)
    if written is not None:
        return caller.cur_item is None and bool(written.empty())
    process = getattr(caller, "process", None)
    return process is not None and process.is_alive()


class SaveWatch:
    """Remembers when the newest save was started, which all ranks do in the same iteration."""

    def __init__(self) -> None:
        self._newest: int | None = None
        self._since = 0

    def covers(self, *, told: int, running: int) -> bool:
        """Whether what ranks said of their saves at the end of a batch takes in the newest save.

        Args:
            told: the batch.
            running: the batch that is about to run. Called with each one.
        """
        calls = _calls()
        if calls and calls[-1].idx != self._newest:
            self._newest, self._since = calls[-1].idx, running
        return told >= self._since
