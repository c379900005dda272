"""The training script of the benchmarks: the package's GPT script, timed and paced from inside.

Started by the package's own launcher, as any training script is. It replaces Megatron functions
after the launcher's hooks are in place and before training starts. The settings come as JSON in the
environment variable BENCHMARK_SETTINGS; each rank writes what it measured to OUTPUT/rank<N>.json.
"""

import contextlib
import dataclasses
import functools
import gc
import json
import os
import resource
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from megatron_async import schedules
from support.jobs import SKIPPED
from support.late_messages import Table, delay_messages
from support.misplaced import misplaced_schedule
from support.record import Record, stretched
from support.saved_tensors import SavedTensors


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """What a benchmark asks for."""

    output: str
    forward_seconds: float | None = None
    """Sleep so that each microbatch's forward through the whole stage takes this long."""
    backward_seconds: float | None = None
    gradients_last: bool = False
    """Sleep ahead of a backward's computation, so that its gradients are ready at its end."""
    optimizer_seconds: float | None = None
    chunks: int = 1
    """Model chunks per stage; each takes its share of the times."""
    update: bool = True
    """False: batches are never applied (asynchronous schedules only), nothing crosses stages but
    activations and their gradients."""
    latency_seconds: float = 0.0
    """Each message between stages arrives this much later."""
    reduce_delay_seconds: float = 0.0
    """Each data-parallel collective arrives this much later."""
    synchronize: bool = False
    """Wait for the device at the end of each iteration."""
    pin: bool = False
    """Keep each rank, with all its threads, on a core of its own."""
    count_memory: bool = False
    """Count the tensors that are alive after the last iteration."""
    count_activations: bool = False
    """Find the most bytes that autograd keeps, from the measured iterations on."""


def main() -> None:
    settings = Settings(**json.loads(os.environ["BENCHMARK_SETTINGS"]))
    record = Record()
    if settings.pin:
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[int(os.environ["LOCAL_RANK"]) % len(cores)]})
    _pace(settings, record)
    _delay_collectives(settings, record)
    if settings.latency_seconds:
        delay_messages(
            Table(
                Path(settings.output) / "messages",
                rank=int(os.environ["RANK"]),
                ranks=int(os.environ["WORLD_SIZE"]),
                seconds=settings.latency_seconds,
            )
        )
    saved = SavedTensors()
    _mark_iterations(settings, record, saved)
    _time_step(record)
    if not settings.update:
        _leave_out_updates()
    schedules.register(misplaced_schedule())

    from megatron_async.scripts.pretrain_gpt import main as train

    counting = saved.counting() if settings.count_activations else contextlib.nullcontext()
    try:
        with counting:
            train()
    finally:
        record.saved_bytes = saved.peak
        record.write(settings.output, rank=int(os.environ.get("RANK", "0")))


def _pace(settings: Settings, record: Record) -> None:
    from megatron.core.optimizer import layer_wise_optimizer, optimizer
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
    from megatron.core.pipeline_parallel import schedules

    def share(seconds: float | None) -> float | None:
        return None if seconds is None else seconds / settings.chunks

    forward, backward = share(settings.forward_seconds), share(settings.backward_seconds)
    schedules.forward_step = stretched(schedules.forward_step, forward, record.forward)
    schedules.backward_step = stretched(
        schedules.backward_step,
        backward,
        record.backward,
        sleep_first=settings.gradients_last,
    )

    outermost = _Outermost(settings.optimizer_seconds, record.optimizer)
    for kind in (
        optimizer.FP32Optimizer,
        optimizer.MixedPrecisionOptimizer,
        optimizer.ChainedOptimizer,
        DistributedOptimizer,
        layer_wise_optimizer.LayerWiseDistributedOptimizer,
    ):
        if "step_with_ready_grads" in vars(kind):
            kind.step_with_ready_grads = outermost.wrap(kind.step_with_ready_grads)


def _time_step(record: Record) -> None:
    from megatron.core.optimizer import optimizer

    optimizer.ChainedOptimizer.step = stretched(optimizer.ChainedOptimizer.step, None, record.step)


class _Outermost:
    """Times and paces a call of any of several functions that call each other, once."""

    def __init__(self, seconds: float | None, times: list[float]) -> None:
        self._seconds = seconds
        self._times = times
        self._inside = False

    def wrap(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def step(*args: Any, **kwargs: Any) -> Any:
            if self._inside:
                return original(*args, **kwargs)
            self._inside = True
            try:
                return stretched(original, self._seconds, self._times)(*args, **kwargs)
            finally:
                self._inside = False

        return step


class _LateHandle:
    """The handle of a collective that arrives later than it does."""

    def __init__(self, handle: Any, seconds: float) -> None:
        self._handle = handle
        self._arrives = time.monotonic() + seconds

    def wait(self, *args: Any, **kwargs: Any) -> Any:
        result = self._handle.wait(*args, **kwargs)
        time.sleep(max(self._arrives - time.monotonic(), 0.0))
        return result


def _delay_collectives(settings: Settings, record: Record) -> None:
    """Delay the reductions of gradients and the gathers of parameters over data-parallel ranks."""
    from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBucketGroup

    def late(name: str, attribute: str) -> None:
        original = getattr(_ParamAndGradBucketGroup, name)

        @functools.wraps(original)
        def start(self: Any, *args: Any, **kwargs: Any) -> Any:
            before = getattr(self, attribute)
            result = original(self, *args, **kwargs)
            handle = getattr(self, attribute)
            if handle is not None and handle is before:
                return result  # It was under way already.
            record.collectives += 1
            if handle is None:
                time.sleep(settings.reduce_delay_seconds)
            else:
                setattr(self, attribute, _LateHandle(handle, settings.reduce_delay_seconds))
            return result

        setattr(_ParamAndGradBucketGroup, name, start)

    late("start_grad_sync", "grad_reduce_handle")
    late("start_param_sync", "param_gather_handle")


def _mark_iterations(settings: Settings, record: Record, saved: SavedTensors) -> None:
    from megatron.training import get_args, training

    original = training.train_step

    @functools.wraps(original)
    def train_step(*args: Any, **kwargs: Any) -> Any:
        if settings.count_activations:
            # In a few iterations every version of the weights was in the parameters once.
            saved.exclude(each for chunk in args[2] for each in chunk.parameters())
            if len(record.ends) == SKIPPED:
                saved.restart()
        result = original(*args, **kwargs)
        if settings.synchronize:
            torch.cuda.synchronize()
        record.ends.append(time.monotonic())
        # Not before: walking through all objects takes its time.
        if settings.count_memory and len(record.ends) == get_args().train_iters:
            record.tensor_bytes = _tensor_bytes()
            record.peak_bytes = (
                torch.cuda.max_memory_allocated()
                if settings.synchronize
                else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
            )
        return result

    training.train_step = train_step


def _tensor_bytes() -> int:
    gc.collect()  # what only a cycle of references keeps
    storages: dict[int, int] = {}
    for thing in gc.get_objects():
        # Not isinstance: asking some of Megatron's lazy objects for their class has side effects.
        if issubclass(type(thing), torch.Tensor) and thing.layout is torch.strided:
            storage = thing.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def _leave_out_updates() -> None:
    from megatron_async.runtime import engine
    from megatron_async.update.deferred import UpdateReport

    class NoUpdate:
        """In place of a deferred update: a version that equals the last one."""

        def __init__(self, *, weights: Any, **_: Any) -> None:
            self.weights = weights
            self.pending_batch = -1
            self.iteration = 0

        @property
        def pending(self) -> bool:
            return self.pending_batch >= 0

        def launch(self, *, batch: int, iteration: int, **_: Any) -> None:
            self.pending_batch, self.iteration = batch, iteration

        def complete(self, **_: Any) -> UpdateReport:
            batch, self.pending_batch = self.pending_batch, -1
            with self.weights.next_version():
                pass
            return UpdateReport(batch=batch, iteration=self.iteration)

    vars(engine)["DeferredUpdate"] = NoUpdate


if __name__ == "__main__":
    main()
