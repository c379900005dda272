"""Delay compensation: the gradient at the new weights, to first order.

A gradient g taken on the weights w_stale and applied to w becomes

    g~ = g + lambda g * g * (w - w_stale)        elementwise

where g * g stands for the diagonal of the Hessian (of a negative log-likelihood, by the outer
product of gradients). With a delay of one step w - w_stale is the last change of the main
parameters, -U_{k-1}; the first gradient is not stale and the second's buffer is there. One buffer u
for each parameter:

    g -= lambda g g u                before the step (not at the first step)
    u = p; step; u -= p              u is now U_k

The adaptive strength divides lambda by the root of a moving average of g * g, so that it does not
depend on the scale of the loss; a second buffer v:

    v = m v + (1 - m) g g            v_0 = g_0 g_0, m = 0.95
    g -= lambda g g u / sqrt(v)

The gradient is that of the whole batch, averaged and clipped by the global norm, as the optimizer
gets it. Averaged over n independent samples, g * g is about 1 / n of the diagonal of the Fisher
matrix, so that the strength has to be of the order of n where that is meant. What is logged as the
gradient norm is that of g.

Source: Zheng, Meng, Wang, Chen, Yu, Ma, Liu: "Asynchronous Stochastic Gradient Descent with Delay
Compensation", ICML 2017, arXiv 1609.08326: DC-ASGD-c with a constant lambda, DC-ASGD-a with the
adaptive one. There v starts at 0 and 1e-7 is added to it, which the squares of clipped gradients of
a large model lie far below; here it is 1e-30.
"""

from typing import Any

import torch

from megatron_async.corrections.base import MEAN_SQUARE, UPDATE, DelayCorrection, head

__all__ = ["DelayCompensation"]

_DECAY = 0.95
_EPSILON = 1e-30


class DelayCompensation(DelayCorrection):
    """First-order compensation of the gradient.

    Args:
        optimizer: the torch optimizer.
        strength: lambda.
        adaptive: divide lambda by the root mean square of the gradient.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, *, strength: float = 1.0, adaptive: bool = False
    ) -> None:
        keys = (UPDATE, MEAN_SQUARE) if adaptive else (UPDATE,)
        super().__init__(optimizer, strength=strength, state_keys=keys)
        self.adaptive = adaptive
        self._squares: list[tuple[torch.Tensor, torch.Tensor]] = []

    def first_buffers(self, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
        """The mean square starts with the first gradient's."""
        buffers = super().first_buffers(parameter)
        if self.adaptive and parameter.grad is not None:
            buffers[MEAN_SQUARE] = parameter.grad.to(parameter.dtype).square()
        return buffers

    def before(self, parameters: list[torch.Tensor]) -> None:
        """Compensate the gradients in place."""
        for p in parameters:
            if p.grad is not None:
                self._compensate(p, p.grad)
        torch._foreach_copy_(self.buffers(UPDATE, parameters), parameters)

    def _compensate(self, parameter: torch.Tensor, gradient: torch.Tensor) -> None:
        state = self._optimizer.state[parameter]
        change = gradient.square()
        if self.adaptive:
            mean_square = state[MEAN_SQUARE]
            mean_square.mul_(_DECAY).add_(change, alpha=1.0 - _DECAY)
            change.div_((mean_square + _EPSILON).sqrt_())
        change.mul_(state[UPDATE]).mul_(self.effective_strength)
        if self.measure:
            self._squares.append((_square(head(change)), _square(head(gradient))))
        gradient.sub_(change)

    def after(self, parameters: list[torch.Tensor]) -> None:
        """Keep the update."""
        torch._foreach_sub_(self.buffers(UPDATE, parameters), parameters)

    def _measured(self, updates: dict[torch.Tensor, torch.Tensor]) -> Any:
        """Relative to the gradient, where the correction is made."""
        pairs, self._squares = self._squares, []
        if not pairs:
            return super()._measured(updates)  # no gradient at all
        change, size = zip(*pairs, strict=True)
        return torch.stack(change).sum(), torch.stack(size).sum()


def _square(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.float().square().sum()
