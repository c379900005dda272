"""Checkpoints as earlier versions of the package wrote them, made of today's.

Until format 3 the engine's state was flat, and of a correction's settings it had the strength and
the momentum; in the first format the correction's buffers were in the optimizer's state in torch
checkpoints, too, and at first the momentum was not there.
"""

from typing import Any

__all__ = ["flat", "write_as"]


def flat(state: dict[str, Any], number: int) -> dict[str, Any]:
    """Return the asynchronous state as format 1 or 2 had it."""
    settings = state["correction_settings"]
    old = {
        "format": number,
        "package": "0.0",
        "schedule": state["schedule"],
        "batch": state["batch"],
        "newest_version": state["weights"]["newest"],
        "correction": state["correction"],
        "correction_strength": settings.get("delay_correction_strength", 1.0),
        "correction_momentum": settings.get("delay_correction_momentum", 0.99),
        "report": state["report"],
    }
    if number == 1:
        del old["correction_momentum"]
    return old


def write_as(checkpoint: dict[str, Any], number: int) -> None:
    """Let a torch checkpoint have format 1 or 2."""
    if number == 1:
        for place, buffers in checkpoint.pop("megatron_async_buffers").items():
            target = checkpoint["optimizer"]
            for key in place:
                target = target[key]
            target.update(buffers)
    checkpoint["megatron_async"] = flat(checkpoint["megatron_async"], number)
