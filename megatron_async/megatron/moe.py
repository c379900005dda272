"""The tracker of mixture-of-experts metrics.

Source: megatron/core/transformer/moe/moe_logging.py; the names tracked are those of
``training_log`` in megatron/training/training.py.
"""

import argparse
from typing import Any

from megatron.core.transformer.moe.moe_logging import get_moe_metrics_tracker

__all__ = ["metrics", "metrics_tracker", "set_metrics", "tracked_names"]


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
            ("z_loss", args.moe_z_loss_coeff is not None),
        )
        if present
    ]
