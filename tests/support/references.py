"""Starts the references: training in plain PyTorch that shares nothing with the package."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from tests.support.gpt import REPOSITORY
from tests.support.torchrun import run_torchrun

__all__ = ["CONSTANT", "DELAYED", "REFERENCES", "STAGED", "Weights", "distance", "run_references"]

REFERENCES = REPOSITORY / "tests" / "support" / "reference"
DELAYED = REFERENCES / "delayed_training.py"
"""A delay of a fixed number of steps, with the corrections."""
STAGED = REFERENCES / "staged_training.py"
"""A delay that differs between layers."""

CONSTANT: Mapping[str, Any] = {
    "lr_decay_style": "constant",
    "lr_warmup_iters": 0,
    "start_weight_decay": None,
    "end_weight_decay": None,
    "weight_decay_incr_style": "constant",
    "clip_grad": 1.0,
}
"""Flags for one learning rate and weight decay in all steps, as references have it."""

type Weights = dict[str, torch.Tensor]
"""By name."""


def run_references(
    script: Path, runs: Mapping[str, Mapping[str, Any]], *, argv: Sequence[str], directory: Path
) -> dict[str, list[Weights]]:
    """Train, all runs in one process.

    Args:
        script: one of those above; it says what a run is made of.
        runs: the settings by name, without ``out``.
        argv: Megatron's flags; they give the model and the data.
        directory: for files.

    Returns:
        W(1), W(2), ... of each run.
    """
    specs = [{**settings, "out": str(directory / f"{name}.pt")} for name, settings in runs.items()]
    file = directory / "runs.json"
    file.write_text(json.dumps(specs))
    run_torchrun(1, ["--runs", str(file), *argv], launcher="plain", script=script)
    found = {name: torch.load(directory / f"{name}.pt") for name in runs}
    assert all(len(weights) > 0 for weights in found.values())
    return found


def distance(these: Weights, those: Weights) -> float:
    """The norm of the difference, over what ``these`` holds."""
    squares = [(these[name] - those[name]).double().square().sum() for name in these]
    return float(torch.stack(squares).sum().sqrt())
