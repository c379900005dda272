"""What the parts of the recording share: the file, the current stream, the storages.

The main thread is recorded, and of others the tasks that it leaves to them (:mod:`.tasks`): the
order in which several threads enqueue is not the program's.
Items are written from the first training iteration to the last; what comes before is set-up, of
which only the order of the streams' first use is kept.
"""

import contextlib
import json
import os
import sys
import threading
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from types import CodeType
from typing import Any, TextIO

import torch

from megatron_async.cpu_backend import one_rank
from megatron_async.replay.memory import Memory, Storage
from megatron_async.replay.trace import (
    Allocate,
    Communication,
    Free,
    Item,
    Iteration,
    Kernel,
    Task,
    Trace,
    communicator,
    encode,
    header,
    trace_path,
)

__all__ = ["Recorder"]

_SKIPPED = (
    str(Path(torch.__file__).parent),
    str(Path(__file__).parent),
    str(Path(one_rank.__file__)),
    "<",
)
"""Where functions are defined that are not named as the place of an item."""


class _OfThread(threading.local):
    """What each thread has of its own."""

    suppressed = 0
    stream = 0
    making_on_device = False
    task: list[Item] | None = None
    """What the task has done so far that the thread is at."""


class Recorder:
    """The trace of this process.

    Args:
        directory: gets the rank's file.
        rank: global rank.
        world: number of ranks.
    """

    def __init__(self, directory: Path, *, rank: int, world: int) -> None:
        self.rank = rank
        self.memory = Memory(self._freed)
        self._mine = _OfThread()
        self._directory = directory
        self._world = world
        self._file: TextIO | None = None
        self._streams: dict[str, None] = {}
        """Those in use so far, in the order of their first use."""
        self._pending: deque[int] = deque()
        """Storages that were freed since the last item; any thread appends."""
        self._tasks: deque[Task] = deque()
        """Those that have ended since the last item."""
        self._last_event = self._last_stream = 0
        self._places: dict[CodeType, str | None] = {}
        self._thread = threading.main_thread()
        self._ended = False
        self._warned = False
        os.register_at_fork(after_in_child=self._forget)

    @property
    def stream(self) -> int:
        """Number of the current stream."""
        return self._mine.stream

    @stream.setter
    def stream(self, number: int) -> None:
        self._mine.stream = number

    @property
    def making_on_device(self) -> bool:
        """Whether what is made without an input is made on the device."""
        return self._mine.making_on_device

    @property
    def active(self) -> bool:
        """Whether what happens now is to be recorded."""
        return not self._mine.suppressed and self._recorded_thread

    @property
    def _recorded_thread(self) -> bool:
        return threading.current_thread() is self._thread or self._mine.task is not None

    @contextlib.contextmanager
    def suppressed(self) -> Iterator[None]:
        """Record nothing inside: it stands for one item, or for nothing on a GPU."""
        self._mine.suppressed += 1
        try:
            yield
        finally:
            self._mine.suppressed -= 1

    @contextlib.contextmanager
    def on_device(self) -> Iterator[None]:
        """What is made inside is made on the device."""
        before, self._mine.making_on_device = self._mine.making_on_device, True
        try:
            yield
        finally:
            self._mine.making_on_device = before

    @contextlib.contextmanager
    def task(self, number: int) -> Iterator[None]:
        """Inside, this thread does a task that the main thread has left to it."""
        items: list[Item] = []
        self._mine.task = items
        try:
            yield
        finally:
            self._mine.task = None
            self._tasks.append(Task(task=number, items=tuple(items)))  # type: ignore[arg-type]

    def next_event(self) -> int:
        """Return a number for a recording of an event."""
        self._last_event += 1
        return self._last_event

    def next_stream(self) -> int:
        """Return a number for a new stream."""
        self._last_stream += 1
        return self._last_stream

    def add(self, item: Item) -> None:
        """Write an item, unless nothing is to be recorded."""
        if not self.active or self._ended:
            return
        if self._mine.task is not None:
            self._mine.task.append(item)
            return
        if self._file is None:
            if isinstance(item, Kernel | Communication):
                self._note_streams(item)
            return
        self._write_tasks()
        while self._pending:
            self._write(encode(Free(storage=self._pending.popleft())))
        self._write(encode(item))

    def warn_of_other_thread(self) -> None:
        """Say once that a communication of another thread is missing from the trace."""
        if not self._warned and not self._recorded_thread:
            self._warned = True
            print(
                "megatron_async: --log-enqueues does not record all threads; communication of "
                f"{threading.current_thread().name} is missing",
                file=sys.stderr,
                flush=True,
            )

    def _note_streams(self, item: Kernel | Communication) -> None:
        self._streams.setdefault(str(item.stream))
        if isinstance(item, Communication) and item.asynchronous and not item.on_host:
            self._streams.setdefault(f"nccl:{communicator(item, self.rank)}")

    def begin_iteration(self, number: int, *, stage: int, stages: int) -> None:
        """Called before a training iteration (0 is the first); the first one opens the file.

        Args:
            number: of the iteration.
            stage: this rank's pipeline stage.
            stages: p.
        """
        if self._file is None and not self._ended:
            self._directory.mkdir(parents=True, exist_ok=True)
            self._file = trace_path(self._directory, self.rank).open("w", encoding="utf-8")
            trace = Trace(
                rank=self.rank,
                world=self._world,
                stage=stage,
                stages=stages,
                streams=tuple(self._streams),
            )
            self._write(header(trace))
        self.add(Iteration(number=number))
        if self._file is not None:
            self._file.flush()

    def end(self) -> None:
        """Close the file; nothing is written any more."""
        self._ended = True
        if self._file is not None:
            self._write_tasks()
            self._file.close()
            self._file = None

    def _write(self, record: dict[str, Any]) -> None:
        assert self._file is not None
        self._file.write(json.dumps(record, separators=(",", ":")) + "\n")

    def _write_tasks(self) -> None:
        while self._tasks:
            self._write(encode(self._tasks.popleft()))

    def _freed(self, storage: Storage) -> None:
        if storage.on_device and self._file is not None:
            self._pending.append(storage.number)

    def _forget(self) -> None:
        """In a forked child: the file is the parent's."""
        self._ended = True
        self._file = None

    # Memory

    def place_on_device(self, tensor: torch.Tensor) -> None:
        """Let a tensor's storage be on the device from now on, allocated just now if it was not."""
        storage = self.memory.register(tensor)
        if not storage.on_device:
            storage.on_device = True
            size = tensor.untyped_storage().nbytes()
            self.add(Allocate(storage=storage.number, size=size, stream=self.stream))

    def where(self) -> str:
        """Return the innermost function on the stack that is neither torch's nor the recording's,
        as ``file.py:function``."""
        frame: Any = sys._getframe(1)
        while frame is not None:
            code = frame.f_code
            try:
                place = self._places[code]
            except KeyError:
                place = self._places[code] = _place(code)
            if place is not None:
                return place
            frame = frame.f_back
        return ""


def _place(code: CodeType) -> str | None:
    if code.co_filename.startswith(_SKIPPED) or Path(code.co_filename).name == "contextlib.py":
        return None
    return f"{Path(code.co_filename).name}:{code.co_qualname}"
