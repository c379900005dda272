"""Nesterov's look-ahead as a delay correction, with the gradient term discounted.

With w the iterate, gamma the momentum, and U_t the update that the optimizer computes from batch
t's gradient, learning rate included (eta grad for plain SGD):

    d_t     = gamma (w_t - w_{t-1})
    x_t     = w_t + d_t                        what the model computes on
    w_{t+1} = x_t - (1 - gamma) U_t

The gradient in U_t was taken on x_{t-tau}, whatever the delay tau. As gamma goes to 1 the
look-ahead aligns with the way that the weights go during the delay. The factor 1 - gamma, which
Nesterov's method lacks, keeps the total effect of an update what it is without the correction: U_t
in full, spread over the next 1 / (1 - gamma) steps.

That shows in another form, which needs one buffer only. With y the optimizer's own iterate,
y_{t+1} = y_t - U_t and y_0 = w_0, the formulas above are

    w_{t+1} = gamma w_t + (1 - gamma) y_{t+1},      y_t = x_t + gamma / (1 - gamma) d_t

so w is the moving average of y, and what the buffer d holds is enough to recover both:

    p += gamma / (1 - gamma) d; w = (p before) - d      before the step
    step
    d = gamma (1 - gamma) (p - w)                       after the step
    p -= gamma / (1 - gamma) d

Weight decay acts at y, a difference of second order. The model's weights are x throughout, also in
evaluations and checkpoints, as they are in the authors' NAdam. At the start d is zero, and it takes
1 / (1 - gamma) updates to build up.

The authors use the momentum of NAdam for gamma. Here it comes on top of whatever momentum the
optimizer has of its own.

Source: Ajanthan, Ramasinghe, Zuo, Avraham, Long: "Nesterov Method for Asynchronous Pipeline
Parallel Optimization", ICML 2025, arXiv 2505.01099, equation 10, gamma = 0.99.
"""

import torch

from megatron_async.corrections.base import VELOCITY, DelayCorrection

__all__ = ["Nesterov"]


class Nesterov(DelayCorrection):
    """The look-ahead along a momentum of the updates.

    Args:
        optimizer: the torch optimizer.
        momentum: gamma, at least 0 and below 1. 0 leaves the updates as they are.

    Raises:
        ValueError: the momentum is out of range.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, *, momentum: float = 0.99) -> None:
        if not 0.0 <= momentum < 1.0:
            raise ValueError(f"--delay-correction-momentum must be in [0, 1), got {momentum}")
        super().__init__(optimizer, state_keys=(VELOCITY,))
        self.momentum = momentum

    def before(self, parameters: list[torch.Tensor]) -> None:
        """Go to y; the buffer holds w while the optimizer steps."""
        velocities = self.buffers(VELOCITY, parameters)
        torch._foreach_add_(parameters, velocities, alpha=self._ahead)
        torch._foreach_mul_(velocities, -(1.0 + self._ahead))
        torch._foreach_add_(velocities, parameters)

    def after(self, parameters: list[torch.Tensor]) -> None:
        """Go to x; the buffer holds d again."""
        velocities = self.buffers(VELOCITY, parameters)
        torch._foreach_sub_(velocities, parameters)
        torch._foreach_mul_(velocities, -self.momentum * (1.0 - self.momentum))
        torch._foreach_sub_(parameters, velocities, alpha=self._ahead)

    @property
    def _ahead(self) -> float:
        return self.momentum / (1.0 - self.momentum)
