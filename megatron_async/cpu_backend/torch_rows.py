"""What is replaced in torch: devices, ``torch.cuda`` and random state.

Megatron names CUDA devices and calls ``torch.cuda`` without asking. Here the "device" is the host:
allocations go to host memory, streams and events do nothing (work on the host is done when a call
returns), and CUDA's random generator is the host's.
"""

import contextlib
import functools
import os
import resource
import time
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Self

import torch
import torch.utils.data

from megatron_async.megatron.replaced import Replacement, constant

__all__ = ["FACTORIES", "TENSOR_FACTORIES", "Event", "Stream", "names_cuda", "torch_rows"]

_CPU = torch.device("cpu")
_VERSIONS = ">=2.6"
# From this compute capability on, Megatron takes bfloat16 and all of its own code to be supported.
_COMPUTE_CAPABILITY = (8, 0)

FACTORIES = [
    "arange",
    "as_tensor",
    "asarray",
    "empty",
    "empty_like",
    "empty_strided",
    "eye",
    "full",
    "full_like",
    "linspace",
    "logspace",
    "ones",
    "ones_like",
    "rand",
    "rand_like",
    "randint",
    "randn",
    "randn_like",
    "randperm",
    "scalar_tensor",
    "tensor",
    "tril_indices",
    "triu_indices",
    "zeros",
    "zeros_like",
]
"""Functions of torch that make a tensor on a device."""
TENSOR_FACTORIES = ["new_empty", "new_full", "new_ones", "new_tensor", "new_zeros"]
"""Likewise, methods of a tensor."""


# ---------------------------------------------------------------------------------------- devices


def names_cuda(device: Any) -> bool:
    """Whether ``device`` means a GPU: an index (``torch.cuda.current_device()``) does too."""
    if isinstance(device, torch.device):
        return device.type == "cuda"
    if isinstance(device, str):
        return device.startswith("cuda")
    return isinstance(device, int) and not isinstance(device, bool)


def _factory(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def factory(*args: Any, **kwargs: Any) -> Any:
        if "device" in kwargs and names_cuda(kwargs["device"]):
            kwargs["device"] = _CPU
        pinned = kwargs.pop("pin_memory", False)
        made = original(*args, **kwargs)
        return made.pin_memory() if pinned else made

    return factory


def _to(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def to(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if args and names_cuda(args[0]):
            args = (_CPU, *args[1:])
        if names_cuda(kwargs.get("device")):
            kwargs["device"] = _CPU
        return original(self, *args, **kwargs)

    return to


def _same_tensor(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def same_tensor(self: torch.Tensor, *_args: Any, **_kwargs: Any) -> torch.Tensor:
        return self

    return same_tensor


def _type(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def type_(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        if isinstance(result, str) and not result.startswith("torch.cuda."):
            return result.replace("torch.", "torch.cuda.", 1)
        return result

    return type_


# ----------------------------------------------------------------------------- streams and events


class Event:
    """Stands in for ``torch.cuda.Event``: everything before it is done when it is recorded."""

    def __init__(self, *_args: Any, **_kwargs: Any) -> None:
        self._seconds = 0.0

    def record(self, stream: Any = None) -> None:
        self._seconds = time.perf_counter()

    def wait(self, stream: Any = None) -> None: ...

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True

    def elapsed_time(self, end_event: Self) -> float:
        """Milliseconds between the two recordings, on the host's clock."""
        return (end_event._seconds - self._seconds) * 1e3


class Stream:
    """Stands in for ``torch.cuda.Stream``: the host runs all work in program order."""

    cuda_stream = 0
    stream_id = 0
    device = _CPU
    device_index = 0
    priority = 0

    def __init__(self, *_args: Any, **_kwargs: Any) -> None: ...

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exc: object) -> None: ...

    def wait_stream(self, stream: Any) -> None: ...

    def wait_event(self, event: Any) -> None: ...

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event

    @staticmethod
    def priority_range() -> tuple[int, int]:
        return (0, -1)


_STREAM = Stream()


@contextlib.contextmanager
def _no_op_context(*_args: Any, **_kwargs: Any) -> Iterator[None]:
    yield


# ----------------------------------------------------------------------------------- memory, info


def _resident_bytes(*_args: Any, **_kwargs: Any) -> int:
    """Bytes of host memory that this process holds now."""
    pages = Path("/proc/self/statm").read_text(encoding="ascii").split()[1]
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


def _peak_resident_bytes(*_args: Any, **_kwargs: Any) -> int:
    """Bytes of host memory that this process held at most since its start."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


class _MemoryStats(dict[str, int]):
    """``torch.cuda.memory_stats()``; what the host's allocator does not count is 0."""

    def __missing__(self, key: str) -> int:
        return 0


def _memory_stats(*_args: Any, **_kwargs: Any) -> _MemoryStats:
    now, peak = _resident_bytes(), _peak_resident_bytes()
    return _MemoryStats(
        {
            "allocated_bytes.all.current": now,
            "allocated_bytes.all.peak": peak,
            "reserved_bytes.all.current": now,
            "reserved_bytes.all.peak": peak,
        }
    )


def _total_bytes() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _device_properties(*_args: Any, **_kwargs: Any) -> types.SimpleNamespace:
    return types.SimpleNamespace(
        name="cpu",
        major=_COMPUTE_CAPABILITY[0],
        minor=_COMPUTE_CAPABILITY[1],
        total_memory=_total_bytes(),
        multi_processor_count=1,
    )


def _mem_get_info(*_args: Any, **_kwargs: Any) -> tuple[int, int]:
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"), _total_bytes()


# ----------------------------------------------------------------------------------- random state


class _Generators:
    """``torch.cuda.default_generators`` of the only device."""

    def __getitem__(self, index: int) -> torch.Generator:
        return torch.default_generator

    def __len__(self) -> int:
        return 1


def _get_rng_state(device: Any = None) -> torch.Tensor:
    return torch.get_rng_state()


def _set_rng_state(new_state: torch.Tensor, device: Any = None) -> None:
    torch.set_rng_state(new_state)


def _manual_seed(seed: int) -> None:
    torch.default_generator.manual_seed(int(seed))


def _call_now(callable: Callable[[], Any], **_kwargs: Any) -> None:
    callable()


def _iter_keeping_random_state(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def iterate(self: Any) -> Any:
        state = torch.get_rng_state()
        try:
            return original(self)
        finally:
            torch.set_rng_state(state)

    return iterate


def _uncompiled(original: Callable[..., Any]) -> Callable[..., Any]:
    def compile_(model: Any = None, **_kwargs: Any) -> Any:
        return (lambda function: function) if model is None else model

    return compile_


# ------------------------------------------------------------------------------------------ table


def _row(target: str, attribute: str, make: Callable[[Any], Any], why: str) -> Replacement:
    return Replacement(target=target, attribute=attribute, make=make, why=why, versions=_VERSIONS)


def _optional(target: str, attribute: str, make: Callable[[Any], Any], why: str) -> Replacement:
    return Replacement(
        target=target, attribute=attribute, make=make, why=why, versions=_VERSIONS, optional=True
    )


def torch_rows() -> list[Replacement]:
    """The rows for ``torch``, ``torch.Tensor`` and ``torch.cuda``."""
    tensor, cuda = "torch:Tensor", "torch.cuda"

    on_host = "device='cuda', a CUDA device or a device's index means host memory"
    rows = [_row("torch", name, _factory, on_host) for name in FACTORIES]
    rows += [_row(tensor, name, _factory, on_host) for name in TENSOR_FACTORIES]
    rows += [
        _row(tensor, "to", _to, on_host),
        _row(tensor, "cuda", _same_tensor, on_host),
        _row(tensor, "pin_memory", _same_tensor, "only memory that a GPU copies from is pinned"),
        _row(tensor, "record_stream", constant(None), "there are no streams"),
        _row(
            tensor,
            "type",
            _type,
            "Megatron's optimizers accept parameters of type torch.cuda.FloatTensor and the like",
        ),
        _row(
            "torch",
            "compile",
            _uncompiled,
            "compiled code asks the CUDA runtime for the device that torch.cuda is said to have; "
            "leaving it out also saves the import of torch._dynamo",
        ),
    ]

    present = "Megatron does not start without a CUDA device, and takes the first one"
    rows += [
        _row(cuda, "is_available", constant(True), present),
        _row(cuda, "device_count", constant(1), present),
        _row(cuda, "current_device", constant(0), present),
        _row(cuda, "set_device", constant(None), present),
        _row(cuda, "device", lambda _: _no_op_context, present),
        _row(cuda, "is_initialized", constant(True), present),
        _row(cuda, "init", constant(None), "there is no CUDA runtime to start"),
        _row(cuda, "_lazy_init", constant(None), "there is no CUDA runtime to start"),
        _row(cuda, "_lazy_call", lambda _: _call_now, "callbacks wait for a runtime otherwise"),
    ]

    in_order = "work on the host is done when the call returns"
    rows += [
        _row(cuda, "Stream", lambda _: Stream, in_order),
        _row(cuda, "ExternalStream", lambda _: Stream, in_order),
        _row(cuda, "Event", lambda _: Event, in_order),
        _row(cuda, "stream", lambda _: _no_op_context, in_order),
        _row(cuda, "current_stream", constant(_STREAM), in_order),
        _row(cuda, "default_stream", constant(_STREAM), in_order),
        _row(cuda, "set_stream", constant(None), in_order),
        _row(cuda, "synchronize", constant(None), in_order),
        _row(cuda, "is_current_stream_capturing", constant(False), "there are no CUDA graphs"),
        _row("torch.cuda.nvtx", "range_push", constant(0), "marks are for GPU profilers"),
        _row("torch.cuda.nvtx", "range_pop", constant(0), "marks are for GPU profilers"),
        _row("torch.cuda.nvtx", "mark", constant(None), "marks are for GPU profilers"),
    ]

    memory = "Megatron logs memory; here it is the resident memory of the process"
    rows += [
        _row(cuda, "memory_allocated", lambda _: _resident_bytes, memory),
        _row(cuda, "memory_reserved", lambda _: _resident_bytes, memory),
        _row(cuda, "max_memory_allocated", lambda _: _peak_resident_bytes, memory),
        _row(cuda, "max_memory_reserved", lambda _: _peak_resident_bytes, memory),
        _optional(cuda, "device_memory_used", lambda _: _resident_bytes, memory),
        _row(cuda, "mem_get_info", lambda _: _mem_get_info, memory),
        _row(cuda, "memory_stats", lambda _: _memory_stats, memory),
        _row(cuda, "reset_peak_memory_stats", constant(None), memory),
        _row(cuda, "empty_cache", constant(None), "there is no caching allocator"),
        _row(cuda, "get_device_properties", lambda _: _device_properties, present),
        _row(cuda, "get_device_capability", constant(_COMPUTE_CAPABILITY), present),
        _row(cuda, "get_device_name", constant("cpu"), present),
    ]

    generator = (
        "dropout draws from the host's generator, so Megatron's random-state trackers and its "
        "checkpoints must hold that one's state"
    )
    rows += [
        _row(module, name, make, generator)
        for module in (cuda, "torch.cuda.random")
        for name, make in (
            ("get_rng_state", lambda _: _get_rng_state),
            ("set_rng_state", lambda _: _set_rng_state),
            ("manual_seed", lambda _: _manual_seed),
            ("manual_seed_all", lambda _: _manual_seed),
        )
    ]
    rows += [
        _row(cuda, "default_generators", lambda _: _Generators(), generator),
        _row(
            "torch.utils.data:DataLoader",
            "__iter__",
            _iter_keeping_random_state,
            "a new iterator draws a seed from the host's generator, which dropout uses here: "
            "a resumed run would get other dropout masks",
        ),
    ]

    runtime = "it asks the CUDA runtime for a stream of the device that there is said to be"
    rows += [
        _optional("torch.optim:Optimizer", name, constant(None), runtime)
        for name in (
            "_accelerator_graph_capture_health_check",
            "_cuda_graph_capture_health_check",
        )
    ]
    rows.append(_row("torch.accelerator", "is_available", constant(False), runtime))
    return rows
