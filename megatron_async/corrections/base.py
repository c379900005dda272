"""What every delay correction is: hooks around the step of a torch optimizer, and buffers.

A correction acts on the innermost torch optimizer, the one that holds the fp32 main parameters or
their shards, whatever optimizer that is. It wraps the optimizer's step by torch's own step hooks,
which every subclass of ``torch.optim.Optimizer`` runs, and never replaces the optimizer: Megatron
checks its class. Its buffers lie in the optimizer's state, so that every checkpoint format carries
them, and have the shape, dtype and device of their parameter. All it computes is elementwise, so
that the result does not depend on how parameters are sharded, and the copies of a tied parameter
stay equal.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch

__all__ = [
    "LOOK_AHEAD",
    "MEAN_SQUARE",
    "STATE_PREFIX",
    "UPDATE",
    "VELOCITY",
    "DelayCorrection",
    "correction_of",
    "drop_buffers",
    "head",
]

STATE_PREFIX = "delay_correction_"
"""What the names of all buffers in the torch optimizer's state begin with."""
UPDATE = f"{STATE_PREFIX}update"
"""Name of a buffer with the last update."""
LOOK_AHEAD = f"{STATE_PREFIX}look_ahead"
"""Name of a buffer with what was subtracted from the parameters after the last update."""
VELOCITY = f"{STATE_PREFIX}velocity"
MEAN_SQUARE = f"{STATE_PREFIX}mean_square"

_SAMPLE = 4096

_corrections: "WeakKeyDictionary[torch.optim.Optimizer, DelayCorrection]" = WeakKeyDictionary()


def correction_of(optimizer: Any) -> "DelayCorrection | None":
    """Return the correction that acts on a torch optimizer."""
    return _corrections.get(optimizer)


def drop_buffers(optimizer: Any) -> None:
    """Remove the buffers of whatever correction from a torch optimizer's state."""
    for state in optimizer.state.values():
        for key in [key for key in state if str(key).startswith(STATE_PREFIX)]:
            del state[key]


class DelayCorrection(ABC):
    """The correction of one torch optimizer.

    A subclass says what its buffers are called and what it does before and after the optimizer's
    step. The first buffer holds, while the optimizer steps, what :meth:`before` has put there: a
    copy of the parameters or something that goes on from it. The buffers are made in the first
    step, after the optimizer has made its own state: many optimizers take a non-empty state for one
    that they have initialised.

    Args:
        optimizer: the torch optimizer.
        strength: factor of the correction.
        state_keys: names of the buffers, each with :data:`STATE_PREFIX`.

    Raises:
        TypeError: the optimizer is not a ``torch.optim.Optimizer``.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        *,
        strength: float = 1.0,
        state_keys: Sequence[str],
    ) -> None:
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise TypeError(
                "--delay-correction needs a torch.optim.Optimizer inside of Megatron's optimizer, "
                f"got {type(optimizer).__name__}"
            )
        self._optimizer = optimizer
        self.strength = strength
        self.state_keys = tuple(state_keys)
        self.delay: float = 1
        """By how many updates the gradients are late, as a mean over the microbatches of a batch.
        May change between steps."""
        self.delays: dict[torch.Tensor, float] = {}
        """The same for single parameters of the optimizer, where it differs."""
        self.started = False
        """Whether an update was made already; before that there is nothing to correct."""
        self.buffered = False
        """Whether the optimizer's state holds the buffers."""
        self.enabled = False
        """Off while training is synchronous: the hooks do nothing."""
        self.measure = False
        """Whether the next step records :attr:`squares`."""
        self.squares: tuple[torch.Tensor, torch.Tensor] | None = None
        """Sums of squares of the correction and of the optimizer's own update U_k in the last
        measured step (fp32 scalars), over the first 4096 elements of each parameter: exact for
        small parameters, an estimate for large. The correction is x_k - x_{k+1} - U_k, with x what
        the model computes on."""
        self._applied = strength
        """:attr:`effective_strength` in the last update."""
        self._new: dict[torch.Tensor, dict[str, torch.Tensor]] = {}
        """Buffers that are put into the state after the step."""
        self._samples: dict[torch.Tensor, tuple[torch.Tensor, torch.Tensor]] = {}
        # Transformer Engine's FusedAdam saves and loads only what it knows the precision of.
        precisions = getattr(optimizer, "name_to_dtype_map", None)
        if precisions is not None:
            precisions.update(dict.fromkeys(self.state_keys, torch.float32))
        _corrections[optimizer] = self
        optimizer.register_step_pre_hook(self._before_step)
        optimizer.register_step_post_hook(self._after_step)

    @abstractmethod
    def before(self, parameters: list[torch.Tensor]) -> None:
        """Prepare parameters, gradients and buffers for the optimizer's step.

        Called from the second update on, with the parameters that have buffers. In the place of the
        first call stands :meth:`first_buffers`.
        """

    @abstractmethod
    def after(self, parameters: list[torch.Tensor]) -> None:
        """Correct the parameters, and leave in the buffers what the next update needs.

        :attr:`started` is False in the first update.
        """

    def first_buffers(self, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the buffers that the first update starts with: of the first key a copy of the
        parameter, all others zero where they are missing."""
        return {self.state_keys[0]: parameter.detach().clone()}

    def delay_of(self, parameter: torch.Tensor) -> float:
        """By how many updates the gradient of one of the optimizer's parameters is late."""
        return self.delays.get(parameter, self.delay)

    @property
    def effective_strength(self) -> float:
        """The strength of the next update: what was asked for times the delay, which is below 1
        where a part of each batch is not delayed."""
        return self.strength * self.delay

    def enable(self) -> None:
        """Let the correction act from the next step on, which is the first one."""
        self.enabled = True
        self.started = self.buffered = False
        drop_buffers(self._optimizer)

    def state_dict(self) -> dict[str, Any]:
        """Return what a resume needs beside the buffers: plain data, the same on all ranks."""
        return {"started": self.started, "applied": self._applied}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Let the correction go on where it was saved; the buffers are in the optimizer's state
        already, if an update was made."""
        self.enabled = True
        self.started = state["started"]
        self._applied = state["applied"]

    def make_buffers(self) -> None:
        """Put empty buffers into the optimizer's state, which must be initialised, to load into."""
        for p in self._parameters():
            for key in self.state_keys:
                self._optimizer.state[p][key] = torch.zeros_like(p, requires_grad=False)
        self.buffered = True

    def buffers(self, key: str, parameters: list[torch.Tensor]) -> list[torch.Tensor]:
        """Return one buffer of each parameter."""
        return [self._optimizer.state[p][key] for p in parameters]

    def _parameters(self) -> list[torch.Tensor]:
        return [
            p for group in self._optimizer.param_groups for p in group["params"] if p.numel() > 0
        ]

    @torch.no_grad()
    def _before_step(self, *_: Any) -> None:
        if not self.enabled:
            return
        known = []
        for p in self._parameters():
            if self.state_keys[0] in self._optimizer.state.get(p, {}):
                known.append(p)
            else:
                self._new[p] = self.first_buffers(p)
        if not known:
            return
        if self.measure:
            seen = {p: head(p).clone() for p in known}
            self.before(known)
            self._samples = {p: (x, head(p).clone()) for p, x in seen.items()}
        else:
            self.before(known)

    @torch.no_grad()
    def _after_step(self, *_: Any) -> None:
        if not self.enabled:
            return
        for p, buffers in self._new.items():
            state = self._optimizer.state[p]
            for key in self.state_keys:
                state[key] = buffers[key] if key in buffers else torch.zeros_like(p)
        self._new.clear()
        updates = {p: start - head(p) for p, (_, start) in self._samples.items()}
        parameters = self._parameters()
        if parameters:
            self.after(parameters)
        self.squares = self._measured(updates) if updates else None
        self._samples = {}
        self._applied = self.effective_strength
        self.started = self.buffered = True

    def _measured(self, updates: dict[torch.Tensor, torch.Tensor]) -> Any:
        """Return the sums of squares of correction and update.

        Args:
            updates: the optimizer's own update of the first elements of each parameter.
        """
        change, size = [], []
        for p, update in updates.items():
            x, _ = self._samples[p]
            change.append((x - head(p) - update).float().square_().sum())
            size.append(update.float().square_().sum())
        return torch.stack(change).sum(), torch.stack(size).sum()


def head(tensor: torch.Tensor) -> torch.Tensor:
    """Return the elements, at most 4096, by which corrections are measured."""
    return tensor.detach().reshape(-1)[:_SAMPLE]
