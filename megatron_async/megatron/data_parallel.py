"""Megatron's ``DistributedDataParallel``: its flat buffers and bucket groups.

Source: megatron/core/distributed/distributed_data_parallel.py and param_and_grad_buffer.py.
"""

import copy
from typing import Any

import torch.distributed as dist
from megatron.core.distributed.param_and_grad_buffer import shard_buffer
from torch.distributed.distributed_c10d import _coalescing_manager

__all__ = [
    "as_first_stage",
    "bucket_groups",
    "ddp_buffers",
    "start_param_gathers",
    "with_loss_group",
]


class _FirstStage:
    """A pipeline's process group, of which each rank is told that it is the first."""

    def __init__(self, group: Any) -> None:
        self._group = group

    def rank(self) -> int:
        return 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._group, name)


def as_first_stage(pg_collection: Any) -> Any:
    """Return process groups with which ``DistributedDataParallel`` makes buckets as on the first
    stage; on the others it has one bucket for all parameters. It asks the pipeline's group for
    nothing but the rank."""
    groups = copy.copy(pg_collection)
    groups.pp = _FirstStage(pg_collection.pp)
    return groups


def with_loss_group(pg_collection: Any, group: dist.ProcessGroup) -> Any:
    """Return process groups with which ``train_step`` averages the loss over ``group``, whose ranks
    are those of ``dp_cp_gtp_remat``. It asks them for nothing else of these ranks."""
    groups = copy.copy(pg_collection)
    groups.dp_cp_gtp_remat = group
    return groups


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


def start_param_gathers(model_chunk: Any) -> list[Any]:
    """Start to gather all parameters from the data-parallel replicas, and return what is to be
    waited for.

    Megatron's ``start_param_sync`` makes a collective of each bucket group. On one communicator the
    second is queued behind the first, and where kernels share one hardware queue it holds up the
    computation that is launched after it. So all groups that share a communicator are one
    collective here (coalesced, one kernel of NCCL).
    """
    of: dict[Any, list[Any]] = {}
    for bucket_group in bucket_groups(model_chunk):
        assert bucket_group.param_gather_handle is None
        of.setdefault(bucket_group.intra_distributed_optimizer_instance_group, []).append(
            bucket_group
        )
    works: list[Any] = []
    for process_group, members in of.items():
        with _coalescing_manager(process_group, async_ops=True) as work:
            for bucket_group in members:
                _gather_buckets(bucket_group, process_group)
        works.append(work)
    return works


def _gather_buckets(bucket_group: Any, process_group: Any) -> None:
    """The all-gathers of one bucket group, as in its ``start_param_sync``."""
    replicas = bucket_group.intra_distributed_optimizer_instance_size
    mine = bucket_group.intra_distributed_optimizer_instance_rank
    shards = bucket_group.cached_param_buffer_shard_list
    for index, bucket in enumerate(bucket_group.buckets):
        if shards[index] is None:
            shards[index] = shard_buffer(bucket.param_data, replicas)
        dist.all_gather_into_tensor(
            bucket.param_data, shards[index][mine], group=process_group, async_op=True
        )
