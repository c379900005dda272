"""Corrections from their records, with short names for the settings of those of the package."""

from typing import Any

import torch

from megatron_async.corrections import CORRECTIONS
from megatron_async.corrections.base import DelayCorrection
from megatron_async.corrections.correction import ADAPTIVE_STRENGTH, MOMENTUM, STRENGTH

__all__ = ["LAMBDA", "make_correction", "settings_of"]

LAMBDA = STRENGTH.dest
_FLAGS = {"strength": STRENGTH, "momentum": MOMENTUM, "adaptive_strength": ADAPTIVE_STRENGTH}


def settings_of(name: str, **given: Any) -> dict[str, Any]:
    """Return what the record of a correction takes.

    Args:
        name: of the correction.
        given: "strength", "momentum", "adaptive_strength"; by default those of the flags.
    """
    settings: dict[str, Any] = {flag.dest: flag.default for flag in CORRECTIONS[name].settings}
    for short, value in given.items():
        assert _FLAGS[short] in CORRECTIONS[name].settings
        settings[_FLAGS[short].dest] = value
    return settings


def make_correction(name: str, optimizer: torch.optim.Optimizer, **given: Any) -> DelayCorrection:
    """Build the correction of a torch optimizer; it acts once it is enabled."""
    built = CORRECTIONS[name].build(optimizer, settings_of(name, **given))
    assert isinstance(built, DelayCorrection)
    return built
