"""Megatron's process groups that others may use, and options of NCCL's.

Source: megatron/core/parallel_state.py.
"""

from typing import Any

import torch.distributed as dist
from megatron.core import parallel_state

__all__ = ["few_block_options", "ordered_group"]

_BLOCKS = 2
"""Blocks (CTAs) of a kernel that may spin for long. NCCL moves some 20 GB/s with each."""


def ordered_group(ranks: tuple[int, ...]) -> Any:
    """Return a group of Megatron's with these ranks (ascending) whose collectives all run on the
    compute stream in program order; None if there is none.

    Data-parallel groups are left out: gathers and reductions are in flight on them.
    """
    getters = (
        lambda: parallel_state.get_tensor_and_data_parallel_group(with_context_parallel=True),
        lambda: parallel_state.get_tensor_model_parallel_group(check_initialized=False),
        parallel_state.get_expert_tensor_and_model_parallel_group,
    )
    for get in getters:
        try:
            group = get()
        except AssertionError:
            continue  # It was not made.
        if group is not None and tuple(dist.get_process_group_ranks(group)) == ranks:
            return group
    return None


def few_block_options() -> Any:
    """Return the options of a group of NCCL whose kernels take few blocks; None without NCCL."""
    if dist.get_backend() != "nccl":
        return None
    options = dist.ProcessGroupNCCL.Options()
    options.config.min_ctas = 1
    options.config.max_ctas = _BLOCKS
    return options
