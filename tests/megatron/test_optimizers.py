"""What Megatron's optimizers are made of."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch

from megatron_async.megatron.optimizers import (
    distributed_optimizer_shards,
    inner_optimizers,
    model_parameters,
)


def _leaf(parameters: Sequence[torch.Tensor], **more: object) -> SimpleNamespace:
    groups = [{"params": parameters[:1]}, {"params": parameters[1:]}]
    return SimpleNamespace(optimizer=SimpleNamespace(param_groups=groups), **more)


def _names(leaf: SimpleNamespace, model: torch.nn.Module) -> dict[torch.Tensor, str]:
    """The name of the model's parameter that each of an optimizer's own stands for."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    found = model_parameters(leaf, list(names))
    return {own: names[parameter] for own, parameter in found.items()}


def test_optimizer_of_the_models_parameters() -> None:
    model = torch.nn.Linear(3, 2)
    leaf = _leaf([model.bias, model.weight])
    assert _names(leaf, model) == {model.weight: "weight", model.bias: "bias"}
    # One of several optimizers has some of them.
    assert _names(_leaf([model.bias]), model) == {model.bias: "bias"}


def test_optimizer_of_main_parameters() -> None:
    model: Any = torch.nn.Linear(3, 2)
    main = torch.zeros(3)  # this rank's shard
    model.weight.main_param = main
    model.bias.main_param = None
    assert _names(_leaf([main]), model) == {main: "weight"}


def test_optimizer_of_shards_of_fp32_parameters() -> None:
    model: Any = torch.nn.Linear(3, 2)
    shard = model.bias.detach()[:1]
    leaf = _leaf(
        [shard],
        model_fp32_groups=[[model.weight, model.bias]],
        shard_fp32_groups=[[None, shard]],
    )
    assert _names(leaf, model) == {shard: "bias"}
    # Shards of parameters that were not asked for are left out.
    assert model_parameters(leaf, [model.weight]) == {}


def test_inner_optimizers_and_shards_of_nested_chains() -> None:
    leaves = [SimpleNamespace(shard_fp32_groups=[[torch.zeros(1)]]) for _ in range(2)]
    stub = SimpleNamespace(is_stub_optimizer=True)
    chain = SimpleNamespace(
        chained_optimizers=[SimpleNamespace(chained_optimizers=[leaves[0], stub]), leaves[1]]
    )
    assert inner_optimizers(chain) == leaves
    assert len(distributed_optimizer_shards(chain)) == 2
    assert inner_optimizers(stub) == []
