"""The lengths of packed sequences, summed without a collective of their own.

Megatron counts floating-point operations by them, for the throughput that it logs. It sums over all
ranks at the end of each iteration in which a rank ran a forward.
"""

from collections.abc import Mapping
from typing import Any

import torch

from megatron_async.megatron.packed_sequences import take_sums
from megatron_async.runtime.counters.counter import Counter

__all__ = ["PackedSequences"]

_TOKENS, _SQUARES = "packed tokens", "packed squares"


class PackedSequences(Counter):
    """Sums over the sequences that were run forward, each counted once.

    Args:
        copies: how many ranks run the same microbatch.
    """

    names = (_TOKENS, _SQUARES)

    def __init__(self, *, copies: int) -> None:
        self._copies = copies
        self._untaken = [0.0, 0.0]

    def collect(self) -> dict[str, float | torch.Tensor]:
        sums = take_sums()
        return {} if sums is None else dict(zip(self.names, sums, strict=True))

    def receive(self, sums: Mapping[str, float]) -> None:
        for i, name in enumerate(self.names):
            self._untaken[i] += sums.get(name, 0.0) / self._copies

    def take(self) -> tuple[float, float]:
        """Return the number of tokens and the sum of squared lengths that came back since the last
        call."""
        tokens, squares = self._untaken
        self._untaken = [0.0, 0.0]
        return tokens, squares

    def state_dict(self) -> dict[str, Any]:
        return {"untaken": list(self._untaken)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._untaken = list(state["untaken"])
