"""Megatron's optimizer: the engine is attached where it is built."""

import functools
import inspect
from pathlib import Path
from typing import Any

from megatron_async.hooks.row import TRAINING, hook, row
from megatron_async.megatron import releases

__all__ = [
    "ROWS",
    "attach_engine",
    "gather_state",
    "scatter_state",
    "state_keys",
    "state_with_buffers",
]


@hook
def attach_engine(original: Any) -> Any:
    @functools.wraps(original)
    def get_megatron_optimizer(config: Any, model_chunks: Any, *rest: Any, **kwargs: Any) -> Any:
        from megatron.core.utils import get_model_config
        from megatron.training import get_args

        from megatron_async.config import startup
        from megatron_async.config.settings import AsyncConfig
        from megatron_async.optimizers import own_names

        args = get_args()
        if config.optimizer in own_names():
            from megatron_async.optimizers.entries import put_into_megatron

            put_into_megatron()
        settings = AsyncConfig.from_args(args)
        if settings.asynchronous:
            # A script may have set what no flag can.
            startup.check_configs(args, get_model_config(model_chunks[0]), config)
        optimizer = original(config, model_chunks, *rest, **kwargs)
        if settings.asynchronous:
            from megatron_async.runtime import engine

            engine.attach(args, model_chunks, optimizer)
        if settings.log_fingerprints is not None:
            from megatron_async.runtime import fingerprints

            fingerprints.attach(args, Path(settings.log_fingerprints), model_chunks, optimizer)
        return optimizer

    return get_megatron_optimizer


class _Property(property):
    """A property that can be marked as replaced."""


@hook
def state_keys(original: Any) -> Any:
    def optimizer_state_keys(self: Any) -> tuple[str, ...]:
        from megatron_async.checkpoint.buffers import buffer_keys

        return (*original.fget(self), *buffer_keys(self))

    return _Property(optimizer_state_keys, doc=original.__doc__)


@hook
def gather_state(original: Any) -> Any:
    @functools.wraps(original)
    def get_parameter_state_dp_zero(self: Any, *args: Any, **kwargs: Any) -> Any:
        from megatron_async.checkpoint.buffers import buffer_keys
        from megatron_async.megatron import distributed_state

        options = inspect.signature(original).bind(self, *args, **kwargs).arguments
        options.pop("self")
        return distributed_state.gather(original, self, buffer_keys(self), **options)

    return get_parameter_state_dp_zero


@hook
def scatter_state(original: Any) -> Any:
    @functools.wraps(original)
    def load_parameter_state_from_dp_zero(self: Any, state_dict: Any, **kwargs: Any) -> None:
        from megatron_async.checkpoint.buffers import buffer_keys
        from megatron_async.megatron import distributed_state

        distributed_state.scatter(original, self, buffer_keys(self), state_dict, **kwargs)

    return load_parameter_state_from_dp_zero


@hook
def state_with_buffers(original: Any) -> Any:
    @functools.wraps(original)
    def load_state_dict(self: Any, state_dict: Any) -> None:
        from megatron_async.checkpoint.buffers import buffer_keys
        from megatron_async.megatron import distributed_state

        distributed_state.load(original, self, buffer_keys(self), state_dict)

    return load_state_dict


_DISTRIBUTED = "megatron.core.optimizer.distrib_optimizer:DistributedOptimizer"


ROWS = (
    row(
        TRAINING,
        "get_megatron_optimizer",
        attach_engine,
        "weight versions, correction and deferred update, before a checkpoint is loaded",
    ),
    row(
        _DISTRIBUTED,
        "optimizer_state_keys",
        state_keys,
        "some checkpoint formats drop a parameter's state that is not listed here",
        versions=releases.since("0.19"),
    ),
    row(
        _DISTRIBUTED,
        "get_parameter_state_dp_zero",
        gather_state,
        "some checkpoint formats drop a parameter's state whose names are not in the code",
        versions=releases.before("0.19"),
    ),
    row(
        _DISTRIBUTED,
        "load_parameter_state_from_dp_zero",
        scatter_state,
        "the same when such a checkpoint is loaded",
        versions=releases.before("0.19"),
    ),
    row(
        _DISTRIBUTED,
        "load_state_dict",
        state_with_buffers,
        "the same where a checkpoint is about to be loaded into the parameters' states",
        versions=releases.before("0.19"),
    ),
)
