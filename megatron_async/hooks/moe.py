"""Megatron's mixture of experts: its metrics, and the biases of its routers."""

import functools
import inspect
from typing import Any

from megatron_async.hooks.row import hook, row
from megatron_async.megatron import releases

__all__ = ["ROWS", "reported", "synced", "update_router_biases"]

_TRACKER = "megatron.core.transformer.moe.moe_logging:MoEMetricsTracker"
_FINALIZE = "megatron.core.distributed.finalize_model_grads"


class _EarlierIteration:
    """A W&B run, for values of an earlier iteration than the running one: W&B takes no step that
    lies behind the last one, so they carry its number along."""

    def __init__(self, run: Any, running: int) -> None:
        self._run = run
        self._running = running

    def log(self, values: dict[str, Any], iteration: int) -> None:
        numbers = {f"{name} iteration": iteration for name in values}
        self._run.log({**values, **numbers}, self._running)


@hook
def reported(original: Any) -> Any:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def report(*args: Any, **kwargs: Any) -> Any:
        from megatron_async.runtime.run import run

        engine = run.engine
        if engine is None or engine.moe is None or not run.deferring:
            return original(*args, **kwargs)
        call = signature.bind(*args, **kwargs)
        options = call.arguments
        running = options["iteration"]
        microbatches = round(1.0 / options["loss_scale"])
        with engine.moe.reporting(microbatches, iteration=running) as (iteration, new):
            options["iteration"] = iteration
            if not new:
                options["writer"] = options["wandb_writer"] = None
            elif options.get("wandb_writer") and iteration != running:
                options["wandb_writer"] = _EarlierIteration(options["wandb_writer"], running)
            return original(*call.args, **call.kwargs)

    return report


@hook
def synced(original: Any) -> Any:
    @functools.wraps(original)
    def sync_metrics(self: Any, *args: Any, **kwargs: Any) -> Any:
        from megatron_async.runtime.run import run

        return None if run.deferring else original(self, *args, **kwargs)

    return sync_metrics


@hook
def update_router_biases(original: Any) -> Any:
    @functools.wraps(original)
    def update_router_bias(*args: Any, **kwargs: Any) -> Any:
        from megatron_async.runtime.run import run

        engine = run.engine
        if engine is None or not engine.asynchronous_now:
            return original(*args, **kwargs)
        with engine.router_biases.computing():
            return original(*args, **kwargs)

    return update_router_bias


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
    row(
        _FINALIZE,
        "_update_router_expert_bias",
        update_router_biases,
        "the biases that a batch makes are those of the version that its update makes",
    ),
    row(
        _FINALIZE,
        "_update_router_qb_beta",
        update_router_biases,
        "the biases that a batch makes are those of the version that its update makes",
        versions=releases.since("0.19"),
    ),
)
