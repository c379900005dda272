"""Megatron's ``DistributedDataParallel``: its flat buffers and bucket groups.

Source: megatron/core/distributed/distributed_data_parallel.py and param_and_grad_buffer.py.
"""

from typing import Any

__all__ = ["bucket_groups", "ddp_buffers", "finish_param_gathers"]


def ddp_buffers(model_chunk: Any) -> list[Any]:
    """Return the parameter and gradient buffers of Megatron's DDP wrapper, experts' included.

    ``torch.nn.Module.buffers`` is a method; only Megatron's wrapper shadows it with a list.
    """
    buffers = model_chunk.buffers
    if callable(buffers):
        return []
    return [*buffers, *model_chunk.expert_parallel_buffers]


def bucket_groups(model_chunk: Any) -> list[Any]:
    """Return the groups of buckets of those buffers, experts' included."""
    return [
        *getattr(model_chunk, "bucket_groups", []),
        *getattr(model_chunk, "expert_parallel_bucket_groups", []),
    ]


def finish_param_gathers(model_chunk: Any) -> None:
    """Wait for the gathers that ``start_param_sync`` has dispatched.

    Megatron's own ``finish_param_sync`` dispatches the next bucket group's as well, which is under
    way here.
    """
    for group in bucket_groups(model_chunk):
        if group.param_gather_handle is not None:
            group.param_gather_handle.wait()
            group.param_gather_handle = None
