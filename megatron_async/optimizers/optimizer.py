"""What is known of an optimizer: a record. Without torch or Megatron."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from megatron_async.registry import Flag

__all__ = ["Optimizer"]


def _always() -> bool:
    return True


@dataclass(frozen=True, kw_only=True)
class Optimizer:
    """An optimizer that ``--optimizer`` names.

    Attributes:
        name: what ``--optimizer`` calls it.
        title: in messages and tables.
        entry: makes its entry in Megatron's registry of emerging optimizers; None for those that
            Megatron has itself. It imports torch and Megatron when it is called.
        flags: its hyperparameters that Megatron's command line lacks.
        momentum_flag: Megatron's flag (or ours) of the momentum that it uses for all matrices.
        momentum_optional: whether it makes sense without that momentum.
        sensitive: whether its loss suffers most from a delay (arXiv 2606.30634).
        sign_update: whether its update is a sign times the learning rate.
        state_bytes: fp32 state per parameter in bytes: (layers' matrices, everything else); None
            where the planner does not know it.
        saved_in_torch_dist: whether Megatron can save its state in that format.
        runs: whether it works with the packages that are installed.
    """

    name: str
    title: str
    entry: Callable[[], Any] | None = None
    flags: tuple[Flag, ...] = ()
    momentum_flag: str | None = None
    momentum_optional: bool = False
    sensitive: bool = False
    sign_update: bool = False
    state_bytes: tuple[int, int] | None = None
    saved_in_torch_dist: bool = True
    runs: Callable[[], bool] = _always
