"""The kernels: every operator that PyTorch dispatches, with the bytes that it reads and writes.

As torch.cuda._sanitizer has it, what an operator reads and writes is read off its schema: views and
allocations are no kernels, arguments marked as mutable are written, all other tensors read.
"""

import functools
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_async.cpu_backend.torch_rows import FACTORIES, TENSOR_FACTORIES, names_cuda
from megatron_async.megatron.replaced import Replacement
from megatron_async.replay.memory import address
from megatron_async.replay.recorder import Recorder
from megatron_async.replay.trace import HostAccess, Kernel, Range, Synchronize

__all__ = ["KernelMode", "kernel_rows"]

_VERSIONS = ">=2.6"

_FROM_METADATA = re.compile(r"aten::(new_.*|.*_like)$")
"""Their tensor argument gives a shape alone (torch.cuda._sanitizer.FACTORY_FUNCTION_REGEX)."""
_ALLOCATIONS = re.compile(r"aten::(empty|new_empty)(_like|_strided|_permuted)?$")
_SYNCHRONISING = frozenset(
    {
        "aten::_local_scalar_dense",
        "aten::bincount",
        "aten::equal",
        "aten::masked_select",
        "aten::nonzero",
        "aten::_unique2",
        "aten::unique_consecutive",
        "aten::unique_dim",
    }
)
"""What they return depends on numbers on the device, for which the host waits."""
_COPIES_OF_DATA = ("tensor", "as_tensor", "asarray", "scalar_tensor", "new_tensor")
"""Factories that copy numbers of the host to the device, and wait for it."""
_IGNORED = ("c10d", "profiler")


@dataclass(frozen=True, slots=True)
class _Schema:
    """What of an operator's schema is needed."""

    name: str
    arguments: tuple[tuple[str, bool, bool], ...]
    """(name, whether it is written, whether its metadata alone is read)."""
    allocates: bool
    """Whether nothing is written to what it makes."""
    ignored: bool


@functools.cache
def _schema(function: Any) -> _Schema:
    name, _, overload = function.name().partition(".")
    schema = torch._C._get_schema(name, overload)
    shape_only = bool(_FROM_METADATA.match(schema.name))
    return _Schema(
        name=schema.name,
        arguments=tuple(
            (
                argument.name,
                argument.alias_info is not None and argument.alias_info.is_write,
                shape_only
                or (argument.alias_info is not None and not argument.alias_info.is_write),
            )
            for argument in schema.arguments
        ),
        allocates=bool(_ALLOCATIONS.match(schema.name)),
        ignored=schema.name.partition("::")[0] in _IGNORED,
    )


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _tensors(each)


class KernelMode(TorchDispatchMode):
    """Sees every operator, in the backward pass, too, which on CPU ranks runs in the thread that
    asks for it."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._recorder = recorder

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        schema = _schema(func)
        recorder = self._recorder
        if schema.ignored or not recorder.active:
            return func(*args, **kwargs)
        read: list[torch.Tensor] = []
        written: list[torch.Tensor] = []
        given: list[torch.Tensor] = []
        for position, (name, writes, metadata) in enumerate(schema.arguments):
            value = args[position] if position < len(args) else kwargs.get(name)
            for tensor in _tensors(value):
                given.append(tensor)
                if writes:
                    written.append(tensor)
                elif not metadata:
                    read.append(tensor)
        on_device = recorder.memory.on_device
        if any(map(on_device, given)) or (not given and recorder.making_on_device):
            return self._on_device(func, schema, args, kwargs, given, read, written)
        if recorder.making_on_device and not read and not written:
            return self._on_device(func, schema, args, kwargs, given, read, written)
        if given:
            self._on_host(schema, read, written)
        return func(*args, **kwargs)

    def _on_device(
        self,
        func: Any,
        schema: _Schema,
        args: Any,
        kwargs: Any,
        given: list[torch.Tensor],
        read: list[torch.Tensor],
        written: list[torch.Tensor],
    ) -> Any:
        recorder = self._recorder
        if schema.name == "aten::copy_" and not all(map(recorder.memory.on_device, given)):
            result = func(*args, **kwargs)
            non_blocking = args[2] if len(args) > 2 else kwargs.get("non_blocking", False)
            copy(recorder, target=args[0], source=args[1], non_blocking=non_blocking)
            return result
        storages = {address(tensor) for tensor in given}
        # What the arguments cover, before resize_ and the like change it.
        reads = ranges(recorder, read)
        writes = ranges(recorder, written)
        result = func(*args, **kwargs)
        made = [
            tensor
            for tensor in _tensors(result)
            if tensor.device.type == "cpu"  # not on the meta device
            and address(tensor) not in storages
        ]
        for tensor in made:
            recorder.place_on_device(tensor)
        if schema.allocates or not (made or writes or schema.name in _SYNCHRONISING):
            return result  # a view, an allocation, or metadata
        recorder.add(
            Kernel(
                name=schema.name.removeprefix("aten::"),
                stream=recorder.stream,
                reads=reads,
                writes=_joined(writes, ranges(recorder, made)),
                where=recorder.where(),
            )
        )
        if schema.name in _SYNCHRONISING or self._indexes_by_mask(schema, args):
            name = schema.name.removeprefix("aten::")
            why = "item" if name == "_local_scalar_dense" else name
            recorder.add(Synchronize(why=why, stream=recorder.stream, where=recorder.where()))
        return result

    def _indexes_by_mask(self, schema: _Schema, args: Any) -> bool:
        """Whether an index is a mask, whose true elements are counted on the host."""
        if schema.name not in ("aten::index", "aten::index_put_"):
            return False
        if schema.name == "aten::index_put_":
            value = args[2]
            if value.numel() == 1 and not self._recorder.memory.on_device(value):
                return False  # becomes masked_fill (canDispatchToMaskedFill)
        return any(tensor.dtype in (torch.bool, torch.uint8) for tensor in _tensors(list(args[1])))

    def _on_host(
        self, schema: _Schema, read: list[torch.Tensor], written: list[torch.Tensor]
    ) -> None:
        """Memory of the host counts where copies from or to the device use it."""
        recorder = self._recorder

        def copied(tensor: torch.Tensor) -> bool:
            storage = recorder.memory.find(tensor)
            return storage is not None and storage.copied

        reads = ranges(recorder, [tensor for tensor in read if copied(tensor)], device=False)
        writes = ranges(recorder, [tensor for tensor in written if copied(tensor)], device=False)
        if reads or writes:
            name = schema.name.removeprefix("aten::")
            recorder.add(HostAccess(name=name, reads=reads, writes=writes, where=recorder.where()))


def ranges(
    recorder: Recorder, tensors: list[torch.Tensor], *, device: bool = True
) -> tuple[Range, ...]:
    """Return the bytes that tensors cover, of those on the device (or on the host)."""
    found: dict[Range, None] = {}
    for tensor in tensors:
        if recorder.memory.on_device(tensor) == device:
            bytes_ = recorder.memory.range(tensor)
            if bytes_ is not None:
                found[bytes_] = None
    return tuple(found)


def _joined(a: tuple[Range, ...], b: tuple[Range, ...]) -> tuple[Range, ...]:
    return (*a, *(each for each in b if each not in a))


def copy(
    recorder: Recorder, *, target: torch.Tensor, source: torch.Tensor, non_blocking: bool
) -> None:
    """Record a copy between host and device that has been made.

    The host waits for it, unless it was asked not to and its memory is pinned.
    """
    to_device = recorder.memory.on_device(target)
    on_host = source if to_device else target
    record = recorder.memory.register(on_host)
    record.copied = True
    recorder.add(
        Kernel(
            name="copy to device" if to_device else "copy to host",
            stream=recorder.stream,
            reads=tuple(filter(None, [recorder.memory.range(source)])),
            writes=tuple(filter(None, [recorder.memory.range(target)])),
            where=recorder.where(),
        )
    )
    if not (non_blocking and record.pinned):
        why = "copy to device" if to_device else "copy to host"
        recorder.add(Synchronize(why=why, stream=recorder.stream, where=recorder.where()))


def _moved(recorder: Recorder, source: torch.Tensor, result: Any, non_blocking: bool) -> Any:
    """Record that ``source`` was copied to the device, or back, as ``result``, and return that in
    memory of its own."""
    to_device = not recorder.memory.on_device(source)
    with recorder.suppressed():
        if address(result) == address(source):
            result = result.clone()
    if to_device:
        recorder.place_on_device(result)
    elif non_blocking:
        # What PyTorch copies to without the host's waiting is pinned
        # (at::native::_to_copy, "pin_out").
        recorder.memory.register(result).pinned = True
    copy(recorder, target=result, source=source, non_blocking=non_blocking)
    return result


# ------------------------------------------------------------------------------------------- rows


def kernel_rows(recorder: Recorder) -> list[Replacement]:
    """The rows for what makes and moves tensors."""

    def row(target: str, attribute: str, make: Callable[[Any], Any]) -> Replacement:
        return Replacement(
            target=target,
            attribute=attribute,
            make=make,
            why="which tensors are on the device",
            versions=_VERSIONS,
        )

    def factory(name: str) -> Callable[[Any], Any]:
        return lambda original: _factory(recorder, name, original)

    def method(make: Callable[[Recorder, Any], Any]) -> Callable[[Any], Any]:
        return lambda original: make(recorder, original)

    return [
        *(row("torch", name, factory(name)) for name in FACTORIES),
        *(row("torch:Tensor", name, factory(name)) for name in TENSOR_FACTORIES),
        row("torch:Tensor", "to", method(_to)),
        row("torch:Tensor", "cuda", method(_cuda)),
        row("torch:Tensor", "cpu", method(_cpu)),
        row("torch:Tensor", "tolist", method(_tolist)),
        row("torch:Tensor", "pin_memory", method(_pin_memory)),
        row("torch.utils.data.dataloader:_BaseDataLoaderIter", "__init__", method(_loader)),
        row("torch.utils.data.dataloader:_BaseDataLoaderIter", "__next__", method(_next_batch)),
    ]


def _factory(recorder: Recorder, name: str, original: Any) -> Any:
    @functools.wraps(original)
    def factory(*args: Any, **kwargs: Any) -> Any:
        if not names_cuda(kwargs.get("device")):
            return original(*args, **kwargs)
        if name not in _COPIES_OF_DATA:
            with recorder.on_device():
                return original(*args, **kwargs)
        with recorder.suppressed():
            result = original(*args, **kwargs)
            if recorder.memory.on_device(result):
                return result  # as_tensor of one that is there already
            source = result.clone()
            if any(isinstance(each, torch.Tensor) for each in args):
                result = result.clone()
        recorder.place_on_device(result)
        copy(recorder, target=result, source=source, non_blocking=False)
        return result

    return factory


def _to(recorder: Recorder, original: Any) -> Any:
    @functools.wraps(original)
    def to(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if not recorder.active or self.device.type != "cpu":
            return original(self, *args, **kwargs)
        wanted = kwargs.get("device", args[0] if args else None)
        if isinstance(wanted, torch.Tensor):
            to_device: bool | None = recorder.memory.on_device(wanted)
        elif names_cuda(wanted):
            to_device = True
        elif isinstance(wanted, torch.device | str):
            to_device = None if torch.device(wanted).type == "meta" else False
        else:
            to_device = None  # another dtype
        if to_device is None or to_device == recorder.memory.on_device(self):
            return original(self, *args, **kwargs)
        with recorder.suppressed():
            result = original(self, *args, **kwargs)
        return _moved(recorder, self, result, kwargs.get("non_blocking", False))

    return to


def _cuda(recorder: Recorder, original: Any) -> Any:
    @functools.wraps(original)
    def cuda(
        self: torch.Tensor, device: Any = None, non_blocking: bool = False, **kwargs: Any
    ) -> Any:
        if not recorder.active or recorder.memory.on_device(self):
            return self
        return _moved(recorder, self, self, non_blocking)

    return cuda


def _cpu(recorder: Recorder, original: Any) -> Any:
    @functools.wraps(original)
    def cpu(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if not recorder.active or not recorder.memory.on_device(self):
            return original(self, *args, **kwargs)
        return _moved(recorder, self, self, non_blocking=False)

    return cpu


def _tolist(recorder: Recorder, original: Any) -> Any:
    @functools.wraps(original)
    def tolist(self: torch.Tensor) -> Any:
        return original(self.cpu())

    return tolist


def _pin_memory(recorder: Recorder, original: Any) -> Any:
    @functools.wraps(original)
    def pin_memory(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        recorder.memory.register(result).pinned = True
        return result

    return pin_memory


def _loader(recorder: Recorder, original: Any) -> Any:
    @functools.wraps(original)
    def init(self: Any, loader: Any) -> None:
        original(self, loader)
        # On CPU ranks PyTorch's iterator finds nothing to pin memory for.
        self._megatron_async_pins = loader.pin_memory

    return init


def _next_batch(recorder: Recorder, original: Any) -> Any:
    @functools.wraps(original)
    def next_batch(self: Any) -> Any:
        batch = original(self)
        if self._megatron_async_pins:
            for tensor in pytree.tree_leaves(batch):
                if isinstance(tensor, torch.Tensor):
                    tensor.pin_memory()
        return batch

    return next_batch
