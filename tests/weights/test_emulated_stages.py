"""Each parameter on the version of its emulated stage: which tensor is where, and when."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_async.weights.emulated_stages import (
    EmulatedStages,
    stage_of_layer,
    stages_of_parameters,
)
from megatron_async.weights.versions import WeightVersions
from tests.weights.staged_model import StagedModel


def _step(model: torch.nn.Module, weights: WeightVersions) -> None:
    """An update that makes every element of version v equal to v."""
    with weights.next_version() as version, torch.no_grad():
        for parameter in model.parameters():
            assert bool((parameter == version - 1).all())
            parameter.add_(1.0)


def _seen(model: torch.nn.Module) -> dict[str, float]:
    """The version that each part of the model points to."""
    found: dict[str, float] = {}
    for name, parameter in model.named_parameters():
        (value,) = set(parameter.detach().flatten().tolist())
        found[name.rpartition(".")[0]] = value
    return found


@pytest.mark.parametrize(
    ("layers", "stages", "expected"),
    [
        (4, 4, [0, 1, 2, 3]),
        (4, 2, [0, 0, 1, 1]),
        (4, 1, [0, 0, 0, 0]),
        (4, 16, [0, 4, 8, 12]),
        (5, 2, [0, 0, 0, 1, 1]),
    ],
)
def test_layers_are_spread_evenly(layers: int, stages: int, expected: list[int]) -> None:
    found = [stage_of_layer(layer, layers=layers, stages=stages) for layer in range(layers)]
    assert found == expected


def test_ends_of_the_model_belong_to_the_ends_of_the_pipeline() -> None:
    model: Any = StagedModel(layers=4)
    stages = stages_of_parameters(model, 2)
    by_name = {name: stages[parameter] for name, parameter in model.named_parameters()}
    assert by_name == {
        "embedding.word_embeddings.weight": 0,
        **{f"decoder.layers.{n}.{kind}": n // 2 for n in range(4) for kind in ("weight", "bias")},
        "decoder.final_layernorm.weight": 1,
        "decoder.final_layernorm.bias": 1,
        "output_layer.weight": 1,
    }
    model.adapter = torch.nn.Linear(1, 1)
    with pytest.raises(ValueError, match=r"which stage adapter\.weight belongs to"):
        stages_of_parameters(model, 2)


def test_a_batch_runs_on_the_versions_of_its_stages_and_all_else_on_the_newest() -> None:
    model: Any = StagedModel()
    weights = EmulatedStages(model, SimpleNamespace(), stages=4)
    delays = {
        "embedding.word_embeddings": 3,
        "decoder.layers.0": 3,
        "decoder.layers.1": 1,
        "decoder.final_layernorm": 0,
        "output_layer": 0,
    }
    for k in range(8):
        weights.compute_on(k)
        weights.compute_on(k)
        assert _seen(model) == {part: max(k - delay, 0) for part, delay in delays.items()}
        weights.select(k)
        assert set(_seen(model).values()) == {k}
        weights.compute_on(k)
        # The optimizer's step begins on the newest version, whatever was computed on before.
        _step(model, weights)
        assert weights.newest == weights.selected == k + 1
        assert set(_seen(model).values()) == {k + 1}


def test_a_tied_embedding_is_stale_inside_of_the_embedding_alone() -> None:
    model: Any = StagedModel(tied=True)
    weights = EmulatedStages(model, SimpleNamespace(), stages=3)
    words = model.embedding.word_embeddings
    tokens = torch.tensor([0, 2])
    for k in range(6):
        weights.compute_on(k)
        stale = max(k - 2, 0)
        assert words(tokens).detach().tolist() == [[stale, stale]] * 2
        assert bool((words.weight == k).all())
        weights.select(k)
        assert words(tokens).detach().tolist() == [[k, k]] * 2
        _step(model, weights)


def test_gradient_of_a_tied_embedding_is_the_sum_of_its_two_uses() -> None:
    model: Any = StagedModel(tied=True)
    weights = EmulatedStages(model, SimpleNamespace(), stages=2)
    weight = model.embedding.word_embeddings.weight
    with torch.no_grad():
        weight.copy_(torch.arange(6.0).view(3, 2))
    first = weight.detach().clone()
    with weights.next_version(), torch.no_grad():
        weight.mul_(10.0)
    weights.compute_on(1)
    hidden = model.embedding.word_embeddings(torch.tensor([1]))
    torch.nn.functional.linear(hidden, weight).sum().backward()
    copies = [value.clone().requires_grad_() for value in (first, 10.0 * first)]
    torch.nn.functional.linear(
        torch.nn.functional.embedding(torch.tensor([1]), copies[0]), copies[1]
    ).sum().backward()
    assert torch.equal(weight.grad, copies[0].grad + copies[1].grad)


def test_other_versions_are_refused_and_a_failed_update_is_not_published() -> None:
    model: Any = StagedModel()
    weights = EmulatedStages(model, SimpleNamespace(), stages=2)
    _step(model, weights)
    for version in (0, 2):
        with pytest.raises(ValueError, match=f"version {version} is gone or not there yet"):
            weights.compute_on(version)

    def fail() -> None:
        with weights.next_version():
            raise RuntimeError("the norm is NaN")

    with pytest.raises(RuntimeError, match="the norm is NaN"):
        fail()
    assert weights.newest == weights.selected == 1


def test_restart_leaves_no_older_version() -> None:
    model: Any = StagedModel()
    weights = EmulatedStages(model, SimpleNamespace(), stages=4)
    for _ in range(5):
        _step(model, weights)
    weights.compute_on(5)
    weights.restart(newest=0)
    weights.compute_on(0)
    assert set(_seen(model).values()) == {5}
    with weights.next_version(), torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1.0)
    weights.compute_on(1)
    assert _seen(model)["decoder.layers.0"] == 5
    assert _seen(model)["output_layer"] == 6


def test_older_versions_take_what_the_delays_need() -> None:
    model: Any = StagedModel()
    weights = EmulatedStages(model, SimpleNamespace(), stages=4)
    sizes: dict[str, Any] = {name: p.numel() for name, p in model.named_parameters()}
    first = sizes["embedding.word_embeddings.weight"] + 6  # 2 x 2 and 2 elements of layer 0
    assert weights.older_bytes() == 4 * (3 * first + 1 * 6)
    assert weights.count == 1
    one = EmulatedStages(StagedModel(), SimpleNamespace(), stages=1)
    assert one.older_bytes() == 0
