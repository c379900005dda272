"""Code to run before the training script, once the hooks are in place: what may go wrong."""

import signal

__all__ = [
    "UNREADABLE",
    "WRITTEN",
    "killed",
    "late",
    "poisoned",
    "signalled",
]

# What one rank does at the beginning of an iteration.
_AT = """
import os
from megatron.training import get_args, training
train_step = training.train_step
def at(*args, **kwargs):
    if get_args().curr_iteration == {iteration} - 1 and get_args().rank == {rank}:
        {what}
    return train_step(*args, **kwargs)
training.train_step = at
"""


def signalled(name: str, *, iteration: int, rank: int) -> str:
    """A rank gets a signal at the beginning of an iteration."""
    number = signal.Signals[name].value
    return _AT.format(iteration=iteration, rank=rank, what=f"os.kill(os.getpid(), {number})")


def late(*, iteration: int, rank: int) -> str:
    """This rank's clock says that a minute has passed."""
    return _AT.format(iteration=iteration, rank=rank, what="training._TRAIN_START_TIME -= 61")


# A gradient that is not finite, of one parameter on one rank, in iteration 4.
_POISON = """
import torch
from megatron.training import get_args, training
train_step = training.train_step
def poisoned(forward_step_func, data_iterator, model, *args, **kwargs):
    if get_args().curr_iteration == 3 and get_args().rank == {rank}:
        parameter = next(p for p in model[0].parameters() if p.requires_grad)
        parameter.register_hook(lambda gradient: torch.full_like(gradient, float("{value}")))
    return train_step(forward_step_func, data_iterator, model, *args, **kwargs)
training.train_step = poisoned
"""

# A rank is killed amid the backward passes of an iteration.
_KILL = """
import os, signal
from megatron.core.pipeline_parallel import schedules
from megatron.training import get_args
backward_step = schedules.backward_step
def killed(*args, **kwargs):
    if get_args().curr_iteration == {iteration} - 1 and get_args().rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return backward_step(*args, **kwargs)
schedules.backward_step = killed
"""

# Iteration 4 begins when the checkpoint that was saved behind iteration 3 is written.
WRITTEN = """
import time
from megatron.training import async_utils, get_args, training
next_step = training.train_step
def late(*args, **kwargs):
    if get_args().curr_iteration == 3:
        caller = async_utils._async_calls_queue.async_calls[0].async_caller
        stop = time.monotonic() + 60
        while caller._persistent_comp_q.empty() and time.monotonic() < stop:
            time.sleep(0.01)
    return next_step(*args, **kwargs)
training.train_step = late
"""

# The data of one rank cannot be read any more in iteration 4.
UNREADABLE = """
from megatron.core.datasets.gpt_dataset import GPTDataset
from megatron.training import get_args
get = GPTDataset.__getitem__
def unreadable(self, index):
    if getattr(get_args(), "curr_iteration", 0) == 3 and get_args().rank == 0:
        raise OSError("the file system went away")
    return get(self, index)
GPTDataset.__getitem__ = unreadable
"""


def poisoned(rank: int, value: str) -> str:
    """A gradient on a rank is not finite in iteration 4; ``value`` is "nan" or "inf"."""
    return _POISON.format(rank=rank, value=value)


def killed(*, iteration: int) -> str:
    """Rank 1 is killed amid the backward passes of an iteration."""
    return _KILL.format(iteration=iteration)
