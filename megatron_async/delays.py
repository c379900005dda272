"""By how many updates the gradients of an optimizer's own parameters are late.

Those are the model's parameters, or their fp32 main parameters, or shards of either; what is known
is the delay of the model's. Source: megatron/core/optimizer/optimizer.py and distrib_optimizer.py.
"""

from typing import Any

import torch

from megatron_async.weight_versions import WeightVersions

__all__ = ["optimizer_delays"]


def optimizer_delays(leaf: Any, weights: WeightVersions) -> dict[torch.Tensor, int]:
    """Return the delay of each parameter of a torch optimizer.

    Args:
        leaf: one of :func:`~megatron_async.weight_versions.inner_optimizers`.
        weights: the model's, with their delays.
    """
    of_model = dict(zip(weights.parameters, weights.delays, strict=True))
    found: dict[torch.Tensor, int] = {}
    for parameter, delay in of_model.items():
        found[parameter] = delay
        main = getattr(parameter, "main_param", None)
        if main is not None:
            found[main] = delay
    groups = zip(
        getattr(leaf, "model_fp32_groups", []), getattr(leaf, "shard_fp32_groups", []), strict=True
    )
    for parameters, shards in groups:
        for parameter, shard in zip(parameters, shards, strict=True):
            if shard is not None:
                found[shard] = of_model[parameter]
    return {
        parameter: found[parameter]
        for group in leaf.optimizer.param_groups
        for parameter in group["params"]
        if parameter in found
    }
