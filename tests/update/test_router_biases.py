"""Routers' biases are made with the version that a batch's update makes."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_async.update.router_biases import RouterBiases
from megatron_async.weights.versions import WeightVersions


def _build(count: int) -> tuple[torch.Tensor, WeightVersions, RouterBiases]:
    model: Any = torch.nn.Linear(2, 2)
    bias = torch.tensor([1.0, -1.0])
    optimizer = SimpleNamespace(optimizer=torch.optim.SGD(model.parameters(), lr=1.0))
    weights = WeightVersions(model, optimizer, count=count, buffers=[bias])
    return bias, weights, RouterBiases(weights)


def test_the_next_versions_biases_are_seen_on_that_version_alone() -> None:
    bias, weights, biases = _build(count=2)
    for version in range(4):
        weights.select(max(version - 1, 0))
        before = bias.tolist()
        with biases.computing():
            # Computed from the newest version's, whichever is selected.
            assert bias.tolist() == [1.0 + version, -1.0]
            bias += torch.tensor([1.0, 0.0])
        assert bias.tolist() == before
        with weights.next_version():
            pass
        biases.publish()
        for each in (version, version + 1):
            weights.compute_on(each)
            assert bias.tolist() == [1.0 + each, -1.0]


def test_with_one_version_they_change_in_place_when_it_is_made() -> None:
    bias, weights, biases = _build(count=1)
    with biases.computing():
        bias += 1.0
    assert bias.tolist() == [1.0, -1.0]
    with weights.next_version():
        pass
    biases.publish()
    assert bias.tolist() == [2.0, 0.0]
    # Nothing was computed for the next one, which has the same.
    with weights.next_version():
        pass
    biases.publish()
    assert bias.tolist() == [2.0, 0.0]


def test_two_kinds_of_biases_are_computed_one_after_the_other() -> None:
    bias, weights, biases = _build(count=2)
    for index in range(2):
        with biases.computing():
            bias[index] = 5.0
    with weights.next_version():
        pass
    biases.publish()
    assert bias.tolist() == [5.0, 5.0]


def test_an_error_in_megatrons_update_leaves_the_versions_alone() -> None:
    bias, weights, biases = _build(count=2)

    def broken_update() -> None:
        with biases.computing():
            bias.add_(1.0)
            raise RuntimeError("broken")

    with pytest.raises(RuntimeError, match="broken"):
        broken_update()
    assert bias.tolist() == [1.0, -1.0]
    with weights.next_version():
        pass
    biases.publish()
    assert bias.tolist() == [1.0, -1.0]
