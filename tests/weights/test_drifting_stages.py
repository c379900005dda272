"""Weights that drift between a forward and its backward, stage by stage."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_async.weights.drifting_stages import DriftingStages
from tests.weights.staged_model import StagedModel


def _model(**options: Any) -> Any:
    """Layers without biases; every weight of version v is v + 1."""
    return StagedModel(bias=False, value=1.0, **options)


def _weights(model: Any, backward: dict[int, int]) -> DriftingStages:
    """Those of two stages that run the backwards of microbatch 0 on the given versions."""
    return DriftingStages(
        model,
        SimpleNamespace(),
        stages=2,
        backward_version=lambda batch, microbatch, stage: backward[stage] if microbatch == 0 else 1,
    )


def _step(model: Any, weights: DriftingStages) -> None:
    with weights.next_version(), torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1.0)


def _input_gradient(model: Any, weights: DriftingStages, *, version: int, microbatch: int) -> float:
    """Forward and backward through both layers: the product of the weights that the backward read,
    times the four ways through two layers of two."""
    weights.compute_on(version)
    x = torch.ones(1, 2, requires_grad=True)
    first, second = model.decoder.layers
    output = second(first(x))
    assert output.detach().unique().item() == 4 * (version + 1) ** 2
    weights.compute_on(version)
    weights.before_backward(0, microbatch)
    output.sum().backward()
    assert x.grad is not None
    return float(x.grad.unique().item()) / 4


@pytest.mark.parametrize(
    ("backward", "product"),
    [({0: 0, 1: 0}, 1.0), ({0: 1, 1: 0}, 2.0), ({0: 1, 1: 1}, 4.0)],
)
def test_a_backward_reads_the_version_that_its_stage_has_then(
    backward: dict[int, int], product: float
) -> None:
    model = _model()
    weights = _weights(model, backward)
    _step(model, weights)
    assert _input_gradient(model, weights, version=0, microbatch=0) == product
    # The next forward on the older version finds it as it was made.
    assert _input_gradient(model, weights, version=0, microbatch=0) == product
    assert _input_gradient(model, weights, version=1, microbatch=1) == 4.0


def test_an_update_leaves_nothing_of_the_drift() -> None:
    model = _model()
    weights = _weights(model, {0: 1, 1: 0})
    _step(model, weights)
    _input_gradient(model, weights, version=0, microbatch=0)
    _step(model, weights)
    for version in (1, 2):
        weights.compute_on(version)
        assert {float(p.detach().unique().item()) for p in model.parameters()} == {version + 1.0}
    weights.select(2)


def test_a_tied_embedding_drifts_with_the_output_layer() -> None:
    model = _model(tied=True)
    weights = _weights(model, {0: 0, 1: 1})
    _step(model, weights)
    weights.compute_on(0)
    weights.before_backward(0, 0)
    assert float(model.embedding.word_embeddings.weight.detach().unique().item()) == 2.0
    assert float(model.decoder.layers[0].weight.detach().unique().item()) == 1.0
