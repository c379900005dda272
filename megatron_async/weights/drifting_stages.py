"""PACI's drift on one stage: layers run backward on newer weights than forward.

In a pipeline that keeps one copy of its weights, a microbatch in flight while an update is made has
its forward on one version and its backward on the next. With one stage nothing is in flight then.
So two versions are kept, and for a backward that comes behind the update on its stage the newest
weights are written to where the forward's graph finds the older ones; the next forward finds these
again. Which storage a graph reads is decided in its forward, so pointing elsewhere would not do.

Source: PACI (arXiv 2606.07881); which layers belong to which stage is in
:mod:`megatron_async.weights.emulated_stages`.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core.utils import get_attr_wrapped_model
from torch.autograd.grad_mode import _unsafe_preserve_version_counter

from megatron_async.weights.emulated_stages import stages_of_parameters
from megatron_async.weights.versions import WeightVersions

__all__ = ["DriftingStages"]


class DriftingStages(WeightVersions):
    """Two versions of a whole model, of which the older one drifts for backwards.

    Memory: two more copies of the trainable weights in the model's precision. The pipeline that is
    emulated needs none of them.

    Args:
        model_chunk: Megatron's ``DistributedDataParallel`` around a whole GPT.
        optimizer: Megatron's optimizer of that chunk.
        stages: P.
        backward_version: on which version a stage runs the backward of a microbatch, from the
            batch, the microbatch and the stage.

    Raises:
        ValueError: a parameter is in no part of the model of which its stage is known.
    """

    def __init__(
        self,
        model_chunk: Any,
        optimizer: Any,
        *,
        stages: int,
        backward_version: Callable[[int, int, int], int],
    ) -> None:
        super().__init__(model_chunk, optimizer, count=2)
        stage_of = stages_of_parameters(model_chunk, stages)
        chunk = get_attr_wrapped_model(model_chunk, "pre_process", return_model_obj=True)
        if chunk.share_embeddings_and_output_weights:
            # Both ends of the pipeline have a copy, and the embedding's backward does not read it.
            stage_of[chunk.embedding.word_embeddings.weight] = stages - 1
        self._stages = stages
        self._of_stage = [
            [index for index, p in enumerate(self._parameters) if stage_of[p] == stage]
            for stage in range(stages)
        ]
        self._backward_version = backward_version
        self._older = [data.clone() for data in self.tensors(self.newest)]
        """The version before the newest as it was made."""
        self._drifted = False

    def compute_on(self, version: int) -> None:
        """As :meth:`WeightVersions.compute_on`; the version is the one that was made."""
        if self._drifted and version == self.newest - 1:
            self._write(self.tensors(version), self._older, range(len(self._older)))
            self._drifted = False
        super().compute_on(version)

    def before_backward(self, batch: int, microbatch: int) -> None:
        """Let each stage run the backward of a microbatch on the version that it has then."""
        newer = [
            index
            for stage in range(self._stages)
            if self._backward_version(batch, microbatch, stage) == self.newest
            for index in self._of_stage[stage]
        ]
        if newer and self._data[self._computing] is not self.tensors(self.newest):
            self._write(self._data[self._computing], self.tensors(self.newest), newer)
            self._drifted = True

    def _write(
        self, targets: list[torch.Tensor], sources: list[torch.Tensor], indices: Any
    ) -> None:
        # That a graph saved them is why they are written.
        with torch.no_grad(), _unsafe_preserve_version_counter(tuple(targets)):
            torch._foreach_copy_([targets[i] for i in indices], [sources[i] for i in indices])

    @contextmanager
    def next_version(self) -> Iterator[int]:
        """As :meth:`WeightVersions.next_version`; what has drifted is overwritten."""
        made = self.tensors(self.newest)
        with super().next_version() as version:
            yield version
        self._write(self._older, made, range(len(made)))
        self._drifted = False
