"""All modes of the paced benchmarks, by name."""

from support import megatron_modes, torch_peer
from support.pace import Paced

__all__ = ["MODES"]

MODES: dict[str, Paced] = {**megatron_modes.MODES, **torch_peer.MODES}
