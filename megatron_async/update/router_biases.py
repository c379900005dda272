"""Biases by which routers balance their experts: a part of the weights, made by a batch's update.

Megatron changes them in place at the end of a batch, from the tokens that its microbatches sent to
each expert. Here that makes the biases of the next version, which nobody reads before that version
is complete: version k + 1 has the biases of version k, changed by the counts of batch k.

Source: ``_update_router_expert_bias`` and ``_update_router_qb_beta`` in
megatron/core/distributed/finalize_model_grads.py; the formula of the bias, arXiv 2408.15664.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from megatron_async.weights.versions import WeightVersions

__all__ = ["RouterBiases"]


class RouterBiases:
    """The biases of one rank's routers.

    Args:
        weights: the versions, whose buffers the biases are.
    """

    def __init__(self, weights: WeightVersions) -> None:
        self._weights = weights
        self._next = [torch.empty_like(data) for data in weights.buffers(weights.newest)]
        self._computed = False

    @contextmanager
    def computing(self) -> Iterator[None]:
        """Let the body, Megatron's own update of the biases, find those of the newest version in
        the model, and write those of the next one; no version is changed.

        The update of the batch before has to be complete. Of several bodies between two calls of
        :meth:`publish` a later one finds what an earlier one has written.
        """
        weights = self._weights
        if not self._computed:
            for following, data in zip(self._next, weights.buffers(weights.newest), strict=True):
                following.copy_(data)
        in_model = weights.versioned[len(weights.parameters) :]
        before = [buffer.data for buffer in in_model]
        try:
            for buffer, following in zip(in_model, self._next, strict=True):
                buffer.data = following
            yield
        finally:
            for buffer, data in zip(in_model, before, strict=True):
                buffer.data = data
        self._computed = True

    def publish(self) -> None:
        """Give the newest version, which has just been made, the biases that were computed for
        it."""
        if not self._computed:
            return
        newest = self._weights.buffers(self._weights.newest)
        for data, following in zip(newest, self._next, strict=True):
            data.copy_(following)
        self._computed = False
