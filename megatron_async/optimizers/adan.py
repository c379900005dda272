"""Adan, the adaptive Nesterov momentum algorithm.

With g_k the gradient and d_k = g_k - g_{k-1} its change since the last step (d_1 = 0):

    m_k = beta1 m_{k-1} + (1 - beta1) g_k
    v_k = beta2 v_{k-1} + (1 - beta2) d_k
    n_k = beta3 n_{k-1} + (1 - beta3) (g_k + beta2 d_k)^2
    x_k = (x_{k-1} - lr (m_k + beta2 v_k) / (sqrt(n_k) + eps)) / (1 + lr weight_decay)

where m, v and n are divided by 1 - beta^k first, against their start at zero.

Source: Xie, Zhou, Li, Lin, Yan: "Adan: Adaptive Nesterov Momentum Algorithm for Faster Optimizing
Deep Models", arXiv 2208.06677, Algorithm 1, with the bias corrections of the authors' code. The
paper writes 1 - beta for what is called beta here and in their code.

Under a delayed gradient g_k is the gradient of batch k, whichever weights it was taken at: the
algorithm compares the gradients of two consecutive updates.
"""

import math
from typing import Any

import torch
from torch.optim.optimizer import ParamsT

from megatron_async.optimizers.state import make_states

__all__ = ["Adan", "adan_update"]


def adan_update(
    grad: torch.Tensor,
    previous_grad: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_diff: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    *,
    betas: tuple[float, float, float],
    eps: float,
    step: int,
) -> torch.Tensor:
    """Advance the four state tensors in place by one gradient and return the direction to descend.

    All tensors have the parameter's shape, dtype and device; ``grad`` is only read.

    Args:
        grad: g_k.
        previous_grad: g_{k-1} on entry, g_k on return.
        exp_avg: m, the average of gradients.
        exp_avg_diff: v, the average of their changes.
        exp_avg_sq: n, the average of squared look-ahead gradients.
        betas: decay rates of m, v and n.
        eps: added to the denominator.
        step: k, counted from 1.

    Returns:
        (m_k + beta2 v_k) / (sqrt(n_k) + eps), bias-corrected; a new tensor, without learning rate.
    """
    beta1, beta2, beta3 = betas
    change = grad - previous_grad
    exp_avg.lerp_(grad, 1.0 - beta1)
    exp_avg_diff.lerp_(change, 1.0 - beta2)
    look_ahead = change.mul_(beta2).add_(grad)
    exp_avg_sq.mul_(beta3).addcmul_(look_ahead, look_ahead, value=1.0 - beta3)
    previous_grad.copy_(grad)
    denominator = exp_avg_sq.sqrt().div_(math.sqrt(1.0 - beta3**step)).add_(eps)
    direction = exp_avg / (1.0 - beta1**step)
    direction.add_(exp_avg_diff, alpha=beta2 / (1.0 - beta2**step))
    return direction.div_(denominator)


class Adan(torch.optim.Optimizer):
    """Adan with proximal weight decay, for every parameter whatever its shape.

    State of a parameter, each tensor of its shape and dtype: ``exp_avg``, ``exp_avg_diff``,
    ``exp_avg_sq`` and ``previous_grad``, that is twice the memory of Adam. ``previous_grad`` is the
    gradient as it came to the last step, after clipping, and is saved in checkpoints: without it
    the first step after a resume would differ. A parameter's first gradient counts as unchanged.
    The number of steps, ``step``, is kept in the parameter group.

    It is elementwise, so no parameter layout (tensor, expert or data parallel) changes its result.

    Args:
        params: parameters, or groups of them as for every torch optimizer.
        lr: learning rate.
        betas: decay rates of the gradient, of its change and of the squared look-ahead gradient.
        eps: added to the denominator.
        weight_decay: coefficient of the proximal decay, x / (1 + lr weight_decay).

    Raises:
        ValueError: a hyperparameter is out of range.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        betas: tuple[float, float, float] = (0.98, 0.92, 0.99),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
    ) -> None:
        if lr < 0.0 or eps < 0.0 or weight_decay < 0.0:
            raise ValueError(
                f"Adan: lr, eps and weight_decay must not be negative, got {lr}, {eps} and "
                f"{weight_decay}"
            )
        if not all(0.0 <= beta < 1.0 for beta in betas):
            raise ValueError(f"Adan: betas must lie in [0, 1), got {betas}")
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, defaults)

    def _init_group(self, group: dict[str, Any], skip_non_grad_params: bool = True) -> None:
        """See :func:`make_states`; the name is Megatron's."""
        make_states(
            self,
            group,
            zeros=("exp_avg", "exp_avg_diff", "exp_avg_sq"),
            first_gradient="previous_grad",
            skip_non_grad_params=skip_non_grad_params,
        )

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Perform one step.

        Raises:
            ValueError: a closure was given.
        """
        if closure is not None:
            raise ValueError("Adan does not take a closure")
        for group in self.param_groups:
            self._init_group(group)
            group["step"] = group.get("step", 0) + 1
            lr, weight_decay = group["lr"], group["weight_decay"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                direction = adan_update(
                    p.grad,
                    state["previous_grad"],
                    state["exp_avg"],
                    state["exp_avg_diff"],
                    state["exp_avg_sq"],
                    betas=group["betas"],
                    eps=group["eps"],
                    step=group["step"],
                )
                p.add_(direction, alpha=-lr)
                if weight_decay != 0.0:
                    p.div_(1.0 + lr * weight_decay)
