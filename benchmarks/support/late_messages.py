"""Messages between stages that arrive late, as over a slow link.

The ranks of one machine share the monotonic clock, and here also a table, in a file that all of
them have mapped: the sender and the receiver of the n-th message of a channel write into it when
they came to the message. So both know when its transfer would have ended over a link with a
latency L, and wait until then:

- Megatron's P2P communicator: both sides wait for max(sent, posted) + L, or their requests do.
- The links of ``--pipeline-extra-warmup``: only the receiver waits for that.
- The exchange of a deferred update: the first stage has another's part L after it was posted, and
  the others have the total L after it was sent.
- A collective over several stages ends L later for all of them.

These are the rules of :mod:`megatron_async.schedules.simulator`, which knows two collectives in a
step of Megatron; there are some more. For jobs whose ranks differ in the stage alone.
"""

import functools
import inspect
import mmap
import os
import time
from collections import Counter, deque
from pathlib import Path
from typing import Any

import numpy
import torch.distributed as dist

__all__ = ["LateRequest", "Message", "Table", "delay_collectives", "delay_messages"]

_CHANNELS = ("forward", "backward", "link", "part", "total", "pair")
_CAPACITY = 1 << 14  # messages of a channel; the file has holes where there are none
_FIRST = 0  # the first stage's rank
_POLL_SECONDS = 2e-4


class Message:
    """One side of one message.

    Args:
        times: when its sender and when its receiver came to it; 0 if not yet. This side's is set.
        seconds: L.
    """

    def __init__(self, times: Any, seconds: float) -> None:
        self._times = times
        self._seconds = seconds

    def wait(self) -> None:
        """Wait until it has arrived."""
        _sleep_until(max(self._came(0), self._came(1)) + self._seconds)

    def wait_sent(self) -> None:
        """Likewise, for a receive that was posted long before."""
        _sleep_until(self._came(0) + self._seconds)

    def _came(self, side: int) -> float:
        while self._times[side] == 0.0:
            time.sleep(_POLL_SECONDS)
        return float(self._times[side])


class Table:
    """The table of all ranks.

    Args:
        path: the file; made if there is none.
        rank: of this process.
        ranks: how many there are.
        seconds: L.
    """

    def __init__(self, path: Path, *, rank: int, ranks: int, seconds: float) -> None:
        self.rank = rank
        self.ranks = ranks
        self.seconds = seconds
        shape = (len(_CHANNELS), ranks, ranks, _CAPACITY, 2)
        size = int(numpy.prod(shape)) * numpy.dtype(numpy.float64).itemsize
        file = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        os.ftruncate(file, size)
        self._times = numpy.frombuffer(mmap.mmap(file, size), dtype=numpy.float64).reshape(shape)
        os.close(file)
        self._counts: Counter[tuple[str, int, int]] = Counter()

    def send(self, channel: str, receiver: int) -> Message:
        """Come to the channel's next message, as its sender."""
        return self._next(channel, self.rank, receiver, side=0)

    def receive(self, channel: str, sender: int) -> Message:
        """Likewise, as its receiver."""
        return self._next(channel, sender, self.rank, side=1)

    def _next(self, channel: str, sender: int, receiver: int, *, side: int) -> Message:
        number = self._counts[channel, sender, receiver]
        if number == _CAPACITY:
            raise RuntimeError(
                f"more than {_CAPACITY} messages on one channel: run fewer iterations"
            )
        self._counts[channel, sender, receiver] += 1
        times = self._times[_CHANNELS.index(channel), sender, receiver, number]
        times[side] = time.monotonic()
        return Message(times, self.seconds)


def delay_messages(table: Table) -> None:
    """Delay all that crosses stages in a job of Megatron."""
    _delay_communicator(table)
    _delay_links(table)
    _delay_exchange(table)
    delay_collectives(table.seconds)


class LateRequest:
    """A request that ends when its message has arrived."""

    def __init__(self, request: Any, message: Message) -> None:
        self._request = request
        self._message = message

    def wait(self, *args: Any, **kwargs: Any) -> Any:
        result = self._request.wait(*args, **kwargs)
        self._message.wait()
        return result


def _delay_communicator(table: Table) -> None:
    from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator

    original = P2PCommunicator._communicate

    @functools.wraps(original)
    def communicate(self: Any, *, wait_on_reqs: bool = True, **kwargs: Any) -> Any:
        messages: dict[str, Message] = {}
        if kwargs["tensor_send_next"] is not None:
            messages["send_next"] = table.send("forward", self.next_rank)
        if kwargs["recv_prev"]:
            messages["recv_prev"] = table.receive("forward", self.prev_rank)
        if kwargs["tensor_send_prev"] is not None:
            messages["send_prev"] = table.send("backward", self.prev_rank)
        if kwargs["recv_next"]:
            messages["recv_next"] = table.receive("backward", self.next_rank)
        *received, requests = original(self, wait_on_reqs=wait_on_reqs, **kwargs)
        if wait_on_reqs:
            for message in messages.values():
                message.wait()
        else:  # by name, of an interleaved schedule
            requests = {
                name: LateRequest(request, messages[name]) for name, request in requests.items()
            }
        return *received, requests

    P2PCommunicator._communicate = communicate


def _delay_links(table: Table) -> None:
    from megatron_async.runtime import links

    class LateLink(links.Link):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self._messages: deque[Message] = deque()

        def start_receive(self, *args: Any, **kwargs: Any) -> None:
            if self._source is not None:
                self._messages.append(table.receive("link", self._source))
            super().start_receive(*args, **kwargs)

        def finish_receive(self) -> Any:
            received = super().finish_receive()
            if self._source is not None:
                self._messages.popleft().wait()
            return received

        def start_send(self, *args: Any, **kwargs: Any) -> None:
            if self._target is not None:
                table.send("link", self._target)
            super().start_send(*args, **kwargs)

    vars(links)["Link"] = LateLink


def _delay_exchange(table: Table) -> None:
    from megatron_async.update.exchange import StageExchange

    sums = StageExchange._sums
    others = [rank for rank in range(table.ranks) if rank != _FIRST]

    @functools.wraps(sums)
    def late_sums(self: Any, *args: Any, **kwargs: Any) -> Any:
        if table.rank != _FIRST:
            table.send("part", _FIRST)
            total = sums(self, *args, **kwargs)
            table.receive("total", _FIRST).wait_sent()
            return total
        for rank in others:
            table.receive("part", rank).wait_sent()
        total = sums(self, *args, **kwargs)
        for rank in others:
            table.send("total", rank)
        return total

    setattr(StageExchange, sums.__name__, late_sums)


def delay_collectives(seconds: float) -> None:
    """Let the collectives over several ranks that the caller waits for end later."""
    for name in ("all_reduce", "broadcast", "all_gather", "all_gather_into_tensor"):
        setattr(dist, name, _late_collective(getattr(dist, name), seconds))


def _late_collective(original: Any, seconds: float) -> Any:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def collective(*args: Any, **kwargs: Any) -> Any:
        work = original(*args, **kwargs)
        group = signature.bind(*args, **kwargs).arguments.get("group")
        if work is None and dist.get_world_size(group) > 1:
            time.sleep(seconds)
        return work

    return collective


def _sleep_until(end: float) -> None:
    time.sleep(max(end - time.monotonic(), 0.0))
