"""One message to the first stage and one back, per batch: all that stages have to agree on.

The first stage finishes every batch last, since its last backward depends on all the others'. So
each other stage posts its numbers towards the first stage as soon as it has them, together with the
receive of the answer, and goes on. The first stage, when it is done, finds all of them posted: it
waits for the transfer alone, adds what only it can know, and sends the sum back. There is no second
phase and no polling, and no stage waits for anything that another has yet to start.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from megatron_async.update.process_groups import Ranks

__all__ = ["Exchange", "StageExchange"]


class Exchange:
    """The exchange of one batch, on its way.

    Args:
        total: receives the sums (or holds them already), 1-D, float64.
        works: the collectives to wait for.
        stream: where the wait is enqueued.
        kept: tensors that must outlive the collectives.
    """

    def __init__(
        self,
        total: torch.Tensor,
        *,
        works: Sequence[Any],
        stream: Any,
        kept: Sequence[torch.Tensor] = (),
    ) -> None:
        self._total = total
        self._works = works
        self._stream = stream
        self._kept = kept
        self._ready = torch.cuda.Event()
        self._ready.record()

    def wait(self) -> list[float]:
        """Return the sums over the stages.

        Blocks the host until the first stage has answered, and nothing but the host: the wait is
        enqueued on a stream of its own, so that the compute stream is not held up by it.
        """
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(self._ready)
            for work in self._works:
                work.wait()
            return [float(value) for value in self._total.tolist()]


class StageExchange:
    """The private group along one column of the pipeline, ranks that differ in the stage alone.

    Args:
        group: a group that nothing else uses; None for a pipeline of one stage.
        ranks: its global ranks, the first stage's first.
        stage: this rank's stage.
    """

    def __init__(self, *, group: dist.ProcessGroup | None, ranks: Ranks, stage: int) -> None:
        self._group = group
        self._first_rank = ranks[0]
        self._stage = stage
        self._stream = torch.cuda.Stream()
        self._gathered: Any = None

    def post(self, values: torch.Tensor) -> Exchange | None:
        """Send this stage's numbers (1-D, float64) towards the first stage. Never waits.

        Returns:
            The exchange on its way; None on the first stage, which goes on with :meth:`answer`.
        """
        if self._group is None:
            return None
        gathered = dist.reduce(values, dst=self._first_rank, group=self._group, async_op=True)
        if self._stage == 0:
            self._gathered = gathered
            return None
        total = torch.zeros_like(values)
        answer = dist.broadcast(total, src=self._first_rank, group=self._group, async_op=True)
        return Exchange(total, works=[gathered, answer], stream=self._stream, kept=[values])

    def answer(self, values: torch.Tensor, extra: torch.Tensor | None) -> Exchange:
        """On the first stage: wait for the others' numbers, add ``extra``, send the sum back.

        ``values`` is what :meth:`post` was given; it holds the sum afterwards. The wait is ordered
        on the current stream; all senders have posted already, so it lasts for the transfer alone.
        """
        if self._gathered is not None:
            self._gathered.wait()
            self._gathered = None
        if extra is not None:
            values += extra
        if self._group is None:
            return Exchange(values, works=[], stream=self._stream)
        sent = dist.broadcast(values, src=self._first_rank, group=self._group, async_op=True)
        return Exchange(values, works=[sent], stream=self._stream)
