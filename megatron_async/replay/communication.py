"""Collectives, sends and receives, and the waits for them.

What is replaced are the methods of torch's process groups and works themselves, so that it does not
matter through which function, or which name bound early, a call is made.
"""

import contextlib
import functools
import itertools
import re
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from megatron_async.megatron.replaced import Replacement
from megatron_async.replay.kernels import ranges
from megatron_async.replay.recorder import Recorder
from megatron_async.replay.trace import Communication, Operation, Synchronize, Wait

__all__ = ["communication_rows"]

_VERSIONS = ">=2.6"
_KINDS = (
    "reduce_scatter",
    "all_gather",
    "all_reduce",
    "all_to_all",
    "broadcast",
    "barrier",
    "gather",
    "scatter",
    "reduce",
    "send",
    "recv",
)
"""In this order: the first whose name, without underscores, is in a method's name."""
_COMMUNICATION = re.compile(r"gather|scatter|reduce|all_?to_?all|barrier|broadcast|send|recv")


def _kind(method: str) -> str | None:
    if not _COMMUNICATION.search(method) or method.startswith("__"):
        return None
    plain = method.replace("_", "")
    return next((kind for kind in _KINDS if kind.replace("_", "") in plain), None)


@dataclass
class _Batch:
    """Calls that are launched together."""

    batched: bool = True
    asynchronous: bool = True
    operations: list[Operation] = field(default_factory=list)
    kept: list[torch.Tensor] = field(default_factory=list)
    works: list[Any] = field(default_factory=list)
    group: Any = None


class _OfThread(threading.local):
    """What each thread has of its own."""

    batch: _Batch | None = None
    inside = False
    """Whether a call that is recorded is being made."""


class _Communications:
    """The communication of this process that was not waited for yet."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._numbers = itertools.count()
        self._works: dict[int, tuple[weakref.ref[Any], int, list[torch.Tensor]]] = {}
        """By identity: the work, its number, and the tensors that the process group keeps until it
        is waited for."""
        self._mine = _OfThread()
        self._on_host: weakref.WeakKeyDictionary[Any, bool] = weakref.WeakKeyDictionary()
        self._device_ids = False

    # Process groups

    def made(self, group: Any, backend: Any) -> None:
        """A group was made with the backend that was asked for (None: the default)."""
        if isinstance(group, dist.ProcessGroup):
            self._on_host[group] = backend == "gloo"

    @property
    def eager(self) -> bool:
        """Whether communicators are made when groups are, so that none is made for two ranks."""
        return self._device_ids

    def initialised(self, device_id: Any) -> None:
        """The default group was made."""
        self._device_ids = device_id is not None

    # Calls

    def call(
        self, method: str, kind: str, original: Any, group: Any, args: Any, kwargs: Any
    ) -> Any:
        """Make a call of a process group, and record it."""
        recorder = self._recorder
        recorder.warn_of_other_thread()
        if self._mine.inside or not recorder.active:
            return original(group, *args, **kwargs)
        values = [*args, *kwargs.values()]
        self._mine.inside = True
        try:
            with recorder.suppressed():
                work = original(group, *args, **kwargs)
        finally:
            self._mine.inside = False
        if not self._on_host.get(group, False):
            for tensor in _leaves(values):
                recorder.place_on_device(tensor)
        batch = self._mine.batch
        if batch is None:
            batch = _Batch(
                batched=kind not in ("send", "recv") or self.eager,
                asynchronous=_option(values, "asyncOp", True),
            )
        on_host = self._on_host.get(group, False)
        batch.operations += _operations(recorder, kind, group, values, device=not on_host)
        batch.kept += _leaves(values)
        batch.works.append(work)
        batch.group = group
        if batch is not self._mine.batch:
            self._launch(batch)
        return work

    def _launch(self, batch: _Batch) -> None:
        if not batch.operations:
            return
        number = next(self._numbers)
        on_host = self._on_host.get(batch.group, False)
        description = getattr(batch.group, "group_desc", "")
        self._recorder.add(
            Communication(
                operations=tuple(batch.operations),
                group=batch.group.group_name,
                ranks=tuple(dist.get_process_group_ranks(batch.group)),
                label="" if description == "undefined" else description,
                stream=self._recorder.stream,
                work=number,
                asynchronous=batch.asynchronous or on_host,
                batched=batch.batched,
                on_host=on_host,
                where=self._recorder.where(),
            )
        )
        if batch.operations[0].name == "barrier" and not batch.asynchronous and not on_host:
            self._block("barrier")
        kept = batch.kept if batch.asynchronous else []
        for work in filter(None, batch.works):
            key = id(work)
            self._works[key] = (weakref.ref(work), number, kept)
            weakref.finalize(work, self._works.pop, key, None).atexit = False

    @contextlib.contextmanager
    def together(self, *, asynchronous: bool = True) -> Iterator[_Batch]:
        """Launch the calls inside as one."""
        batch = _Batch(asynchronous=asynchronous)
        if self._mine.batch is not None or self._mine.inside or not self._recorder.active:
            yield batch
            return
        self._mine.batch = batch
        try:
            yield batch
        finally:
            self._mine.batch = None
        self._launch(batch)

    # Works

    def wait(self, original: Any, work: Any, args: Any, kwargs: Any) -> Any:
        """Make a wait, and record it."""
        recorder = self._recorder
        if self._mine.inside or not recorder.active:
            return original(work, *args, **kwargs)
        with recorder.suppressed():
            result = original(work, *args, **kwargs)
        found = self._works.get(id(work))
        if found is not None and found[0]() is work:
            recorder.add(Wait(work=found[1], stream=recorder.stream, where=recorder.where()))
            found[2].clear()
        return result

    def _block(self, why: str) -> None:
        recorder = self._recorder
        recorder.add(Synchronize(why=why, stream=recorder.stream, where=recorder.where()))


def _leaves(values: Any) -> list[torch.Tensor]:
    if isinstance(values, torch.Tensor):
        return [values]
    if isinstance(values, list | tuple):
        return [tensor for value in values for tensor in _leaves(value)]
    return []


def _option(values: Sequence[Any], name: str, default: Any) -> Any:
    for value in values:
        if hasattr(value, name) and not isinstance(value, torch.Tensor):
            return getattr(value, name)
    return default


def _operations(
    recorder: Recorder, kind: str, group: Any, values: list[Any], *, device: bool
) -> list[Operation]:
    """Return what a call does. Tensors come first, outputs before inputs."""

    def bytes_of(tensors: list[torch.Tensor]) -> Any:
        if not device:
            for tensor in tensors:
                recorder.memory.register(tensor).copied = True
        return ranges(recorder, tensors, device=device)

    lists = [_leaves(value) for value in values if isinstance(value, list | tuple | torch.Tensor)]
    first = lists[0] if lists else []
    second = lists[1] if len(lists) > 1 else []
    peer = -1
    reads, writes = second, first
    if kind in ("broadcast", "reduce", "gather", "scatter"):
        root = int(_option(values, "rootRank", 0))
        peer = dist.get_global_rank(group, root)
        is_root = peer == recorder.rank
        if kind == "broadcast":
            reads, writes = (first, []) if is_root else ([], first)
        elif kind == "reduce":
            reads, writes = first, first if is_root else []
    elif kind in ("send", "recv"):
        other = next((value for value in values if isinstance(value, int)), 0)
        peer = dist.get_global_rank(group, other)
        reads, writes = (first, []) if kind == "send" else ([], first)
    elif kind == "all_reduce":
        reads = first
    return [Operation(name=kind, peer=peer, reads=bytes_of(reads), writes=bytes_of(writes))]


# ------------------------------------------------------------------------------------------- rows


def communication_rows(recorder: Recorder) -> list[Replacement]:
    """The rows for ``torch.distributed``, its process groups and works."""
    communications = _Communications(recorder)

    def row(target: str, attribute: str, make: Callable[[Any], Any]) -> Replacement:
        return Replacement(
            target=target, attribute=attribute, make=make, why="recorded", versions=_VERSIONS
        )

    def method(name: str, kind: str) -> Callable[[Any], Any]:
        def make(original: Any) -> Any:
            def call(self: Any, *args: Any, **kwargs: Any) -> Any:
                return communications.call(name, kind, original, self, args, kwargs)

            return call

        return make

    def wait(original: Any) -> Any:
        def wait_(self: Any, *args: Any, **kwargs: Any) -> Any:
            return communications.wait(original, self, args, kwargs)

        return wait_

    def new_group(original: Any) -> Any:
        @functools.wraps(original)
        def new(*args: Any, **kwargs: Any) -> Any:
            with recorder.suppressed():
                group = original(*args, **kwargs)
            communications.made(group, args[2] if len(args) > 2 else kwargs.get("backend"))
            return group

        return new

    def init_process_group(original: Any) -> Any:
        @functools.wraps(original)
        def init(*args: Any, **kwargs: Any) -> Any:
            communications.initialised(kwargs.get("device_id"))
            with recorder.suppressed():
                return original(*args, **kwargs)

        return init

    def batch(original: Any) -> Any:
        @functools.wraps(original)
        def batch_isend_irecv(p2p_op_list: Any) -> Any:
            with communications.together():
                return original(p2p_op_list)

        return batch_isend_irecv

    def all_gather(original: Any) -> Any:
        @functools.wraps(original)
        def gather(tensor_list: Any, tensor: Any, group: Any = None, async_op: bool = False) -> Any:
            if len({output.numel() for output in tensor_list}) == 1:
                return original(tensor_list, tensor, group=group, async_op=async_op)
            # The CPU backend makes it of broadcasts; NCCL launches those together, too.
            with communications.together(asynchronous=async_op) as calls:
                works = original(tensor_list, tensor, group=group, async_op=True)
                outputs = ranges(recorder, list(tensor_list))
                calls.operations[:] = [
                    Operation(name="all_gather", reads=ranges(recorder, [tensor]), writes=outputs)
                ]
            if async_op:
                return works
            works.wait()
            return None

        return gather

    methods = [(name, _kind(name)) for name in dir(dist.ProcessGroup)]
    return [
        *(
            row("torch.distributed:ProcessGroup", name, method(name, kind))
            for name, kind in methods
            if kind is not None
        ),
        row("torch.distributed:Work", "wait", wait),
        row("torch.distributed:Work", "synchronize", wait),
        row("torch.distributed", "new_group", new_group),
        row("torch.distributed", "init_process_group", init_process_group),
        row("torch.distributed", "batch_isend_irecv", batch),
        row("torch.distributed", "all_gather", all_gather),
    ]
