"""Numbers that are summed over all ranks with each update, by name."""

from collections.abc import Mapping

import torch

__all__ = ["Tally"]


class Tally:
    """A fixed set of names and the vector that their values travel in.

    Args:
        names: in the same order on all ranks.
    """

    def __init__(self, *names: str) -> None:
        self.names = names

    def __len__(self) -> int:
        return len(self.names)

    def __contains__(self, name: str) -> bool:
        return name in self.names

    def pack(self, values: Mapping[str, float | torch.Tensor]) -> torch.Tensor | None:
        """Return the vector (1-D, float64) of this rank's values, 0 for names without one; None
        where there are no names at all."""
        if not self.names:
            return None
        vector = torch.zeros(
            len(self.names), dtype=torch.float64, device=torch.cuda.current_device()
        )
        for i, name in enumerate(self.names):
            if name in values:
                vector[i] = values[name]
        return vector

    def unpack(self, vector: list[float] | None) -> dict[str, float]:
        """Return the sums by name; empty if nothing was counted."""
        return {} if vector is None else dict(zip(self.names, vector, strict=True))
