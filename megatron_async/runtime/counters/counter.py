"""Numbers of each rank that travel with an update, and come back as sums over all ranks.

A counter is a small measurement that needs to know what the other ranks measured. It gives its
numbers when a batch's update is launched, and gets the sums when the update is complete: no
collective of its own, and nobody waits.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

__all__ = ["Counter", "Counters", "Scalar"]

type Scalar = tuple[str, float, int]
"""(name, value, iteration) of what goes to TensorBoard and W&B."""


class Counter:
    """One measurement. All of it is optional but :attr:`names`."""

    names: tuple[str, ...] = ()
    """Of its numbers; the same on all ranks."""

    def before_update(self, iteration: int) -> None:
        """Called before the step of a batch's update.

        Args:
            iteration: in which the batch ran; 1 is the first.
        """

    def collect(self) -> Mapping[str, float | torch.Tensor]:
        """Return this rank's numbers at the launch of an update; missing ones count as 0."""
        return {}

    def receive(self, sums: Mapping[str, float]) -> None:
        """Take the sums over all ranks of what they collected for an update."""

    def scalars(self, sums: Mapping[str, float], iteration: int) -> list[Scalar]:
        """Return what is to be logged of an update.

        Args:
            sums: over all ranks.
            iteration: in which the batch of the update ran.
        """
        return []

    def state_dict(self) -> dict[str, Any]:
        """Return what a resume needs: plain data, the same on all ranks."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where the state was taken."""


class Counters:
    """All counters of a run, and the vector that their numbers travel in.

    Args:
        counters: in the same order, with the same names on all ranks.
    """

    def __init__(self, counters: Sequence[Counter]) -> None:
        self._counters = list(counters)
        self.names = tuple(name for counter in counters for name in counter.names)
        self._sums: dict[int, dict[str, float]] = {}

    def __len__(self) -> int:
        return len(self.names)

    def pack(self) -> torch.Tensor | None:
        """Return the vector (1-D, float64) of this rank's numbers; None where there are none."""
        if not self.names:
            return None
        vector = torch.zeros(
            len(self.names), dtype=torch.float64, device=torch.cuda.current_device()
        )
        numbers: dict[str, float | torch.Tensor] = {}
        for counter in self._counters:
            numbers |= counter.collect()
        for i, name in enumerate(self.names):
            if name in numbers:
                vector[i] = numbers[name]
        return vector

    def before_update(self, iteration: int) -> None:
        """Tell all counters, see there."""
        for counter in self._counters:
            counter.before_update(iteration)

    def unpack(self, vector: list[float] | None) -> dict[str, float]:
        """Return the sums by name; empty if nothing was counted."""
        return {} if vector is None else dict(zip(self.names, vector, strict=True))

    def receive(self, batch: int, vector: list[float] | None) -> None:
        """Hand the sums of a batch's update to the counters, and keep those of two batches."""
        sums = self.unpack(vector)
        self._sums = {batch: sums, batch - 1: self._sums.get(batch - 1, {})}
        for counter in self._counters:
            counter.receive(sums)

    def sum(self, name: str, *, batch: int) -> float | None:
        """Return a sum that came back with a batch's update, one of the last two; None if it is not
        known."""
        return self._sums.get(batch, {}).get(name)

    def scalars(self, vector: list[float] | None, iteration: int) -> list[Scalar]:
        """Return what is to be logged of an update."""
        sums = self.unpack(vector)
        return [each for counter in self._counters for each in counter.scalars(sums, iteration)]

    def state_dict(self) -> dict[str, Any]:
        """Return the states of the counters that have one, by class."""
        states = {type(counter).__name__: counter.state_dict() for counter in self._counters}
        return {name: state for name, state in states.items() if state}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Hand its state to each counter that the run has."""
        for counter in self._counters:
            if type(counter).__name__ in state:
                counter.load_state_dict(state[type(counter).__name__])
