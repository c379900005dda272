"""Megatron's metrics of a mixture of experts."""

import functools
from typing import Any

from megatron_async.hooks.row import hook, row

__all__ = ["ROWS", "reported", "synced"]

_TRACKER = "megatron.core.transformer.moe.moe_logging:MoEMetricsTracker"


@hook
def reported(original: Any) -> Any:
    @functools.wraps(original)
    def report(self: Any, loss_scale: float, *args: Any, **kwargs: Any) -> Any:
        from megatron_async.runtime.run import run

        engine = run.engine
        if engine is None or engine.moe is None or not run.deferring:
            return original(self, loss_scale, *args, **kwargs)
        with engine.moe.reporting(round(1.0 / loss_scale)):
            return original(self, loss_scale, *args, **kwargs)

    return report


@hook
def synced(original: Any) -> Any:
    @functools.wraps(original)
    def sync_metrics(self: Any, *args: Any, **kwargs: Any) -> Any:
        from megatron_async.runtime.run import run

        return None if run.deferring else original(self, *args, **kwargs)

    return sync_metrics


ROWS = (
    row(
        _TRACKER,
        "report",
        reported,
        "the metrics of the last completed batch, as soon as there is one",
    ),
    row(
        _TRACKER,
        "_sync_metrics",
        synced,
        "an all-reduce over the stages in every iteration; the sums travel with the update",
    ),
)
