"""MARS in its AdamW form: AdamW on a variance-reduced gradient.

With g_k the gradient of batch k and g_0 = g_1:

    c_k = g_k + gamma beta1 / (1 - beta1) (g_k - g_{k-1})
    c_k = c_k / max(1, |c_k|_2)                              for each tensor
    m_k = beta1 m_{k-1} + (1 - beta1) c_k
    v_k = beta2 v_{k-1} + (1 - beta2) c_k^2
    x_k = x_{k-1} - lr (m_k / (sqrt(v_k) + eps) + weight_decay x_{k-1})

where m and v are divided by 1 - beta^k first, against their start at zero.

Source: Yuan, Liu, Wu, Zhou, Gu: "MARS: Unleashing the Power of Variance Reduction for Training
Large Models", arXiv 2411.10438, MARS-AdamW in the approximate form, which takes the gradient of the
last batch at the last weights in place of this batch's gradient at the last weights and so needs no
second backward pass. g_0 = g_1 is the paper's x_0 = x_1; the authors' code has g_0 = 0, which
scales the first c by 1 + gamma beta1 / (1 - beta1). As in their code only matrices, embeddings
included, are trained by MARS; AdamW trains the rest.
"""

import math
from typing import Any

import torch
import torch.distributed as dist
from torch.optim.optimizer import ParamsT

from megatron_async.optimizers.state import make_states

__all__ = ["MarsAdamW", "corrected_gradient", "mars_adamw_update"]


def corrected_gradient(
    grad: torch.Tensor, previous_grad: torch.Tensor, *, gamma: float, beta1: float
) -> torch.Tensor:
    """Return c_k ahead of its clipping, a new tensor of the gradient's shape and dtype.

    Args:
        grad: g_k.
        previous_grad: g_{k-1}.
        gamma: strength of the variance reduction; 0 gives back the gradient.
        beta1: decay rate of the first moment.
    """
    return (grad - previous_grad).mul_(gamma * beta1 / (1.0 - beta1)).add_(grad)


def mars_adamw_update(
    corrected: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    *,
    betas: tuple[float, float],
    eps: float,
    step: int,
) -> torch.Tensor:
    """Advance both moments in place by one clipped c_k and return the direction to descend.

    All tensors have the parameter's shape, dtype and device; ``corrected`` is only read.

    Args:
        corrected: c_k, clipped.
        exp_avg: m, the average of c.
        exp_avg_sq: v, the average of c^2.
        betas: decay rates of m and v.
        eps: added to the denominator.
        step: k, counted from 1.

    Returns:
        m_k / (sqrt(v_k) + eps), bias-corrected; a new tensor, without learning rate.
    """
    beta1, beta2 = betas
    exp_avg.lerp_(corrected, 1.0 - beta1)
    exp_avg_sq.mul_(beta2).addcmul_(corrected, corrected, value=1.0 - beta2)
    denominator = exp_avg_sq.sqrt().div_(math.sqrt(1.0 - beta2**step)).add_(eps)
    return exp_avg.div(denominator).div_(1.0 - beta1**step)


class MarsAdamW(torch.optim.Optimizer):
    """MARS-AdamW with decoupled weight decay.

    State of a parameter, each tensor of its shape and dtype: ``exp_avg``, ``exp_avg_sq`` and
    ``previous_grad``. The last is the gradient as it came to the last step, after Megatron's
    clipping, and is saved in checkpoints. A parameter's first gradient counts as unchanged. The
    number of steps, ``step``, is kept in the parameter group.

    The norm that clips c_k is that of the whole parameter: for one that is split over tensor
    parallel ranks the squares are summed over them, in one small all-reduce a step, so that the
    result does not depend on the tensor-parallel size. A fused parameter (QKV, the two halves of a
    gated MLP, experts in one tensor) counts as one.

    Args:
        params: parameters, or groups of them as for every torch optimizer.
        lr: learning rate.
        betas: decay rates of the first and second moment.
        eps: added to the denominator.
        weight_decay: coefficient of the decoupled weight decay.
        gamma: strength of the variance reduction.
        pg_collection: Megatron's process groups, of which ``tp`` and ``expt_tp`` are used. None
            takes every parameter for whole.

    Raises:
        ValueError: a hyperparameter is out of range.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 3e-3,
        betas: tuple[float, float] = (0.95, 0.99),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        gamma: float = 0.025,
        pg_collection: Any = None,
    ) -> None:
        if lr < 0.0 or eps < 0.0 or weight_decay < 0.0 or gamma < 0.0:
            raise ValueError(
                "MARS: lr, eps, weight_decay and gamma must not be negative, got "
                f"{lr}, {eps}, {weight_decay} and {gamma}"
            )
        if not all(0.0 <= beta < 1.0 for beta in betas):
            raise ValueError(f"MARS: betas must lie in [0, 1), got {betas}")
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "gamma": gamma,
        }
        super().__init__(params, defaults)
        self._process_groups = pg_collection

    def _init_group(self, group: dict[str, Any], skip_non_grad_params: bool = True) -> None:
        """See :func:`make_states`; the name is Megatron's."""
        make_states(
            self,
            group,
            zeros=("exp_avg", "exp_avg_sq"),
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
            raise ValueError("MARS does not take a closure")
        for group in self.param_groups:
            self._init_group(group)
        split_squares = self._squares_of_split_parameters()
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            lr = group["lr"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                corrected = self._corrected(p, group)
                squares = split_squares.get(p)
                if squares is None:
                    squares = _sum_of_squares(corrected)
                corrected.div_(squares.sqrt().clamp_(min=1.0))
                direction = mars_adamw_update(
                    corrected,
                    state["exp_avg"],
                    state["exp_avg_sq"],
                    betas=group["betas"],
                    eps=group["eps"],
                    step=group["step"],
                )
                state["previous_grad"].copy_(p.grad)
                p.mul_(1.0 - lr * group["weight_decay"]).add_(direction, alpha=-lr)

    def _corrected(self, p: torch.Tensor, group: dict[str, Any]) -> torch.Tensor:
        grad, previous = p.grad, self.state[p]["previous_grad"]
        assert grad is not None
        return corrected_gradient(grad, previous, gamma=group["gamma"], beta1=group["betas"][0])

    def _squares_of_split_parameters(self) -> dict[torch.Tensor, torch.Tensor]:
        """Return |c_k|^2 of the whole parameter (scalar), for those of which a rank has a shard.

        c is computed here and again for the update: keeping it would cost a buffer as large as the
        parameters, and one all-reduce for each parameter would cost a latency each.
        """
        members: dict[dist.ProcessGroup, dict[torch.Tensor, torch.Tensor]] = {}
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None or not getattr(p, "tensor_model_parallel", False):
                    continue
                ranks = self._tensor_parallel_group(p)
                if ranks is not None and ranks.size() > 1:
                    squares = _sum_of_squares(self._corrected(p, group))
                    members.setdefault(ranks, {})[p] = squares
        whole: dict[torch.Tensor, torch.Tensor] = {}
        for ranks, shards in members.items():
            total = torch.stack(list(shards.values()))
            dist.all_reduce(total, group=ranks)
            whole.update(zip(shards, total.unbind(), strict=True))
        return whole

    def _tensor_parallel_group(self, p: torch.Tensor) -> dist.ProcessGroup | None:
        name = "expt_tp" if getattr(p, "expert_tp", False) else "tp"
        group: dist.ProcessGroup | None = getattr(self._process_groups, name, None)
        return group


def _sum_of_squares(tensor: torch.Tensor) -> torch.Tensor:
    """Return a scalar of at least fp32."""
    return tensor.square().sum(dtype=torch.promote_types(tensor.dtype, torch.float32))
