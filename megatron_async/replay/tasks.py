"""What the main thread leaves to another thread: the exchange of an update's numbers.

Where a task is handed over and where it is awaited is marked, and what the thread does meanwhile
kept as one item.
"""

import functools
import itertools
import weakref
from typing import Any

from megatron_async.replay.kernels import KernelMode
from megatron_async.replay.recorder import Recorder
from megatron_async.replay.trace import Await, HandOver
from megatron_async.update.exchange import Exchange, StageExchange

__all__ = ["record_exchanges"]


def record_exchanges(recorder: Recorder) -> None:
    """Record the tasks of all exchanges between stages from now on; called once."""
    numbers: weakref.WeakKeyDictionary[Exchange, int] = weakref.WeakKeyDictionary()
    counter = itertools.count()
    init, wait = Exchange.__init__, Exchange.wait
    post, sums = StageExchange.post, StageExchange._sums

    @functools.wraps(init)
    def numbered(self: Exchange, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        numbers[self] = next(counter)

    @functools.wraps(post)
    def handed_over(self: StageExchange, values: Any) -> Exchange:
        exchange = post(self, values)
        if self.across_stages:
            recorder.add(HandOver(task=numbers[exchange]))
        return exchange

    @functools.wraps(sums)
    def done(self: StageExchange, exchange: Exchange) -> Any:
        # A mode belongs to the thread that has entered it.
        with recorder.task(numbers[exchange]), KernelMode(recorder):
            return sums(self, exchange)

    @functools.wraps(wait)
    def awaited(self: Exchange) -> list[float]:
        # Ahead of it, since it reads what the thread has received.
        recorder.add(Await(task=numbers[self], where=recorder.where()))
        return wait(self)

    Exchange.__init__ = numbered  # type: ignore[method-assign]
    Exchange.wait = awaited  # type: ignore[method-assign]
    StageExchange.post = handed_over  # type: ignore[method-assign]
    StageExchange._sums = done  # type: ignore[method-assign]
