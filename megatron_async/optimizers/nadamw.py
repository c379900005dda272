"""NAdamW: Adam with Nesterov's momentum and decoupled weight decay.

With g_k the gradient of batch k, psi the momentum decay, and mu_k a momentum that grows to beta1:

    mu_k = beta1 (1 - 0.96^(k psi) / 2)
    m_k  = beta1 m_{k-1} + (1 - beta1) g_k
    v_k  = beta2 v_{k-1} + (1 - beta2) g_k^2
    d_k  = mu_{k+1} m_k / (1 - mu_1 ... mu_{k+1}) + (1 - mu_k) g_k / (1 - mu_1 ... mu_k)
    x_k  = (1 - lr weight_decay) x_{k-1} - lr d_k / (sqrt(v_k / (1 - beta2^k)) + eps)

What is called x is the look-ahead point: the model computes on it, as in every implementation of
NAdam. With beta1 near 1 the look-ahead goes along a long average of the gradients and a gradient
itself counts little (1 - mu_k), which is what the authors of the second source need against a
delay: as the momentum goes to 1, the look-ahead aligns with the way that the weights go during the
delay, however long that is.

Sources: Dozat: "Incorporating Nesterov Momentum into Adam", ICLR 2016 workshop, with the schedule
of mu of ``torch.optim.NAdam``; Ajanthan, Ramasinghe, Zuo, Avraham, Long: "Nesterov Method for
Asynchronous Pipeline Parallel Optimization", ICML 2025, arXiv 2505.01099, whose code trains with
``torch.optim.NAdam``, betas of 0.99 and 0.999, a momentum decay of 0.004 and decoupled decay.

``torch.optim.NAdam`` itself keeps the step and the product of mu as scalars in each parameter's
state, which Megatron's checkpoint formats take for shards of the parameter.
"""

import math
from typing import Any

import torch
from torch.optim.optimizer import ParamsT

from megatron_async.optimizers.state import make_states

__all__ = ["MomentumSchedule", "NAdamW", "nadamw_update"]


class MomentumSchedule:
    """mu_k and its running product, both functions of k alone.

    The product is not saved in checkpoints: it is multiplied up anew after a resume, in the same
    order, so that it comes out the same to the last digit.

    Args:
        beta1: what mu grows to.
        momentum_decay: psi; 0 keeps mu at beta1 / 2.
    """

    def __init__(self, beta1: float, momentum_decay: float) -> None:
        self._beta1 = beta1
        self._decay = momentum_decay
        self._steps = 0
        self._product = 1.0

    def momentum(self, step: int) -> float:
        """Return mu of a step, counted from 1."""
        return self._beta1 * (1.0 - 0.5 * math.pow(0.96, step * self._decay))

    def product(self, step: int) -> float:
        """Return mu_1 ... mu_step."""
        if step < self._steps:
            self._steps, self._product = 0, 1.0
        while self._steps < step:
            self._steps += 1
            self._product *= self.momentum(self._steps)
        return self._product


def nadamw_update(
    grad: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    *,
    betas: tuple[float, float],
    eps: float,
    step: int,
    schedule: MomentumSchedule,
) -> torch.Tensor:
    """Advance both moments in place by one gradient and return the direction to descend.

    All tensors have the parameter's shape, dtype and device; ``grad`` is only read.

    Args:
        grad: g_k.
        exp_avg: m, the average of gradients.
        exp_avg_sq: v, the average of squared gradients.
        betas: decay rates of m and v.
        eps: added to the denominator.
        step: k, counted from 1.
        schedule: of the momentum.

    Returns:
        d_k over the denominator; a new tensor, without learning rate.
    """
    beta1, beta2 = betas
    now, after = schedule.momentum(step), schedule.momentum(step + 1)
    product = schedule.product(step)
    exp_avg.lerp_(grad, 1.0 - beta1)
    exp_avg_sq.mul_(beta2).addcmul_(grad, grad, value=1.0 - beta2)
    denominator = exp_avg_sq.div(1.0 - beta2**step).sqrt_().add_(eps)
    direction = exp_avg * (after / (1.0 - product * after))
    return direction.add_(grad, alpha=(1.0 - now) / (1.0 - product)).div_(denominator)


class NAdamW(torch.optim.Optimizer):
    """NAdam with decoupled weight decay, for every parameter whatever its shape.

    State of a parameter, each tensor of its shape and dtype: ``exp_avg`` and ``exp_avg_sq``, as
    Adam's. The number of steps, ``step``, is kept in the parameter group. It is elementwise, so no
    parameter layout (tensor, expert or data parallel) changes its result.

    Args:
        params: parameters, or groups of them as for every torch optimizer.
        lr: learning rate.
        betas: decay rates of the gradient and of its square.
        eps: added to the denominator.
        weight_decay: coefficient of the decoupled weight decay.
        momentum_decay: psi, how fast the momentum grows.

    Raises:
        ValueError: a hyperparameter is out of range.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 3e-4,
        betas: tuple[float, float] = (0.99, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        momentum_decay: float = 0.004,
    ) -> None:
        if not all(0.0 <= value < math.inf for value in (lr, eps, weight_decay, momentum_decay)):
            raise ValueError(
                "NAdamW: lr, eps, weight_decay and momentum_decay must be finite and not negative, "
                f"got {lr}, {eps}, {weight_decay} and {momentum_decay}"
            )
        if not all(0.0 <= beta < 1.0 for beta in betas):
            raise ValueError(f"NAdamW: betas must lie in [0, 1), got {betas}")
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "momentum_decay": momentum_decay,
        }
        super().__init__(params, defaults)
        self._schedules: dict[tuple[float, float], MomentumSchedule] = {}

    def _init_group(self, group: dict[str, Any], skip_non_grad_params: bool = True) -> None:
        """See :func:`make_states`; the name is Megatron's."""
        make_states(
            self,
            group,
            zeros=("exp_avg", "exp_avg_sq"),
            skip_non_grad_params=skip_non_grad_params,
        )

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Perform one step.

        Raises:
            ValueError: a closure was given.
        """
        if closure is not None:
            raise ValueError("NAdamW does not take a closure")
        for group in self.param_groups:
            self._init_group(group)
            group["step"] = group.get("step", 0) + 1
            lr = group["lr"]
            schedule = self._schedule(group)
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                direction = nadamw_update(
                    p.grad,
                    state["exp_avg"],
                    state["exp_avg_sq"],
                    betas=group["betas"],
                    eps=group["eps"],
                    step=group["step"],
                    schedule=schedule,
                )
                p.mul_(1.0 - lr * group["weight_decay"]).add_(direction, alpha=-lr)

    def _schedule(self, group: dict[str, Any]) -> MomentumSchedule:
        # Groups with the same settings are at the same step, so they share the running product.
        key = (group["betas"][0], group["momentum_decay"])
        if key not in self._schedules:
            self._schedules[key] = MomentumSchedule(*key)
        return self._schedules[key]
