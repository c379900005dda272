"""Megatron's optimizer: the engine is attached where it is built."""

import functools
from pathlib import Path
from typing import Any

from megatron_async.hooks.row import TRAINING, row

__all__ = ["ROWS"]


def _attach(original: Any) -> Any:
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


def _state_keys(original: Any) -> Any:
    def optimizer_state_keys(self: Any) -> tuple[str, ...]:
        from megatron_async.checkpoint import session

        return session.optimizer_state_keys(original.fget, self)

    return _Property(optimizer_state_keys, doc=original.__doc__)


ROWS = (
    row(
        TRAINING,
        "get_megatron_optimizer",
        _attach,
        "weight versions, correction and deferred update, before a checkpoint is loaded",
    ),
    row(
        "megatron.core.optimizer.distrib_optimizer:DistributedOptimizer",
        "optimizer_state_keys",
        _state_keys,
        "some checkpoint formats drop a parameter's state that is not listed here",
    ),
)
