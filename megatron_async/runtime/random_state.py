"""All random state of a rank: what it is now, and going back to what it was.

A stage that forwards microbatches of the next batch ahead has drawn numbers for their dropout
already. A checkpoint drops these microbatches and the resumed run forwards them again, so it needs
the state from before the first of them. Evaluation must not move the state that training goes on
from.

The parts are those that Megatron saves, see ``get_rng_state`` in
megatron/training/checkpointing.py.
"""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from megatron.core import tensor_parallel

__all__ = ["RandomState", "capture", "preserved", "restore", "rewound"]


@dataclass(frozen=True, kw_only=True)
class RandomState:
    """A copy of the state of every generator."""

    python: Any
    numpy: Any
    cpu: torch.Tensor
    device: torch.Tensor
    trackers: dict[str, Any]
    """Name -> state, of Megatron's tracker of tensor and expert parallel states."""


def capture() -> RandomState:
    """Copy the state of this moment. Copies a few KiB on the host; waits for no device."""
    trackers = tensor_parallel.get_cuda_rng_tracker().get_states()
    return RandomState(
        python=random.getstate(),
        numpy=np.random.get_state(),
        cpu=torch.get_rng_state(),
        device=torch.cuda.get_rng_state(),
        trackers=_copies(trackers),
    )


def restore(state: RandomState) -> None:
    """Go back to a captured state."""
    random.setstate(state.python)
    np.random.set_state(state.numpy)
    torch.set_rng_state(state.cpu)
    torch.cuda.set_rng_state(state.device)
    tensor_parallel.get_cuda_rng_tracker().set_states(_copies(state.trackers))


def _copies(trackers: dict[str, Any]) -> dict[str, Any]:
    # A state is a tensor that Megatron replaces, or a generator that goes on in place.
    return {
        name: state.clone_state() if isinstance(state, torch.Generator) else state
        for name, state in trackers.items()
    }


@contextmanager
def preserved() -> Iterator[None]:
    """Whatever the block draws, the state after it is the state before it."""
    before = capture()
    try:
        yield
    finally:
        restore(before)


@contextmanager
def rewound(state: RandomState | None) -> Iterator[None]:
    """Show the block a state (None: the current one) and come back to the current one after it."""
    with preserved():
        if state is not None:
            restore(state)
        yield
