"""Error feedback: what should have been applied one step earlier is added now.

Let U_k be the update that the optimizer computes from batch k's gradient, learning rate and
decoupled weight decay included. The first update is not stale and is applied as it is; from then on

    x_1     = x_0 - U_0
    x_{k+1} = x_k - U_k - lambda (U_k - U_{k-1})      k >= 1

What should have been applied one step earlier but was not, U_k - U_{k-1}, is added now. With y the
plain delayed iterate (y_0 = x_0, y_{k+1} = y_k - U_k), x_{k+1} = y_{k+1} - lambda (U_k - U_0).

One buffer u for each parameter:

    p += lambda u                    before the step (undo the look-ahead; not at the first step)
    u = p; step; u -= p              u is now U_k
    p -= lambda u                    after the step (not at the first step)

Decoupled weight decay then acts at the un-looked-ahead point, a difference of second order. The
lambda that is undone is the one that was applied: a resume may change it. Where only a part of each
batch is delayed, lambda is the strength times that part.

Source: arXiv 2606.30634, the Error-Feedback correction (x_{t+1} = x_t - 2 u_{t-1} + u_{t-2} for
lambda = 1).
"""

import torch

from megatron_async.corrections.base import UPDATE, DelayCorrection

__all__ = ["ErrorFeedback"]


class ErrorFeedback(DelayCorrection):
    """Error feedback with one strength for all updates.

    Args:
        optimizer: the torch optimizer.
        strength: lambda.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, *, strength: float = 1.0) -> None:
        super().__init__(optimizer, strength=strength, state_keys=(UPDATE,))

    def before(self, parameters: list[torch.Tensor]) -> None:
        """Undo the look-ahead along the last update."""
        updates = self.buffers(UPDATE, parameters)
        torch._foreach_add_(parameters, updates, alpha=self._applied)
        torch._foreach_copy_(updates, parameters)

    def after(self, parameters: list[torch.Tensor]) -> None:
        """Look ahead along this update."""
        updates = self.buffers(UPDATE, parameters)
        torch._foreach_sub_(updates, parameters)
        if self.started:
            torch._foreach_sub_(parameters, updates, alpha=self.effective_strength)
