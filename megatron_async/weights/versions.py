"""Weight versions, each in a buffer of its own: two of them with PipeDream-2BW.

Versions take turns with the buffers. A batch's forward and backward use one buffer from first
to last, so nothing that autograd saved (leaf parameters, transposed views as in F.linear, aliases
that fused layers keep) is overwritten under a live graph. Selecting a version repoints
``param.data``; making version v + 1 copies version v into the next buffer and lets Megatron's
unmodified optimizer step write there. One live buffer with one stash would corrupt saved views
without a word.

Source: "Memory-Efficient Pipeline-Parallel DNN Training" (arXiv 2006.09503), section 3.1, and for
more than two versions PipeDream's weight stashing (SOSP 2019, section 3.3); what has
to be repointed together was read off megatron/core/distributed/param_and_grad_buffer.py and
megatron/core/optimizer/distrib_optimizer.py.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.autograd.grad_mode import _unsafe_preserve_version_counter

from megatron_async.megatron.data_parallel import bucket_groups, ddp_buffers
from megatron_async.megatron.optimizers import distributed_optimizer_shards

__all__ = ["WeightVersions"]


class WeightVersions:
    """The weights of one model chunk in several versions.

    Memory: ``count`` - 1 more copies of the trainable weights in the model's precision, padding of
    the distributed optimizer's buffers included. Frozen parameters are shared by all versions.

    Args:
        model_chunk: Megatron's ``DistributedDataParallel``.
        optimizer: Megatron's optimizer of that chunk; its views of the weights are repointed too.
        count: how many versions are kept, the newest included. With one, updates are made in place.
        buffers: of the model, what an update changes beside the parameters.

    Raises:
        ValueError: ``count`` < 1.
    """

    def __init__(
        self,
        model_chunk: Any,
        optimizer: Any,
        *,
        count: int = 2,
        buffers: Sequence[torch.Tensor] = (),
    ) -> None:
        if count < 1:
            raise ValueError(f"there is at least one weight version, got {count}")
        self.count = count
        self._parameters = [p for p in model_chunk.parameters() if p.requires_grad]
        self.versioned: list[torch.Tensor] = [*self._parameters, *buffers]
        """All that has versions: the trainable parameters, then the buffers."""
        self._flat_buffers = [
            buffer for buffer in ddp_buffers(model_chunk) if buffer.param_data is not None
        ]
        self._bucket_groups = bucket_groups(model_chunk)
        self._shards = distributed_optimizer_shards(optimizer)
        # Views are recognised by their storage, and rebuilt at the same offset of the other ones.
        self._twins_of_storage = {
            buffer.param_data.untyped_storage().data_ptr(): [
                buffer.param_data.clone() for _ in range(count - 1)
            ]
            for buffer in self._flat_buffers
        }
        mine = [each.data for each in self.versioned]
        views = [self._twin_views(data) for data in mine]
        twins = [
            [data.clone() for _ in range(count - 1)] if found is None else found
            for data, found in zip(mine, views, strict=True)
        ]

        self._data = [mine, *([each[n] for each in twins] for n in range(count - 1))]
        self._flat = self._every([buffer.param_data for buffer in self._flat_buffers])
        self._buckets = self._every(
            [bucket.param_data for buffer in self._flat_buffers for bucket in buffer.buckets]
        )
        self._shard_data = self._every([shard.data for shard in self._shards])
        self._loose = [
            [tensor for tensor, found in zip(data, views, strict=True) if found is None]
            for data in self._data
        ]

        self._offset = 0
        self.newest = 0
        """Number of the newest complete version."""
        self.selected = 0
        """Number of the version that the buffers and the optimizer point to, and outside of a
        microbatch the parameters."""
        self._computing = 0
        """The side that the parameters point to."""

    def _twin_views(self, tensor: torch.Tensor) -> list[torch.Tensor] | None:
        """Return the views of the other flat buffers that correspond to a view of the first."""
        twins = self._twins_of_storage.get(tensor.untyped_storage().data_ptr())
        if twins is None:
            return None
        return [
            twin.as_strided(tensor.size(), tensor.stride(), tensor.storage_offset())
            for twin in twins
        ]

    def _every(self, views: list[torch.Tensor]) -> list[list[torch.Tensor]]:
        """Return, for each side, its own views."""
        twins = []
        for view in views:
            found = self._twin_views(view)
            if found is None:
                # A shard of a parameter that is in no flat buffer.
                raise RuntimeError(
                    "megatron_async: a view of the weights lies outside of the parameter buffers "
                    "of Megatron's DistributedDataParallel; this layout is not supported"
                )
            twins.append(found)
        return [views, *([each[n] for each in twins] for n in range(self.count - 1))]

    def select(self, version: int) -> None:
        """Let the model point to ``version``, one of the newest :attr:`count`.

        Raises:
            ValueError: another version was asked for; its buffer is reused.
        """
        self._check(version)
        self._point_to(version)

    def compute_on(self, version: int) -> None:
        """Let a microbatch run forward or backward on ``version``: as :meth:`select`, but for the
        parameters alone, which is all that it reads; other weights where stages are emulated.

        With a single version that is the newest, also if the one before is meant: an evaluation or
        a checkpoint has then completed an update early.

        Raises:
            ValueError: as :meth:`select`.
        """
        if self.count == 1 and version == self.newest - 1:
            version = self.newest
        self._check(version)
        side = self._side(version)
        if side != self._computing:
            self._repoint_parameters(side)
            self._computing = side

    def before_backward(self, batch: int, microbatch: int) -> None:
        """Called behind :meth:`compute_on` where a backward follows; for weights that drift."""

    def _check(self, version: int) -> None:
        if not max(self.newest - self.count, -1) < version <= self.newest:
            raise ValueError(
                f"weight version {version} is gone or not there yet: the newest is {self.newest}"
            )

    def _point_to(self, version: int) -> None:
        side = self._side(version)
        if side != self._computing:
            self._repoint_parameters(side)
            self._computing = side
        moves = side != self._side(self.selected)
        self.selected = version
        if moves:
            self._repoint_flat_buffers(side)
            self._repoint_shards(side)

    def _repoint_parameters(self, side: int) -> None:
        for each, data in zip(self.versioned, self._data[side], strict=True):
            each.data = data

    def _repoint_flat_buffers(self, side: int) -> None:
        """What all-gathers of the parameters write to, and where main parameters are copied to."""
        buckets = iter(self._buckets[side])
        for buffer, flat in zip(self._flat_buffers, self._flat[side], strict=True):
            buffer.param_data = flat
            for bucket in buffer.buckets:
                bucket.param_data = next(buckets)
        for group in self._bucket_groups:
            # Views of the other side, cached at the first all-gather.
            group.cached_param_buffer_shard_list = [None] * len(group.buckets)

    def _repoint_shards(self, side: int) -> None:
        for shard, data in zip(self._shards, self._shard_data[side], strict=True):
            shard.data = data

    @contextmanager
    def next_version(self) -> Iterator[int]:
        """Make version ``newest + 1``: the body is the optimizer's step.

        The body starts on a copy of the newest version, in the buffer of the oldest; with a single
        version on that itself. The version counts as made only if the body does not raise; until
        then, and if it does raise, ``newest`` stays. Afterwards the model computes on the newest
        version.

        In-place steps on parameters that a live graph saved are allowed here: the graph belongs to
        another buffer, so autograd's check of version counters would be a false alarm.
        """
        version = self.newest + 1
        self.select(self.newest)
        source, target = self._side(self.newest), self._side(version)
        if source != target:
            with torch.no_grad():
                for old, new in zip(self._flat[source], self._flat[target], strict=True):
                    new.copy_(old)
                if self._loose[source]:
                    torch._foreach_copy_(self._loose[target], self._loose[source])
        before = self.selected
        self._point_to(version)
        try:
            with _unsafe_preserve_version_counter(tuple(self._parameters)):
                yield version
        except BaseException:
            self._point_to(before)
            raise
        self.newest = version

    def _side(self, version: int) -> int:
        return (version + self._offset) % self.count

    def restart(self, *, newest: int = 0) -> None:
        """Number what the model points to now as version ``newest``.

        Called when training begins to be asynchronous, after a checkpoint was loaded or after
        synchronous iterations: the weights are where Megatron's own code wrote them.
        """
        self._point_to(self.selected)
        self._offset += self._side(self.selected) - self._side(newest)
        self.newest = self.selected = newest

    def state_dict(self) -> dict[str, Any]:
        """Return what a resume needs beside the weights: plain data."""
        return {"newest": self.newest}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Number what the model points to now as it was when the state was taken."""
        self.restart(newest=state["newest"])

    def set_previous(self, values: Sequence[torch.Tensor]) -> None:
        """Set the version before the newest, from one tensor for each of :attr:`versioned`.

        Raises:
            ValueError: the number of tensors or a shape differs, or one version alone is kept.
        """
        if self.count == 1:
            raise ValueError("there is no version before the newest")
        targets = self._data[self._side(self.newest - 1)]
        if len(values) != len(targets):
            raise ValueError(f"expected {len(targets)} tensors, got {len(values)}")
        with torch.no_grad():
            for target, value in zip(targets, values, strict=True):
                if target.shape != value.shape:
                    raise ValueError(f"expected shape {target.shape}, got {value.shape}")
                target.copy_(value)

    def tensors(self, version: int) -> list[torch.Tensor]:
        """Return the data of each of :attr:`versioned` at ``version`` (views, not copies)."""
        self._check(version)
        return self._data[self._side(version)]

    @property
    def parameters(self) -> list[torch.nn.Parameter]:
        """The trainable parameters, in the order of ``parameters()``."""
        return self._parameters

    def buffers(self, version: int) -> list[torch.Tensor]:
        """Return the data of the buffers at ``version`` (not copies), in the order given."""
        return self.tensors(version)[len(self._parameters) :]

    def storages(self, version: int) -> list[torch.UntypedStorage]:
        """The unique storages that hold ``version``, to count memory by."""
        side = self._side(version)
        found = {
            tensor.untyped_storage().data_ptr(): tensor.untyped_storage()
            for tensor in (*self._flat[side], *self._loose[side])
        }
        return list(found.values())
