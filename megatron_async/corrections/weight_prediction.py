"""Weight prediction: the model computes on the weights that its gradient will be applied to.

Let y be the iterate of the optimizer, U_k the update that it computes from batch k's gradient
(learning rate and decoupled weight decay included), tau the delay, and s the strength. The weights
that a batch computes on are moved along the last update, once for each step of delay:

    y_{k+1} = y_k - U_k
    x_{k+1} = y_{k+1} - s tau U_k         x is what the model computes on; x_0 = y_0

If updates change slowly, x_{k+1} is the iterate of tau steps later. One buffer a for each
parameter, the look-ahead s tau U_k itself, so that it is undone as it was applied even after a
resume with another strength or delay:

    p += a                           before the step (zero at the first step)
    a = p; step; a -= p; a *= s tau
    p -= a                           after the step

The model's weights are the predicted ones throughout: evaluations run on them, and checkpoints hold
them as the weights. The optimizer's iterate is p + a of the checkpoint's state. Decoupled weight
decay acts at the iterate.

Error feedback of the same strength differs in the first step alone: there x_1 = y_1, and later
x_{k+1} = y_{k+1} - lambda (U_k - U_0), which is this with lambda U_0 added to the iterate once.

Source: SpecTrain (Chen, Yang, Cheng, "Efficient and Robust Parallel DNN Training through Model
Parallelism on Multi-GPU Platform", arXiv 1809.02839) predicts w_{t+tau} as w_t - tau eta v_{t-1}
with the smoothed gradient v of SGD with momentum, of which eta v is the last update; XPipe
(arXiv 1911.04610) does so with the last update of Adam.
"""

import torch

from megatron_async.corrections.base import LOOK_AHEAD, DelayCorrection

__all__ = ["WeightPrediction"]


class WeightPrediction(DelayCorrection):
    """Prediction along the last update.

    Args:
        optimizer: the torch optimizer.
        strength: s; 1 predicts the weights of as many steps later as the gradient is late.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, *, strength: float = 1.0) -> None:
        super().__init__(optimizer, strength=strength, state_keys=(LOOK_AHEAD,))

    def before(self, parameters: list[torch.Tensor]) -> None:
        """Go back to the optimizer's iterate."""
        ahead = self.buffers(LOOK_AHEAD, parameters)
        torch._foreach_add_(parameters, ahead)
        torch._foreach_copy_(ahead, parameters)

    def after(self, parameters: list[torch.Tensor]) -> None:
        """Predict along this update."""
        ahead = self.buffers(LOOK_AHEAD, parameters)
        torch._foreach_sub_(ahead, parameters)
        torch._foreach_mul_(ahead, [self.strength * self.delay_of(p) for p in parameters])
        torch._foreach_sub_(parameters, ahead)
