"""What Megatron's optimizers are made of.

Source: megatron/core/optimizer/optimizer.py, distrib_optimizer.py, layer_wise_optimizer.py and
emerging_optimizers.py.
"""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch

__all__ = [
    "distributed_optimizer_shards",
    "emerging_optimizers",
    "frozen_squares",
    "gradient_attribute",
    "gradients_for_norm",
    "inner_optimizers",
    "keep_loss_scale_on_host",
    "main_parameters_of",
    "model_parameters",
    "owns_layer_wise",
    "parameters_for_norm",
    "statistics_groups",
]


def inner_optimizers(optimizer: Any) -> list[Any]:
    """Return the Megatron optimizers that hold one torch optimizer each, in a fixed order.

    Chains (and the layer-wise optimizer, which is one) may be nested; stubs of ranks without
    trainable parameters are left out.
    """
    if hasattr(optimizer, "chained_optimizers"):
        return [leaf for link in optimizer.chained_optimizers for leaf in inner_optimizers(link)]
    return [] if getattr(optimizer, "is_stub_optimizer", False) else [optimizer]


def distributed_optimizer_shards(optimizer: Any) -> list[torch.Tensor]:
    """Return the optimizer's shards that are views of model parameters.

    The distributed optimizer keeps copies of what is in 16 bits, as both views
    (``shard_float16_groups``) and fp32 main parameters; of fp32 parameters it steps the view
    itself. Both kinds of view have to follow the weight version.
    """
    shards: list[torch.Tensor] = []
    for leaf in inner_optimizers(optimizer):
        for name in ("shard_float16_groups", "shard_fp32_groups"):
            for group in getattr(leaf, name, []):
                shards.extend(shard for shard in group if shard is not None)
    return shards


def model_parameters(
    leaf: Any, candidates: Sequence[torch.nn.Parameter]
) -> dict[torch.Tensor, torch.nn.Parameter]:
    """Return, for each parameter of a torch optimizer, the model's parameter that it stands for.

    That is the parameter itself, its fp32 main parameter, or a shard of either.

    Args:
        leaf: one of :func:`inner_optimizers`.
        candidates: the model's parameters; those of other optimizers may be among them.
    """
    found: dict[torch.Tensor, torch.nn.Parameter] = {}
    for parameter in candidates:
        found[parameter] = parameter
        main = getattr(parameter, "main_param", None)
        if main is not None:
            found[main] = parameter
    known = {id(parameter) for parameter in candidates}
    for parameter, shard in _shards(leaf):
        if shard is not None and id(parameter) in known:
            found[shard] = parameter
    return {
        parameter: found[parameter]
        for group in leaf.optimizer.param_groups
        for parameter in group["params"]
        if parameter in found
    }


def main_parameters_of(
    model_parameter: torch.nn.Parameter | None, leaves: Sequence[Any]
) -> set[int]:
    """Return the ids of the torch optimizers' parameters that stand for a model parameter.

    That is its fp32 main parameter or this rank's shard of it, if it has one here.
    """
    if model_parameter is None:
        return set()
    found = {id(model_parameter)}
    main = getattr(model_parameter, "main_param", None)
    if main is not None:
        found.add(id(main))
    for leaf in leaves:
        found |= {id(shard) for model, shard in _shards(leaf) if model is model_parameter}
    return found


def _shards(leaf: Any) -> list[tuple[torch.nn.Parameter, torch.Tensor | None]]:
    """(model parameter, this rank's shard) of what the distributed optimizer steps in place: shards
    in fp32, and with the precision-aware optimizer those in 16 bits, whose main parameters are
    in the torch optimizer's state."""
    kinds = ["fp32"] if gradient_attribute(leaf) == "grad" else ["fp32", "float16"]
    return [
        pair
        for kind in kinds
        for models, shards in zip(
            getattr(leaf, f"model_{kind}_groups", []),
            getattr(leaf, f"shard_{kind}_groups", []),
            strict=True,
        )
        for pair in zip(models, shards, strict=True)
    ]


def gradient_attribute(optimizer: Any) -> str:
    """Return the attribute in which the torch optimizers find a parameter's gradient.

    With the precision-aware optimizer it is ``decoupled_grad``: the parameters are the model's, in
    16 bits, and the gradients of another type.
    """
    config = getattr(optimizer, "config", None)
    decoupled = getattr(config, "use_precision_aware_optimizer_no_fp8_or_ds_fp8", False)
    return "decoupled_grad" if decoupled else "grad"


def owns_layer_wise(optimizer: Any) -> bool:
    """Whether the layer-wise optimizer manages an embedding, on whichever rank.

    It does unless another optimizer of the chain holds it.
    """
    from megatron.core.optimizer.layer_wise_optimizer import LayerWiseDistributedOptimizer

    links = getattr(optimizer, "chained_optimizers", [])
    if isinstance(optimizer, LayerWiseDistributedOptimizer):
        return True
    layer_wise = [link for link in links if isinstance(link, LayerWiseDistributedOptimizer)]
    others = [link for link in links if link not in layer_wise]
    return bool(layer_wise) and not others


def statistics_groups(optimizer: Any) -> list[Any]:
    """Return, for each of :func:`inner_optimizers`, the process group over which Megatron sums the
    statistics of its gradients; None for the world."""
    from megatron.core.optimizer.layer_wise_optimizer import LayerWiseDistributedOptimizer

    if isinstance(optimizer, LayerWiseDistributedOptimizer):
        # Each rank owns whole parameters, and Megatron sums over the world.
        return [None] * len(inner_optimizers(optimizer))
    if hasattr(optimizer, "chained_optimizers"):
        return [group for link in optimizer.chained_optimizers for group in statistics_groups(link)]
    if getattr(optimizer, "is_stub_optimizer", False):
        return []
    return [optimizer.get_grad_stats_parallel_group()]


def keep_loss_scale_on_host(optimizer: Any) -> None:
    """Let a loss scale that never changes be a number on the host.

    Megatron's loop reads it in every iteration, and so waits for the device (``train`` in
    megatron/training/training.py). It changes with fp16 alone.
    """
    leaves = inner_optimizers(optimizer)
    if any(getattr(leaf, "grad_scaler", None) is not None for leaf in leaves) or not leaves:
        return
    # Without dimensions: it is multiplied with losses on the device.
    scale = torch.tensor(float(optimizer.get_loss_scale()), device="cpu")
    optimizer.get_loss_scale = lambda: scale


def gradients_for_norm(leaf: Any, parameters: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return the gradients of some of an optimizer's parameters that count for the norm on this
    rank: each shared or replicated parameter is counted on one rank."""
    gradients: list[torch.Tensor]
    if hasattr(leaf, "_filter_grads_for_norm"):
        gradients = leaf._filter_grads_for_norm(parameters)
        return gradients
    # 0.18 filters all that the optimizer has.
    leaf.get_parameters = lambda: parameters
    try:
        gradients = leaf.get_main_grads_for_grad_norm()
    finally:
        del leaf.get_parameters
    return gradients


def parameters_for_norm(leaf: Any, parameters: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return those of an optimizer's parameters that count for the weights' norm on this rank, by
    the rules of :func:`gradients_for_norm`."""
    attribute = gradient_attribute(leaf)
    gradients = [getattr(parameter, attribute, None) for parameter in parameters]
    for parameter in parameters:
        setattr(parameter, attribute, parameter.detach())
    try:
        return gradients_for_norm(leaf, parameters)
    finally:
        for parameter, gradient in zip(parameters, gradients, strict=True):
            setattr(parameter, attribute, gradient)


def frozen_squares(model_chunk: Any) -> float:
    """Return the sum of squares of the weights that no optimizer has, over all ranks.

    A collective over all ranks.
    """
    from megatron.training.utils import calc_params_l2_norm

    frozen = [p for p in model_chunk.parameters() if not p.requires_grad]
    return float(calc_params_l2_norm([SimpleNamespace(parameters=lambda: frozen)])) ** 2


def emerging_optimizers() -> dict[str, Any] | None:
    """Return Megatron's registry of emerging optimizers by name; None if the package that it rests
    on is not installed."""
    from megatron.core.optimizer import emerging_optimizers as megatron

    if not megatron.HAVE_EMERGING_OPTIMIZERS:
        return None
    registry: dict[str, Any] = megatron._EMERGING_OPTIMIZERS
    return registry
