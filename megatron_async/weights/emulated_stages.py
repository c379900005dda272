"""The delays of a pipeline of P stages on one: each layer runs on the version its stage would use.

With one pipeline stage a batch's forwards and backwards all lie between two updates, so no graph is
alive when the weights change, and PipeDream's weight stashing comes down to this: while batch k is
computed, a parameter of stage s points to version max(k - (P - 1 - s), 0); at all other times (the
optimizer's step, evaluations, checkpoints) the model is the newest version, in Megatron's own
buffers. Gradients, clipping and updates are those of an ordinary iteration.

Layers are spread over the stages evenly, as Megatron does it: layer l of L belongs to stage
floor(l P / L), the embeddings to the first one, the final norm and the output layer to the last.

Source: "PipeDream: Generalized Pipeline Parallelism for DNN Training" (SOSP 2019), section 3.3;
megatron/core/transformer/transformer_block.py and megatron/core/models/gpt/gpt_model.py for which
stage has what.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core.utils import get_attr_wrapped_model

from megatron_async.weights.versions import WeightVersions

__all__ = ["EmulatedStages", "parameter_delays", "stage_of_layer", "stages_of_parameters"]


def stage_of_layer(layer: int, *, layers: int, stages: int) -> int:
    """Return the stage of a layer (0 is the first), if ``layers`` are spread evenly over
    ``stages``. With more stages than layers some have none."""
    return layer * stages // layers


def parameter_delays(model_chunk: Any, stages: int) -> list[int]:
    """Return by how many updates the gradient of each trainable parameter is late, in the order of
    ``parameters()``: P - 1 - s for stage s."""
    stage_of = stages_of_parameters(model_chunk, stages)
    return [stages - 1 - stage_of[p] for p in model_chunk.parameters() if p.requires_grad]


def stages_of_parameters(model_chunk: Any, stages: int) -> dict[torch.nn.Parameter, int]:
    """Return the emulated stage of each parameter of a whole GPT.

    A tied embedding counts as the first stage's; its use in the output layer is the last stage's.

    Raises:
        ValueError: a parameter is in no part of the model of which it is known.
    """
    chunk = get_attr_wrapped_model(model_chunk, "pre_process", return_model_obj=True)
    found: dict[torch.nn.Parameter, int] = {}
    for name, parameter in chunk.named_parameters():
        match name.split("."):
            case ["embedding", *_]:
                stage = 0
            case ["decoder", "layers", index, *_]:
                number = chunk.decoder.layers[int(index)].layer_number - 1
                stage = stage_of_layer(number, layers=chunk.config.num_layers, stages=stages)
            case ["decoder", "final_layernorm", *_] | ["output_layer", *_]:
                stage = stages - 1
            case _:
                raise ValueError(
                    f"--emulate-pipeline-stages: it is not known which stage {name} belongs to"
                )
        found[parameter] = stage
    return found


class EmulatedStages(WeightVersions):
    """The weights of a whole model, and of each parameter as many older versions as it needs.

    Memory: p - 1 - s more copies of the trainable weights of stage s in the model's precision, on
    average (P - 1) / 2.

    Args:
        model_chunk: Megatron's ``DistributedDataParallel`` around a whole GPT.
        optimizer: Megatron's optimizer of that chunk.
        stages: P.

    Raises:
        ValueError: see :func:`stages_of_parameters`.
    """

    def __init__(self, model_chunk: Any, optimizer: Any, *, stages: int) -> None:
        super().__init__(model_chunk, optimizer, count=1)
        self.delays = parameter_delays(model_chunk, stages)
        """By how many updates the gradient of each of :attr:`parameters` is late."""
        self._older = [
            [torch.empty_like(p.data) for _ in range(delay)]
            for p, delay in zip(self._parameters, self.delays, strict=True)
        ]
        """Version v of a parameter with delay d is in the place v mod d."""
        self._first = 0
        """Version that the asynchronous segment began with."""
        self._mixed = False
        """Whether the model points to the versions that a batch is computed on."""
        self._tied: int | None = None
        self._split_tied_embedding(model_chunk)

    def _split_tied_embedding(self, model_chunk: Any) -> None:
        """Let a tied embedding be the first stage's in the embedding and the last one's in the
        output layer: two copies with one sum of gradients, as in a real pipeline.

        The embedding's backward does not read the weight, so outside of its forward the weight may
        be the output layer's.
        """
        chunk = get_attr_wrapped_model(model_chunk, "pre_process", return_model_obj=True)
        if not chunk.share_embeddings_and_output_weights:
            return
        words = chunk.embedding.word_embeddings
        if not words.weight.requires_grad:
            return
        index = next(i for i, p in enumerate(self._parameters) if p is words.weight)
        self._tied = index

        def before(*_: Any) -> None:
            if self._mixed:
                words.weight.data = self._stale(index, self.newest)

        def after(*_: Any) -> None:
            if self._mixed:
                words.weight.data = self._data[0][index]

        words.register_forward_pre_hook(before)
        words.register_forward_hook(after)

    def compute_on(self, version: int) -> None:
        """Point each parameter to the version that its stage has for the batch whose newest
        version is ``version``.

        Raises:
            ValueError: ``version`` is not the newest.
        """
        self._check(version)
        if self._mixed:
            return
        self.select(version)
        for i, parameter in enumerate(self._parameters):
            if i != self._tied:
                parameter.data = self._stale(i, version)
        self._mixed = True

    def _stale(self, index: int, newest: int) -> torch.Tensor:
        """Return a parameter's data at max(newest - delay, first)."""
        delay = self.delays[index]
        version = max(newest - delay, self._first)
        return self._data[0][index] if version == newest else self._older[index][version % delay]

    def select(self, version: int) -> None:
        """Point the whole model to the newest version.

        Raises:
            ValueError: ``version`` is not the newest.
        """
        super().select(version)
        if self._mixed:
            self._repoint_parameters(0)
            self._mixed = False

    @contextmanager
    def next_version(self) -> Iterator[int]:
        """Make version ``newest + 1`` in place, and keep the newest one for the stages that still
        need it, in the place of one that no stage needs any more.

        If the body raises, ``newest`` stays, but its weights are lost; the run is to end.
        """
        self.select(self.newest)
        targets, sources = [], []
        for data, older in zip(self._data[0], self._older, strict=True):
            if older:
                targets.append(older[self.newest % len(older)])
                sources.append(data)
        if targets:
            with torch.no_grad():
                torch._foreach_copy_(targets, sources)
        with super().next_version() as version:
            yield version

    def restart(self, *, newest: int = 0) -> None:
        """Number what the model points to as version ``newest``, with none before it."""
        self.select(self.newest)
        super().restart(newest=newest)
        self._first = newest

    def older_bytes(self) -> int:
        """Return the size of all older versions."""
        return sum(data.nbytes for older in self._older for data in older)
