"""State tensors of a parameter that are made at its first step, or ahead of a load."""

from collections.abc import Sequence
from typing import Any

import torch

__all__ = ["make_states"]


@torch.no_grad()
def make_states(
    optimizer: torch.optim.Optimizer,
    group: dict[str, Any],
    *,
    zeros: Sequence[str],
    first_gradient: str | None = None,
    skip_non_grad_params: bool = True,
) -> None:
    """Make the state of a group's parameters that have none; Megatron asks for it ahead of a load.

    Another owner may have put its own tensors into a parameter's state already.

    Args:
        optimizer: whose state.
        group: of its parameters.
        zeros: names of tensors of the parameter's shape and dtype that begin at zero.
        first_gradient: the name of one that begins as the gradient, at zero if there is none.
        skip_non_grad_params: whether parameters without a gradient are left out.
    """
    for p in group["params"]:
        if skip_non_grad_params and p.grad is None:
            continue
        state = optimizer.state[p]
        if zeros[0] in state:
            continue
        for name in zeros:
            state[name] = torch.zeros_like(p)
        if first_gradient is not None:
            state[first_gradient] = torch.zeros_like(p)
            if p.grad is not None:
                state[first_gradient].copy_(p.grad)
