"""Context parallelism of Megatron's local attention, which Transformer Engine alone has otherwise.

Each rank holds a part of the sequence. Keys and values are gathered over the context-parallel ranks
(Transformer Engine's ``--cp-comm-type all_gather``), and their gradients scattered back as sums.

Source: of the split, ``_get_batch_on_this_cp_rank_per_sequence_balancing`` in
megatron/core/utils.py and ``get_pos_emb_on_this_cp_rank`` in
megatron/core/models/common/embeddings/rope_utils.py: of 2c chunks of the sequence, rank r of c has
chunks r and 2c - 1 - r.
"""

from collections.abc import Callable
from typing import Any

import torch

__all__ = ["forward_of_a_part", "init_of_a_part", "positions"]


def positions(rank: int, size: int, length: int) -> torch.Tensor:
    """Return which positions of the sequence a rank holds, in the order in which it holds them.

    Args:
        rank: within the context-parallel group.
        size: of that group.
        length: of the whole sequence, a multiple of 2 * ``size``.

    Returns:
        ``length // size`` positions (int64).
    """
    chunks = torch.arange(length).view(2 * size, -1)
    return chunks[[rank, 2 * size - 1 - rank]].flatten()


def init_of_a_part(original: Callable[..., None]) -> Callable[..., None]:
    """Make ``DotProductAttention.__init__`` accept context parallelism.

    Raises (when called):
        ValueError: window attention, whose mask the local attention makes by itself.
    """

    def init(self: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        size = config.context_parallel_size
        if size > 1 and config.window_size is not None:
            raise ValueError(
                "--window-size does not work with --context-parallel-size on CPU ranks (--cpu). "
                "Drop either."
            )
        config.context_parallel_size = 1
        try:
            original(self, config, *args, **kwargs)
        finally:
            config.context_parallel_size = size

    return init


def forward_of_a_part(original: Callable[..., Any]) -> Callable[..., Any]:
    """Make ``DotProductAttention.forward`` attend to the whole sequence.

    Queries, keys and values are of shape (part of the sequence, microbatch, heads, width); the mask
    is of shape (microbatch or 1, 1, part, sequence), or None for a causal one.
    """

    def forward(
        self: Any, query: Any, key: Any, value: Any, attention_mask: Any, *args: Any, **kwargs: Any
    ) -> Any:
        size = self.config.context_parallel_size
        if size == 1:
            return original(self, query, key, value, attention_mask, *args, **kwargs)
        from megatron.core import parallel_state
        from megatron.core.tensor_parallel import gather_from_sequence_parallel_region

        group = parallel_state.get_context_parallel_group()
        length = key.shape[0] * size
        held = torch.cat([positions(rank, size, length) for rank in range(size)])
        key, value = (
            gather_from_sequence_parallel_region(part, group=group)[held.argsort()]
            for part in (key, value)
        )
        if attention_mask is None:
            mine = positions(group.rank(), size, length)
            attention_mask = (torch.arange(length) > mine[:, None])[None, None]
        return original(self, query, key, value, attention_mask, *args, **kwargs)

    return forward
