"""Error feedback with a strength of its own for each element and update.

Error feedback looks ahead along the last update, as if the next one would equal it:
x_{k+1} = y_{k+1} - lambda U_k, up to a constant (:mod:`.error_feedback`). Where updates oscillate
that leads away, and where they shrink it goes too far. What is known of the next update is how this
one follows on the last: if they decay by a factor r = U_k / U_{k-1}, the next is r U_k. So, element
by element,

    lambda_k = strength * clamp(U_k / U_{k-1}, 0, 1)      k >= 1;  lambda_0 = strength
    x_{k+1}  = x_k - U_k - (lambda_k U_k - lambda_{k-1} U_{k-1})

Full where an update keeps its sign and does not shrink, in proportion where it shrinks, none where
it turns round (nor where the last one was zero). Growth is not extrapolated. With lambda_k the same
throughout it is plain error feedback.

The rule is elementwise for a reason beside its resolution: a number for each tensor would have to
be summed over the ranks that hold its shards, and would come out differently for the two copies of
a tied embedding on stages with different shards.

Two buffers for each parameter, u and the look-ahead a = lambda_k U_k, which is undone as it was
applied:

    p += a                           before the step (not at the first step)
    a = u; u = p; step; u -= p       a is now U_{k-1}, u is U_k
    a = strength clamp(u / a, 0, 1) u
    p -= a                           after the step (not at the first step)

Source: the open question of an adaptive lambda in arXiv 2606.30634; the rule is this package's own.
"""

import torch

from megatron_async.corrections.base import LOOK_AHEAD, UPDATE, DelayCorrection

__all__ = ["AdaptiveErrorFeedback", "agreement"]


def agreement(update: torch.Tensor, last: torch.Tensor) -> torch.Tensor:
    """Return clamp(update / last, 0, 1), elementwise, 0 where ``last`` is 0.

    Args:
        update: U_k.
        last: U_{k-1}, of the same shape; overwritten with the result.
    """
    square = last.square()
    # By the product and the square, so that the sign of a zero does not matter.
    return last.mul_(update).div_(square).clamp_(0.0, 1.0).nan_to_num_(nan=0.0)


class AdaptiveErrorFeedback(DelayCorrection):
    """Error feedback whose strength follows the agreement of successive updates.

    Args:
        optimizer: the torch optimizer.
        strength: the largest lambda.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, *, strength: float = 1.0) -> None:
        super().__init__(optimizer, strength=strength, state_keys=(UPDATE, LOOK_AHEAD))

    def before(self, parameters: list[torch.Tensor]) -> None:
        """Undo the look-ahead."""
        updates = self.buffers(UPDATE, parameters)
        ahead = self.buffers(LOOK_AHEAD, parameters)
        torch._foreach_add_(parameters, ahead)
        torch._foreach_copy_(ahead, updates)
        torch._foreach_copy_(updates, parameters)

    def after(self, parameters: list[torch.Tensor]) -> None:
        """Look ahead along this update as far as it agrees with the last."""
        updates = self.buffers(UPDATE, parameters)
        ahead = self.buffers(LOOK_AHEAD, parameters)
        torch._foreach_sub_(updates, parameters)
        if not self.started:
            torch._foreach_copy_(ahead, updates)
            torch._foreach_mul_(ahead, self.effective_strength)
            return
        for update, a in zip(updates, ahead, strict=True):
            agreement(update, a).mul_(update).mul_(self.effective_strength)
        torch._foreach_sub_(parameters, ahead)
