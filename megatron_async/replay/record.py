"""``--log-enqueues``: record what every rank would enqueue on a GPU, on CPU ranks.

The launcher calls :func:`install` behind the CPU backend and before Megatron is imported, and
:func:`mark_actions` behind the hooks. What is replaced stands in tables, those of torch's
attributes beside what is recorded of them, Megatron's here.
"""

import atexit
import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from megatron_async.cpu_backend import one_rank
from megatron_async.megatron import releases
from megatron_async.megatron.replaced import Replacement, apply
from megatron_async.replay.communication import communication_rows
from megatron_async.replay.kernels import KernelMode, kernel_rows
from megatron_async.replay.recorder import Recorder
from megatron_async.replay.streams import stream_rows
from megatron_async.replay.tasks import record_exchanges
from megatron_async.replay.trace import Begin, End

__all__ = ["FLAG", "directory_in", "install", "mark_actions", "recording_rows"]

FLAG = "--log-enqueues"


def directory_in(argv: list[str]) -> str | None:
    """Return the flag's value on a command line; None if it is not there, or has none."""
    for position, argument in enumerate(argv):
        flag, equals, value = argument.partition("=")
        if flag == FLAG:
            return value if equals else next(iter(argv[position + 1 :]), None)
    return None


def recording_rows(recorder: Recorder) -> list[Replacement]:
    """Return the table of torch's attributes."""
    return [*stream_rows(recorder), *kernel_rows(recorder), *communication_rows(recorder)]


def install(directory: Path) -> Recorder:
    """Record this process from now on; called once, behind ``cpu_backend.install()``.

    Args:
        directory: gets a file for each rank.
    """
    one_rank.leave_to_gloo()
    recorder = Recorder(
        directory,
        rank=int(os.environ.get("RANK", "0")),
        world=int(os.environ.get("WORLD_SIZE", "1")),
    )
    apply(recording_rows(recorder), torch.__version__)
    KernelMode(recorder).__enter__()  # type: ignore[no-untyped-call]
    atexit.register(recorder.end)
    return recorder


# ------------------------------------------------------------------------------------------ marks


def mark_actions(recorder: Recorder) -> None:
    """Mark iterations, and what of the schedule's lists runs.

    Of Megatron's own schedules, which have no lists at run time, the forward and backward steps and
    the optimizer's step are marked.
    """
    from megatron_async.runtime.interpreter import Interpreter

    marks = _Marks(recorder)
    apply(megatron_rows(marks), releases.current())

    def perform(self: Any, actions: Any) -> None:
        for action in actions:
            with marks.action(action.kind.value, action.batch, action.microbatch, action.version):
                self._handlers[action.kind](action)

    Interpreter._perform = perform  # type: ignore[method-assign]
    record_exchanges(recorder)


class _Marks:
    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self.iteration = -1
        self._inside = False
        self._counts: dict[str, int] = {}

    def action(self, name: str, batch: int, microbatch: int, version: int) -> "_Action":
        return _Action(
            self, Begin(action=name, batch=batch, microbatch=microbatch, version=version)
        )

    def step(self, name: str) -> "_Action":
        """An action of a schedule of Megatron's; microbatches are counted in each iteration."""
        number = self._counts.get(name, 0)
        if not self._inside and self.iteration >= 0:
            self._counts[name] = number + 1
        counted = name in ("forward", "backward")
        return self.action(name, self.iteration, number if counted else -1, -1)

    def enter(self, begin: Begin) -> bool:
        """Whether the action is not part of another one."""
        if self._inside or self.iteration < 0:
            return False
        self._inside = True
        self.recorder.add(begin)
        return True

    def leave(self) -> None:
        self._inside = False
        self.recorder.add(End())

    def begin_iteration(self, number: int, *, stage: int, stages: int) -> None:
        self.iteration = number
        self._counts.clear()
        self.recorder.begin_iteration(number, stage=stage, stages=stages)

    def end_training(self) -> None:
        self.iteration = -1
        self.recorder.end()


class _Action:
    def __init__(self, marks: _Marks, begin: Begin) -> None:
        self._marks = marks
        self._begin = begin
        self._entered = False

    def __enter__(self) -> None:
        self._entered = self._marks.enter(self._begin)

    def __exit__(self, *exc: object) -> None:
        if self._entered:
            self._marks.leave()


def megatron_rows(marks: _Marks) -> list[Replacement]:
    """The rows for Megatron."""

    def row(target: str, attribute: str, make: Callable[[Any], Any], why: str) -> Replacement:
        return Replacement(
            target=target, attribute=attribute, make=make, why=why, versions=releases.VERSIONS
        )

    def step(name: str) -> Callable[[Any], Any]:
        def make(original: Any) -> Any:
            @functools.wraps(original)
            def stepping(*args: Any, **kwargs: Any) -> Any:
                with marks.step(name):
                    return original(*args, **kwargs)

            return stepping

        return make

    schedules = "megatron.core.pipeline_parallel.schedules"
    optimizer = "megatron.core.optimizer.optimizer"
    training = "megatron.training.training"
    marked = "a schedule of Megatron's has no lists at run time"
    return [
        row(schedules, "forward_step", step("forward"), marked),
        row(schedules, "backward_step", step("backward"), marked),
        *(
            row(f"{optimizer}:{name}", "step", step("update"), marked)
            for name in ("MixedPrecisionOptimizer", "FP32Optimizer", "ChainedOptimizer")
        ),
        row(training, "train_step", lambda original: _train_step(marks, original), "iterations"),
        row(training, "train", lambda original: _train(marks, original), "the end of training"),
    ]


def _train_step(marks: _Marks, original: Any) -> Any:
    @functools.wraps(original)
    def train_step(*args: Any, **kwargs: Any) -> Any:
        from megatron.core import parallel_state
        from megatron.training import get_args

        marks.begin_iteration(
            get_args().curr_iteration,
            stage=parallel_state.get_pipeline_model_parallel_rank(),
            stages=parallel_state.get_pipeline_model_parallel_world_size(),
        )
        return original(*args, **kwargs)

    return train_step


def _train(marks: _Marks, original: Any) -> Any:
    @functools.wraps(original)
    def train(*args: Any, **kwargs: Any) -> Any:
        try:
            return original(*args, **kwargs)
        finally:
            marks.end_training()

    return train
