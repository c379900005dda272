"""The optimizers of this package in Megatron's registry of emerging optimizers.

What Megatron makes of an entry (``_get_megatron_emerging_optimizer`` in
megatron/core/optimizer/__init__.py): in fp32 a ``FP32Optimizer``, in bf16 a
``Float16OptimizerWithFloat16Params`` with fp32 main parameters, with
``--use-distributed-optimizer`` a ``LayerWiseDistributedOptimizer``; never Megatron's
``DistributedOptimizer``, and not in fp16.
"""

from typing import Any

from megatron_async.megatron.optimizers import emerging_optimizers
from megatron_async.megatron.training import parsed_arguments
from megatron_async.optimizers import OPTIMIZERS, own_names

__all__ = ["adan", "mars", "nadamw", "normuon", "put_into_megatron"]


def put_into_megatron() -> None:
    """Add the optimizers that Megatron lacks to its registry. A second call does nothing.

    Imports Megatron. Names that Megatron has itself by then are left to Megatron.

    Raises:
        ImportError: emerging-optimizers is not installed.
    """
    registry = emerging_optimizers()
    if registry is None:
        raise ImportError(
            f"--optimizer {', '.join(own_names())} need the package emerging-optimizers, on which "
            "Megatron's registry rests. Install emerging-optimizers>=0.3,<0.4."
        )
    for record in OPTIMIZERS:
        if record.entry is not None and record.name not in registry:
            registry[record.name] = record.entry()


def adan() -> Any:
    """Return Adan's entry."""
    from megatron.core.optimizer.emerging_optimizers import EmergingOptimizerEntry

    from megatron_async.optimizers.adan import Adan

    return EmergingOptimizerEntry(
        optimizer_cls=Adan, config_to_kwargs=_adan_kwargs, default_param_overrides={}
    )


def mars() -> Any:
    """Return MARS's entry: what is not a matrix goes to Adam."""
    from megatron.core.optimizer.emerging_optimizers import EmergingOptimizerEntry
    from megatron.core.optimizer.optimizer_config import ParamKey, ParamPredicate

    from megatron_async.optimizers.mars import MarsAdamW

    not_a_matrix = ParamPredicate(name="not_a_matrix", fn=_is_not_a_matrix)
    return EmergingOptimizerEntry(
        optimizer_cls=MarsAdamW,
        config_to_kwargs=_mars_kwargs,
        default_param_overrides={ParamKey(predicate=not_a_matrix): {"optimizer": "adam"}},
    )


def nadamw() -> Any:
    """Return NAdamW's entry."""
    from megatron.core.optimizer.emerging_optimizers import EmergingOptimizerEntry

    from megatron_async.optimizers.nadamw import NAdamW

    return EmergingOptimizerEntry(
        optimizer_cls=NAdamW, config_to_kwargs=_nadamw_kwargs, default_param_overrides={}
    )


def normuon() -> Any:
    """Return NorMuon's entry, with Megatron's default overrides: what is not a matrix, embeddings
    and the output layer go to Adam."""
    from megatron.core.optimizer.emerging_optimizers import EmergingOptimizerEntry

    from megatron_async.optimizers.normuon import TensorParallelNorMuon

    return EmergingOptimizerEntry(
        optimizer_cls=TensorParallelNorMuon,
        init_state_fn=_prepare_normuon_for_load,
        config_to_kwargs=_normuon_kwargs,
    )


def _is_not_a_matrix(param: Any) -> bool:
    return len(param.shape) != 2


def _prepare_normuon_for_load(optimizer: Any, config: Any = None) -> None:
    optimizer.prepare_for_load()


def _adan_kwargs(config: Any, model_chunks: Any, pg_collection: Any) -> dict[str, Any]:
    return {
        "lr": config.lr,
        "weight_decay": config.weight_decay,
        "betas": tuple(_setting(config, f"adan_beta{index}") for index in (1, 2, 3)),
        "eps": _setting(config, "adan_eps"),
    }


def _mars_kwargs(config: Any, model_chunks: Any, pg_collection: Any) -> dict[str, Any]:
    return {
        "lr": config.lr,
        "weight_decay": config.weight_decay,
        "betas": tuple(_setting(config, f"mars_beta{index}") for index in (1, 2)),
        "eps": _setting(config, "mars_eps"),
        "gamma": _setting(config, "mars_gamma"),
        "pg_collection": pg_collection,
    }


def _nadamw_kwargs(config: Any, model_chunks: Any, pg_collection: Any) -> dict[str, Any]:
    return {
        "lr": config.lr,
        "weight_decay": config.weight_decay,
        "betas": tuple(_setting(config, f"nadamw_beta{index}") for index in (1, 2)),
        "eps": _setting(config, "nadamw_eps"),
        "momentum_decay": _setting(config, "nadamw_momentum_decay"),
    }


def _normuon_kwargs(config: Any, model_chunks: Any, pg_collection: Any) -> dict[str, Any]:
    registry = emerging_optimizers()
    assert registry is not None
    muon = registry["muon"].config_to_kwargs(config, model_chunks, pg_collection)
    own = {name: _setting(config, f"normuon_{name}") for name in ("beta2", "eps", "update_rms")}
    return {**muon, **own}


def _setting(config: Any, name: str) -> Any:
    """Return a hyperparameter that Megatron's ``OptimizerConfig`` has no field for.

    In this order: an attribute of that name on the configuration, for those who use Megatron's core
    alone; the parsed command line; the flag's default.
    """
    if hasattr(config, name):
        return getattr(config, name)
    # None with Megatron's core alone, which has no command line to read.
    args = parsed_arguments()
    if hasattr(args, name):
        return getattr(args, name)
    return OPTIMIZERS.flags[name].default
