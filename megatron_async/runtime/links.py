"""Messages between neighbouring stages that nobody waits for.

Each direction has a process group of its own: activations go to the next stage on one, gradients to
the one before on the other. On a link of one direction the messages of both sides are in the same
order, so receives can be posted ahead, whatever the other direction does. (On one communicator a
posted receive of NCCL would hold up the sends that are enqueued behind it.)

Where a wait is: :meth:`Links.finish` orders the current stream behind the message, and on CPU ranks
blocks the host. A sent tensor is kept until it has gone; nobody waits for that before the links are
drained.

Memory: one received tensor more in each direction, and sent tensors until they have gone.
"""

from collections import deque
from typing import Any

import torch
import torch.distributed as dist

from megatron_async.update.process_groups import Ranks, new_groups

__all__ = ["Link", "Links"]


class Link:
    """One direction of one stage: messages in from one neighbour, out to the other.

    Args:
        group: of all stages, used for this direction alone.
        source: global rank of the neighbour that sends; None at the end of the pipeline.
        target: global rank of the one that receives; None at the end of the pipeline.
    """

    def __init__(self, group: Any, *, source: int | None, target: int | None) -> None:
        self._group = group
        self._source = source
        self._target = target
        self._posted: deque[tuple[list[torch.Tensor], list[Any]]] = deque()
        self._sent: deque[tuple[torch.Tensor, Any]] = deque()

    def warm_up(self) -> None:
        """Make the communicators of both ends, with a message of the kind that will run."""
        self.start_send([torch.zeros(1, device=torch.cuda.current_device())])
        self.start_receive([(1,)], torch.float32)
        self.finish_receive()
        self.drain()

    def start_receive(self, shapes: list[tuple[int, ...]], dtype: torch.dtype) -> None:
        """Post the receive of one message, a tensor of each shape."""
        if self._source is None:
            return
        tensors = [
            torch.empty(shape, dtype=dtype, device=torch.cuda.current_device(), requires_grad=True)
            for shape in shapes
        ]
        works = [
            dist.irecv(tensor.detach(), src=self._source, group=self._group) for tensor in tensors
        ]
        self._posted.append((tensors, works))

    def finish_receive(self) -> list[torch.Tensor] | None:
        """Wait for the oldest message that is posted; None at the end of the pipeline."""
        if self._source is None:
            return None
        tensors, works = self._posted.popleft()
        for work in works:
            work.wait()
        return tensors

    def start_send(self, tensors: list[torch.Tensor]) -> None:
        """Send a message. Its memory is kept until it has gone."""
        if self._target is None:
            return
        while self._sent and self._sent[0][1].is_completed():
            self._sent.popleft()
        for tensor in tensors:
            # An alias: Megatron frees the data of an output right behind its sending.
            data = tensor.detach().contiguous()
            self._sent.append((data, dist.isend(data, dst=self._target, group=self._group)))

    def drain(self) -> None:
        """Wait until all that was sent has gone."""
        while self._sent:
            self._sent.popleft()[1].wait()


class Links:
    """Both directions of one stage.

    Called by all ranks at the same point, since groups are made.

    Args:
        ranks: global ranks of the stages, the first stage's first; they differ in the stage alone.
        stage: this rank's.
        timeout_minutes: of the groups.
    """

    def __init__(self, *, ranks: Ranks, stage: int, timeout_minutes: float | None = None) -> None:
        groups = new_groups([ranks, ranks], timeout_minutes=timeout_minutes)
        before = ranks[stage - 1] if stage > 0 else None
        behind = ranks[stage + 1] if stage + 1 < len(ranks) else None
        self.activations = Link(groups[0], source=before, target=behind)
        self.gradients = Link(groups[1], source=behind, target=before)
        for link in (self.activations, self.gradients):
            link.warm_up()

    def drain(self) -> None:
        """Wait until all that was sent has gone."""
        self.activations.drain()
        self.gradients.drain()
