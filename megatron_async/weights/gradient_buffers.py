"""A second gradient buffer, so that a batch's data-parallel reduction runs under the next batch.

With one buffer the reduction has to end before the next iteration zeroes it. With two, batches take
turns: a microbatch's forward and backward both see the buffer of its own batch (fused backward
kernels write to the ``main_grad`` that they saw in the forward pass), and a buffer is zeroed when
its batch's update is complete.

Memory: one more copy of the gradients in the precision that they are accumulated in (4 bytes per
parameter in fp32), and no copy of them for the deferred update.

Source: megatron/core/distributed/param_and_grad_buffer.py for what points into the buffer.
"""

from typing import Any

import torch

from megatron_async.megatron.data_parallel import bucket_groups, ddp_buffers

__all__ = ["GradientBuffers"]


class GradientBuffers:
    """Two gradient buffers of one model chunk; batch k accumulates in buffer k mod 2.

    Args:
        model_chunk: Megatron's ``DistributedDataParallel``.

    Raises:
        ValueError: gradients are accumulated outside of the buffers
            (``--grad-reduce-in-bf16`` with local fp32 accumulation).
    """

    def __init__(self, model_chunk: Any) -> None:
        self._buffers = ddp_buffers(model_chunk)
        if any(buffer.extra_main_grads for buffer in self._buffers):
            raise ValueError(
                "--second-grad-buffer: some gradients are accumulated outside of the gradient "
                "buffer (ddp_config.param_name_patterns_for_fp32_local_accumulation); drop either"
            )
        self._groups = bucket_groups(model_chunk)
        self._parameters = [
            parameter for parameter in model_chunk.parameters() if parameter.requires_grad
        ]
        flat = [buffer.grad_data for buffer in self._buffers]
        twins = [torch.zeros_like(data) for data in flat]
        twin_of = {
            data.untyped_storage().data_ptr(): twin for data, twin in zip(flat, twins, strict=True)
        }

        def both(views: list[torch.Tensor]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
            return views, [
                twin_of[view.untyped_storage().data_ptr()].as_strided(
                    view.size(), view.stride(), view.storage_offset()
                )
                for view in views
            ]

        self._flat = (flat, twins)
        self._main_grads = both([parameter.main_grad for parameter in self._parameters])
        self._buckets = both(
            [bucket.grad_data for buffer in self._buffers for bucket in buffer.buckets]
        )
        self._shards: list[list[Any]] = [
            [[None] * len(group.buckets) for group in self._groups] for _ in range(2)
        ]
        self._side = 0

    def select(self, batch: int) -> None:
        """Let gradients be added to, reduced in and zeroed in the buffer of ``batch``."""
        side = batch % 2
        if side == self._side:
            return
        self._shards[self._side] = [group.cached_grad_buffer_shard_list for group in self._groups]
        self._side = side
        for parameter, gradient in zip(self._parameters, self._main_grads[side], strict=True):
            parameter.main_grad = gradient
        buckets = iter(self._buckets[side])
        for buffer, data in zip(self._buffers, self._flat[side], strict=True):
            buffer.grad_data = data
            for bucket in buffer.buckets:
                bucket.grad_data = next(buckets)
        for group, shards in zip(self._groups, self._shards[side], strict=True):
            group.cached_grad_buffer_shard_list = shards

    def start_first_reduction(self) -> None:
        """Start the reduction of the very first batch.

        Megatron learns in the first batch which gradients a bucket has to wait for, and starts the
        reduction only when it is to be finished; that is after the count was closed here.
        """
        for group in self._groups:
            if group.is_first_batch and group.grad_reduce_handle is None:
                group.start_grad_sync()

    def allow_next_reduction(self) -> None:
        """Let a reduction be finished once more in this iteration.

        Megatron finishes one an iteration; here that of the batch before ends amid the iteration,
        and that of the iteration's own batch before a checkpoint.
        """
        for group in self._groups:
            group.grad_reduce_finished = False
