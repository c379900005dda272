"""One message to the first stage and one back, per batch: all that stages have to agree on.

The first stage finishes every batch last, since its last backward depends on all the others'. So
each other stage sends its numbers towards the first stage as soon as it has them, and goes on. The
first stage, when it is done, finds all of them sent: it adds what only it can know, and sends the
sum back. There is no second phase, and no stage waits for anything that another has yet to start.

The numbers are wanted on the host, and travel there: they are copied to pinned memory behind an
event, and a thread of each rank sends and receives them over a gloo group. On the device nothing
waits for another stage. A collective of NCCL would: its reduce is a chain of ranks, so that a stage
waits for stages that finish the batch later, and the broadcast of the answer, queued behind it,
holds up whatever is launched after it where kernels share one hardware queue
(``CUDA_DEVICE_MAX_CONNECTIONS=1``; docs/replay.md).
"""

import queue
import threading
from typing import Any

import torch
import torch.distributed as dist

from megatron_async.update.process_groups import Ranks

__all__ = ["Exchange", "StageExchange"]


class Exchange:
    """The exchange of one batch, on its way.

    Args:
        values: this stage's numbers on the host (1-D, float64), complete once ``ready`` has
            happened.
        ready: an event of the device.
    """

    def __init__(self, values: torch.Tensor, ready: Any) -> None:
        self._values = values
        self._ready = ready
        self._ended = threading.Event()
        self._error: BaseException | None = None
        self._total: torch.Tensor | None = None

    def numbers(self) -> torch.Tensor:
        """Wait for the device, and return this stage's numbers."""
        self._ready.synchronize()
        return self._values

    def end(self, total: torch.Tensor | None, error: BaseException | None = None) -> None:
        """Called once, with the sums or with what went wrong."""
        self._total, self._error = total, error
        self._ended.set()

    def wait(self) -> list[float]:
        """Return the sums over the stages.

        Blocks the host until the first stage has answered, and nothing on the device.

        Raises:
            RuntimeError: another stage is gone.
        """
        self._ended.wait()
        if self._error is not None:
            raise RuntimeError(
                "megatron_async: the stages could not exchange an update's numbers, since another "
                f"rank has ended: see what it said ({self._error})"
            ) from self._error
        assert self._total is not None
        return [float(value) for value in self._total]


class StageExchange:
    """The private group along one column of the pipeline, ranks that differ in the stage alone.

    Args:
        group: a gloo group that nothing else uses; None for a pipeline of one stage.
        ranks: its global ranks, the first stage's first.
        stage: this rank's stage.
        size: how many numbers are exchanged.
    """

    def __init__(
        self, *, group: dist.ProcessGroup | None, ranks: Ranks, stage: int, size: int
    ) -> None:
        self._group = group
        self._ranks = ranks
        self._stage = stage
        self._size = size
        self._posted: queue.SimpleQueue[Exchange] = queue.SimpleQueue()
        if group is not None:
            # It sleeps until there is something to exchange, and has no part in the training's
            # random state or graphs.
            threading.Thread(target=self._serve, name="stage-exchange", daemon=True).start()

    @property
    def across_stages(self) -> bool:
        """Whether there is another stage."""
        return self._group is not None

    def post(self, values: torch.Tensor) -> Exchange:
        """Send this stage's numbers (1-D, float64, on the device). Never waits.

        The copy to the host is enqueued on the current stream.
        """
        host = torch.empty(self._size, dtype=torch.float64, device="cpu").pin_memory()
        host.copy_(values, non_blocking=True)
        ready = torch.cuda.Event(blocking=True)
        ready.record()
        if self._group is None:
            return _Alone(host, ready)
        exchange = Exchange(host, ready)
        self._posted.put(exchange)
        return exchange

    def _serve(self) -> None:
        while True:
            exchange = self._posted.get()
            try:
                exchange.end(self._sums(exchange))
            except BaseException as error:
                exchange.end(None, error)
                return

    def _sums(self, exchange: Exchange) -> torch.Tensor:
        """Return the sums over the stages, in the order of the stages."""
        own = exchange.numbers()
        first, *others = self._ranks
        if self._stage > 0:
            total = torch.empty_like(own)
            dist.send(own, dst=first, group=self._group)
            dist.recv(total, src=first, group=self._group)
            return total
        total = own.clone()
        for rank in others:
            part = torch.empty_like(own)
            dist.recv(part, src=rank, group=self._group)
            total += part
        for rank in others:
            dist.send(total, dst=rank, group=self._group)
        return total


class _Alone(Exchange):
    """That of a pipeline of one stage."""

    def wait(self) -> list[float]:
        return [float(value) for value in self.numbers()]
