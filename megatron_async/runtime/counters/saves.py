"""Whether asynchronous saves are still being written, asked without a collective of its own.

Source: megatron/core/dist_checkpointing/strategies/async_utils.py, ``AsyncCallsQueue``, whose
polling sums over all ranks in every iteration.
"""

from megatron_async.megatron.saves import async_calls, is_written
from megatron_async.runtime.counters.counter import Counter

__all__ = ["UNFINISHED", "SaveWatch", "is_running"]

UNFINISHED = "unfinished saves"
"""Name of the number of ranks that are still writing."""


def is_running() -> bool:
    """Whether this rank's part of the oldest asynchronous save is still being written."""
    calls = async_calls()
    return bool(calls) and not is_written(calls[0])


class SaveWatch(Counter):
    """Counts the ranks that are writing, and remembers when the newest save was started, which all
    ranks do in the same iteration."""

    names = (UNFINISHED,)

    def __init__(self) -> None:
        self._newest: int | None = None
        self._since = 0

    def collect(self) -> dict[str, float]:
        return {UNFINISHED: float(is_running())}

    def covers(self, *, told: int, running: int) -> bool:
        """Whether what ranks said of their saves at the end of a batch takes in the newest save.

        Args:
            told: the batch.
            running: the batch that is about to run. Called with each one.
        """
        calls = async_calls()
        if calls and calls[-1].idx != self._newest:
            self._newest, self._since = calls[-1].idx, running
        return told >= self._since
