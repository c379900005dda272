"""The plain data that an asynchronous run adds to a checkpoint, and the formats it has had."""

from typing import Any

from megatron_async.corrections.correction import MOMENTUM, STRENGTH
from megatron_async.version import __version__

__all__ = ["FORMAT", "STATE", "leaving_text", "packed", "unpacked"]

STATE = "megatron_async"
"""Entry of the state dict."""
FORMAT = 3
"""Version of the entries. Until 3 the engine's state was flat, and a correction's settings were its
strength and its momentum; until 2 the correction's buffers were in the optimizer's state in the
torch format, too."""
_READABLE = (1, 2, 3)


def packed(state: dict[str, Any]) -> dict[str, Any]:
    """Return what is saved of an engine's state."""
    return {"format": FORMAT, "package": __version__, **state}


def unpacked(saved: dict[str, Any], directory: str) -> dict[str, Any]:
    """Return the engine's state from what was saved, in whatever format that is read.

    Args:
        saved: the entry.
        directory: of the checkpoint, for messages.

    Raises:
        RuntimeError: another version of this package wrote it.
    """
    found = saved.get("format")
    if found not in _READABLE:
        raise RuntimeError(
            f"megatron_async: the asynchronous state of the checkpoint in {directory} has format "
            f"{found} (written by megatron_async {saved.get('package')}); megatron_async "
            f"{__version__} reads formats {_READABLE[0]} to {FORMAT}. Resume it with the version "
            "that wrote it, or take its newest weights alone with --finetune."
        )
    if found == FORMAT:
        return saved
    corrected = saved["correction"] is not None
    settings = {
        STRENGTH.dest: saved["correction_strength"],
        # Formats 1 and 2 had it from some point on.
        MOMENTUM.dest: saved.get("correction_momentum", MOMENTUM.default),
    }
    return {
        "schedule": saved["schedule"],
        "batch": saved["batch"],
        "weights": {"newest": saved["newest_version"]},
        "report": saved["report"],
        "correction": saved["correction"],
        "correction_settings": settings,
        "correction_state": {"started": True, "applied": saved["correction_strength"]}
        if corrected
        else None,
        "counters": {},
    }


def leaving_text(saved: dict[str, Any]) -> str:
    """Say what becomes of an asynchronous run that Megatron's own schedule goes on from."""
    newest = saved.get("newest_version", saved.get("weights", {}).get("newest"))
    text = (
        f"the checkpoint was saved by {saved.get('schedule')}; Megatron's schedule goes on from "
        f"its newest weights, version {newest}, and the version before is dropped"
    )
    if saved.get("correction") is not None:
        text += "; what the delay correction added last stays in the weights"
    return text
