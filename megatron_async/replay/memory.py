"""Which storages would be on the device, and when they are freed.

On CPU ranks all tensors are on the host. A storage counts as on the device if its tensor was made
with a CUDA device, moved there, or computed from one that is. Storages are told apart by PyTorch's
own object, which lives as long as any tensor or graph uses it: when it goes, the caching allocator
would take the memory back.
"""

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from megatron_async.replay.trace import Range

__all__ = ["Memory", "Storage", "address", "span"]


_ADDRESS: Any = torch.UntypedStorage._cdata


def address(tensor: torch.Tensor) -> int:
    """Return the address of PyTorch's object of a tensor's storage.

    Raises:
        NotImplementedError, RuntimeError: it has none.
    """
    found: int = _ADDRESS.__get__(tensor.untyped_storage())
    return found


@dataclass(slots=True)
class Storage:
    """What is known of one storage."""

    number: int
    """Counted from 0, never used twice."""
    on_device: bool = False
    pinned: bool = False
    copied: bool = False
    """Whether copies between host and device use it, for storages on the host."""


class Memory:
    """The storages of one process.

    Args:
        freed: called with the number of a storage when its last reference is gone. It may be
            called from any thread.
    """

    def __init__(self, freed: Callable[[Storage], None]) -> None:
        self._freed = freed
        self._known: dict[int, Storage] = {}
        """By the address of PyTorch's object."""
        self._next = 0

    def find(self, tensor: torch.Tensor) -> Storage | None:
        """Return what is known of a tensor's storage; None of one that was never registered, or of
        a tensor that has none."""
        try:
            return self._known.get(address(tensor))
        except (NotImplementedError, RuntimeError):
            return None

    def register(self, tensor: torch.Tensor) -> Storage:
        """Return the record of a tensor's storage, made if there is none."""
        storage = tensor.untyped_storage()
        at = address(tensor)
        found = self._known.get(at)
        if found is None:
            found = self._known[at] = Storage(self._next)
            self._next += 1
            weakref.finalize(storage, self._forget, at, found).atexit = False
        return found

    def _forget(self, at: int, storage: Storage) -> None:
        if self._known.get(at) is storage:
            del self._known[at]
        self._freed(storage)

    def on_device(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor would be on the device."""
        found = self.find(tensor)
        return found is not None and found.on_device

    def range(self, tensor: torch.Tensor) -> Range | None:
        """Return the bytes that a tensor covers; None if it is empty."""
        bytes_ = span(tensor)
        return None if bytes_ is None else (self.register(tensor).number, *bytes_)


def span(tensor: Any) -> tuple[int, int] | None:
    """Return the first byte of a tensor in its storage and the one behind its last, gaps included;
    None if it is empty."""
    if tensor.numel() == 0:
        return None
    size = tensor.element_size()
    begin = tensor.storage_offset() * size
    last = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    return begin, begin + (last + 1) * size
