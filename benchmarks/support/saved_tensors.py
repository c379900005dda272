"""Bytes that autograd keeps for backwards: the activations of the microbatches in flight."""

import contextlib
import weakref
from collections import Counter
from typing import Any

import torch

__all__ = ["SavedTensors"]


class _Saved:
    """A saved tensor; what keeps it alive is the graph alone."""

    __slots__ = ("__weakref__", "tensor")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


class SavedTensors:
    """Counts the storages of all tensors that are saved, each once, but for those of weights."""

    def __init__(self) -> None:
        self.peak = 0
        """Bytes, since the last :meth:`restart`."""
        self._now = 0
        self._uses: Counter[int] = Counter()
        self._weights: set[int] = set()

    def exclude(self, tensors: Any) -> None:
        """Leave out what lies in the storages of some tensors."""
        self._weights |= {tensor.untyped_storage().data_ptr() for tensor in tensors}

    def restart(self) -> None:
        """Look for the peak from now on."""
        self.peak = self._now

    def counting(self) -> contextlib.AbstractContextManager[Any]:
        """Return the context in which what is saved counts."""
        return torch.autograd.graph.saved_tensors_hooks(self._pack, lambda saved: saved.tensor)

    def _pack(self, tensor: torch.Tensor) -> _Saved:
        # With its graph, a saved output would keep itself alive. Leaves stay what they are:
        # Megatron looks for a weight's main_grad.
        saved = _Saved(tensor if tensor.grad_fn is None else tensor.detach())
        storage = tensor.untyped_storage()
        address, size = storage.data_ptr(), storage.nbytes()
        if address not in self._weights and size:
            self._uses[address] += 1
            if self._uses[address] == 1:
                self._now += size
                self.peak = max(self.peak, self._now)
            weakref.finalize(saved, self._release, address, size).atexit = False
        return saved

    def _release(self, address: int, size: int) -> None:
        self._uses[address] -= 1
        if not self._uses[address]:
            del self._uses[address]
            self._now -= size
