"""What the routers of a mixture of experts keep, and the tracker of their metrics.

Source: megatron/core/transformer/moe/router.py and moe_logging.py; the names tracked are those of
``training_log`` in megatron/training/training.py.
"""

import argparse
from collections.abc import Iterable
from typing import Any

import torch
from megatron.core.transformer.moe.moe_logging import get_moe_metrics_tracker

__all__ = [
    "metrics",
    "metrics_tracker",
    "router_biases",
    "router_sums",
    "set_metrics",
    "tracked_names",
]

_BIASES = ("expert_bias", "qb_beta")
"""Buffers that an update changes and a checkpoint holds."""
_SUMS = (
    "local_tokens_per_expert",
    "global_tokens_per_expert",
    "ga_steps",
    "qb_beta_accum",
    "qb_beta_count",
)
"""Buffers that each microbatch adds to, and that are zeroed at the end of a batch."""


def router_biases(model_chunk: Any) -> list[torch.Tensor]:
    """Return what routers add to their scores to balance the experts: a vector (experts,) of each
    router that has one, float32. Empty without ``--moe-router-enable-expert-bias`` and quantile
    balancing."""
    return _buffers(model_chunk, _BIASES)


def router_sums(model_chunk: Any) -> list[torch.Tensor]:
    """Return what routers sum up over the microbatches of a batch: tokens of each expert (experts,)
    or the like, and numbers of microbatches."""
    return _buffers(model_chunk, _SUMS)


def _buffers(model_chunk: Any, names: Iterable[str]) -> list[torch.Tensor]:
    found = (
        getattr(module, name, None)
        for module in model_chunk.modules()
        if hasattr(module, "routing_type")
        for name in names
    )
    return [buffer for buffer in found if buffer is not None]


def metrics_tracker() -> Any:
    """Return the global tracker that the routers add to."""
    return get_moe_metrics_tracker()


def metrics(tracker: Any) -> dict[str, Any]:
    """Return the tracker's entries by name."""
    entries: dict[str, Any] = tracker._metrics
    return entries


def set_metrics(tracker: Any, entries: dict[str, Any]) -> None:
    """Let the tracker add to other entries."""
    tracker._metrics = entries


def tracked_names(args: argparse.Namespace) -> list[str]:
    """Return the names of the metrics that a run has."""
    kinds = args.moe_router_load_balancing_type
    return [
        name
        for name, present in (
            ("load_balancing_loss", "aux_loss" in kinds),
            ("seq_load_balancing_loss", "seq_aux_loss" in kinds),
            ("global_load_balancing_loss", "global_aux_loss" in kinds),
            ("z_loss", args.moe_z_loss_coeff is not None),
        )
        if present
    ]
