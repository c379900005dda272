"""Which delay each of an optimizer's own parameters has."""

from types import SimpleNamespace

import torch
from megatron_async.delays import optimizer_delays

from megatron_async.weights.versions import WeightVersions


def _model() -> tuple[torch.nn.Linear, WeightVersions]:
    model = torch.nn.Linear(3, 2)
    weights = WeightVersions(model, SimpleNamespace(), count=1)
    weights.delays = [5, 2]
    return model, weights


def _leaf(parameters: list[torch.Tensor], **more: object) -> SimpleNamespace:
    groups = [{"params": parameters[:1]}, {"params": parameters[1:]}]
    return SimpleNamespace(optimizer=SimpleNamespace(param_groups=groups), **more)


def test_optimizer_of_the_models_parameters() -> None:
    model, weights = _model()
    leaf = _leaf([model.bias, model.weight])
    assert optimizer_delays(leaf, weights) == {model.weight: 5, model.bias: 2}
    # One of several optimizers has some of them.
    assert optimizer_delays(_leaf([model.bias]), weights) == {model.bias: 2}


def test_optimizer_of_main_parameters() -> None:
    model, weights = _model()
    model.weight.main_param = torch.zeros(3)  # this rank's shard
    model.bias.main_param = None
    assert optimizer_delays(_leaf([model.weight.main_param]), weights) == {
        model.weight.main_param: 5
    }


def test_optimizer_of_shards_of_fp32_parameters() -> None:
    model, weights = _model()
    shard = model.bias.detach()[:1]
    leaf = _leaf(
        [shard],
        model_fp32_groups=[[model.weight, model.bias]],
        shard_fp32_groups=[[None, shard]],
    )
    assert optimizer_delays(leaf, weights) == {shard: 2}


def test_versions_that_are_kept_for_a_delay_name_it() -> None:
    model = torch.nn.Linear(3, 2)
    weights = WeightVersions(model, SimpleNamespace(), count=4)
    leaf = _leaf([model.weight, model.bias])
    assert optimizer_delays(leaf, weights) == {model.weight: 3, model.bias: 3}
