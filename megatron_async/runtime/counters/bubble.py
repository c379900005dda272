"""How long ranks wait for other stages: the pipeline bubble, measured.

Time is taken with events of the current stream, so that on a GPU it is the device's idle time and
not the host's; on CPU ranks the events read the host's clock. The wait for data is taken on the
host.
"""

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from megatron_async.runtime.counters.counter import Counter

__all__ = ["BubbleLog", "IdleCounter", "IdleMeter", "TimedIterator", "TimedRequest"]

_IDLE, _ELAPSED = "idle", "elapsed"


class IdleMeter:
    """Adds up the waiting time of one rank, iteration by iteration."""

    def __init__(self) -> None:
        self._spans: list[tuple[Any, Any]] = []
        self._host_seconds = 0.0
        self._closed: tuple[list[tuple[Any, Any]], float, float] | None = None
        self._began = time.perf_counter()
        self._paused_since: float | None = None

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Leave out what the body does, its waiting and its time: an evaluation, a checkpoint."""
        if self._paused_since is not None:
            yield
            return
        self._paused_since = time.perf_counter()
        try:
            yield
        finally:
            self._began += time.perf_counter() - self._paused_since
            self._paused_since = None

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Count the time that the current stream spends on what the body enqueues.

        The body is a wait: a receive, or a collective that another stage has yet to join.
        """
        if self._paused_since is not None:
            yield
            return
        start = torch.cuda.Event(enable_timing=True)
        end = torch.cuda.Event(enable_timing=True)
        start.record()
        try:
            yield
        finally:
            end.record()
            self._spans.append((start, end))

    def add_host_seconds(self, seconds: float) -> None:
        """Count time that the host spent waiting."""
        if self._paused_since is None:
            self._host_seconds += seconds

    def close_iteration(self) -> tuple[float, float]:
        """End an iteration and return (idle, elapsed) seconds of the one before it.

        One iteration late, because the device may not have got to this one's events yet; (0, 0) the
        first time.
        """
        now = time.perf_counter() if self._paused_since is None else self._paused_since
        before, self._closed = self._closed, (self._spans, self._host_seconds, now - self._began)
        self._spans, self._host_seconds, self._began = [], 0.0, now
        if before is None:
            return 0.0, 0.0
        spans, host_seconds, elapsed = before
        if spans:
            spans[-1][1].synchronize()
        idle = sum(start.elapsed_time(end) for start, end in spans) / 1e3 + host_seconds
        return idle, elapsed


class TimedIterator:
    """A data iterator whose waiting time is counted.

    Args:
        iterator: what Megatron hands to the forward step.
        meter: counts the time that ``next`` takes.
    """

    def __init__(self, iterator: Any, meter: IdleMeter) -> None:
        self._iterator = iterator
        self._meter = meter

    def __iter__(self) -> "TimedIterator":
        return self

    def __next__(self) -> Any:
        began = time.perf_counter()
        try:
            return next(self._iterator)
        finally:
            self._meter.add_host_seconds(time.perf_counter() - began)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._iterator, name)


class TimedRequest:
    """A receive under way (a ``torch.distributed.Work``) whose wait is counted.

    Interleaved schedules wait for their receives later than they start them.

    Args:
        request: what the receive returned.
        meter: counts the wait.
    """

    def __init__(self, request: Any, meter: IdleMeter) -> None:
        self._request = request
        self._meter = meter

    def wait(self, *args: Any, **kwargs: Any) -> Any:
        with self._meter.waiting():
            return self._request.wait(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._request, name)


class BubbleLog:
    """The bubble's share of the time between two log lines."""

    def __init__(self) -> None:
        self.meter = IdleMeter()
        self.share: float | None = None
        """Idle seconds over all ranks / elapsed seconds over all ranks, of the last log line."""
        self._idle = 0.0
        self._elapsed = 0.0

    def add(self, idle: float, elapsed: float) -> None:
        """Add seconds: of this rank, or summed over all ranks."""
        self._idle += idle
        self._elapsed += elapsed

    def close(self, *, everywhere: bool) -> None:
        """Set :attr:`share` from what was added since the last call.

        Args:
            everywhere: the seconds are summed over all ranks already. Otherwise they are summed
                here, by a collective, as a synchronous schedule may.
        """
        idle, elapsed = self._idle, self._elapsed
        self._idle = self._elapsed = 0.0
        if not everywhere:
            sums = torch.tensor(
                [idle, elapsed], dtype=torch.float64, device=torch.cuda.current_device()
            )
            dist.all_reduce(sums)
            idle, elapsed = sums.tolist()
        self.share = idle / elapsed if elapsed > 0 else None

    def wait_for_stages(self) -> None:
        """Count the wait at the end of a synchronous iteration.

        There the gradient norm makes all stages wait for the slowest; a collective of one number
        right before takes that wait on itself and changes nothing else.
        """
        group = parallel_state.get_pipeline_model_parallel_group()
        if group.size() > 1:
            with self.meter.waiting():
                dist.all_reduce(torch.zeros(1, device=torch.cuda.current_device()), group=group)


class IdleCounter(Counter):
    """Carries the seconds of all ranks with the updates.

    Args:
        log: what they are added to.
    """

    names = (_IDLE, _ELAPSED)

    def __init__(self, log: BubbleLog) -> None:
        self._log = log

    def collect(self) -> dict[str, float]:
        return dict(zip(self.names, self._log.meter.close_iteration(), strict=True))

    def receive(self, sums: Mapping[str, float]) -> None:
        if _IDLE in sums:
            self._log.add(sums[_IDLE], sums[_ELAPSED])
