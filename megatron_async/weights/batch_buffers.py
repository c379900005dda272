"""Sums over the microbatches of a batch, when microbatches of several batches alternate.

Routers count tokens in buffers of the model that Megatron zeroes at the end of each batch. Here a
buffer has as much storage as batches are in flight; a microbatch's forward and backward see that of
its own batch.

Source: ``reset_model_temporary_tensors`` in megatron/core/distributed/finalize_model_grads.py for
when they are zeroed, megatron/core/transformer/moe/router.py for what is added to them.
"""

from collections.abc import Sequence

import torch

__all__ = ["BatchBuffers"]


class BatchBuffers:
    """Buffers of a model, for several batches.

    Args:
        buffers: the buffers, zero at the start of a batch.
        batches: how many batches have microbatches in flight at once.
    """

    def __init__(self, buffers: Sequence[torch.Tensor], *, batches: int) -> None:
        self._buffers = list(buffers)
        mine = [buffer.data for buffer in self._buffers]
        self._data = [
            mine,
            *([torch.zeros_like(data) for data in mine] for _ in range(batches - 1)),
        ]

    def select(self, batch: int) -> None:
        """Let the model add to, read and zero the sums of ``batch``."""
        for buffer, data in zip(self._buffers, self._data[batch % len(self._data)], strict=True):
            buffer.data = data
