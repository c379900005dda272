"""Error feedback: the correction of an update for the delay of its gradient.

Let U_k be the update that the optimizer computes from batch k's gradient, learning rate and
decoupled weight decay included. The first update is not stale and is applied as it is; from then on

    x_1     = x_0 - U_0
    x_{k+1} = x_k - U_k - lambda (U_k - U_{k-1})      k >= 1

What should have been applied one step earlier but was not, U_k - U_{k-1}, is added now. With y the
plain delayed iterate (y_0 = x_0, y_{k+1} = y_k - U_k), x_{k+1} = y_{k+1} - lambda (U_k - U_0).

It acts on the innermost torch optimizer, the one that holds the fp32 main parameters or their
shards, whatever optimizer that is, through torch's own step hooks. One buffer u per parameter:

    p += lambda u                    before the step (undo the look-ahead; not at the first step)
    u = p; step; u -= p              u is now U_k
    p -= lambda u                    after the step (not at the first step)

Decoupled weight decay then acts at the un-looked-ahead point, a difference of second order.

Source: arXiv 2606.30634, the Error-Feedback correction (x_{t+1} = x_t - 2 u_{t-1} + u_{t-2} for
lambda = 1).
"""

from typing import Any
from weakref import WeakKeyDictionary

import torch

__all__ = ["STATE_KEY", "ErrorFeedback", "correction_of"]

STATE_KEY = "delay_correction_update"
"""Name of the buffer in the torch optimizer's state: shape, dtype and device of the parameter."""

_SAMPLE = 4096

_corrections: "WeakKeyDictionary[torch.optim.Optimizer, ErrorFeedback]" = WeakKeyDictionary()


def correction_of(optimizer: Any) -> "ErrorFeedback | None":
    """Return the correction that acts on a torch optimizer."""
    return _corrections.get(optimizer)


class ErrorFeedback:
    """The correction of one torch optimizer.

    The buffer of a parameter is made in the first step after the optimizer has made its own state,
    since many optimizers take a non-empty state for one that they have initialised.

    Args:
        optimizer: the torch optimizer; its ``step`` must run torch's step hooks, as every subclass
            of ``torch.optim.Optimizer`` does.
        strength: lambda.

    Raises:
        TypeError: the optimizer is not a ``torch.optim.Optimizer``.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, *, strength: float = 1.0) -> None:
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise TypeError(
                "--delay-correction needs a torch.optim.Optimizer inside of Megatron's optimizer, "
                f"got {type(optimizer).__name__}"
            )
        self._optimizer = optimizer
        self.strength = strength
        self.started = False
        """Whether an update was made already; before that there is nothing to correct."""
        self.buffered = False
        """Whether the optimizer's state holds the buffers."""
        self.enabled = False
        """Off while training is synchronous: the hooks do nothing."""
        self.measure = False
        """Whether the next step records :attr:`squares`."""
        self.squares: tuple[torch.Tensor, torch.Tensor] | None = None
        """|lambda (U_k - U_{k-1})|^2 and |U_k|^2 of the last measured step (fp32 scalars), over the
        first 4096 elements of each parameter: exact for small parameters, an estimate for large."""
        self._before: dict[torch.Tensor, torch.Tensor] = {}
        self._samples: dict[torch.Tensor, torch.Tensor] = {}
        self._applied = strength
        # Transformer Engine's FusedAdam saves and loads only what it knows the precision of.
        precisions = getattr(optimizer, "name_to_dtype_map", None)
        if precisions is not None:
            precisions[STATE_KEY] = torch.float32
        _corrections[optimizer] = self
        optimizer.register_step_pre_hook(self._before_step)
        optimizer.register_step_post_hook(self._after_step)

    def enable(self, *, applied: float | None = None) -> None:
        """Let the correction act from the next step on.

        Args:
            applied: lambda of the last step, if it was corrected and the buffers hold its update;
                None if the next step is the first one.
        """
        self.enabled = True
        self.started = applied is not None
        if applied is not None:
            self._applied = applied

    def make_buffers(self) -> None:
        """Put empty buffers into the optimizer's state, which must be initialised, to load into."""
        for p in self._parameters():
            self._optimizer.state[p][STATE_KEY] = torch.zeros_like(p, requires_grad=False)
        self.buffered = True

    def _parameters(self) -> list[torch.Tensor]:
        return [
            p for group in self._optimizer.param_groups for p in group["params"] if p.numel() > 0
        ]

    @torch.no_grad()
    def _before_step(self, *_: Any) -> None:
        if not self.enabled:
            return
        parameters, updates = [], []
        for p in self._parameters():
            u = self._optimizer.state.get(p, {}).get(STATE_KEY)
            if u is None:
                self._before[p] = p.detach().clone()
            else:
                parameters.append(p)
                updates.append(u)
        if not parameters:
            return
        if self.started:
            if self.measure:
                self._samples = {
                    p: _head(u).clone() for p, u in zip(parameters, updates, strict=True)
                }
            # The strength may have been changed at a resume; what was added goes.
            torch._foreach_add_(parameters, updates, alpha=self._applied)
        torch._foreach_copy_(updates, parameters)

    @torch.no_grad()
    def _after_step(self, *_: Any) -> None:
        if not self.enabled:
            return
        parameters = self._parameters()
        for p, before in self._before.items():
            self._optimizer.state[p][STATE_KEY] = before
        self._before.clear()
        updates = [self._optimizer.state[p][STATE_KEY] for p in parameters]
        if updates:
            torch._foreach_sub_(updates, parameters)
            if self.started:
                torch._foreach_sub_(parameters, updates, alpha=self.strength)
        self.squares = self._measured() if self._samples else None
        self._applied = self.strength
        self.started = self.buffered = True

    def _measured(self) -> tuple[torch.Tensor, torch.Tensor]:
        change, size = [], []
        for p, last in self._samples.items():
            now = _head(self._optimizer.state[p][STATE_KEY]).float()
            change.append((now - last.float()).mul_(self.strength).square_().sum())
            size.append(now.square().sum())
        self._samples = {}
        return torch.stack(change).sum(), torch.stack(size).sum()


def _head(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().reshape(-1)[:_SAMPLE]
