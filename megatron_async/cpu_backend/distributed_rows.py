"""What is replaced in ``torch.distributed``: gloo takes the place of NCCL.

Under gloo, all of all_reduce (with AVG too), reduce, broadcast, reduce_scatter_tensor,
all_gather_into_tensor, their coalesced forms and ``async_op=True`` work as they are.
"""

import functools
import os
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from megatron_async.cpu_backend import one_rank
from megatron_async.cpu_backend.gloo_workers import drain, drain_at_exit
from megatron_async.megatron.replaced import Replacement

__all__ = ["distributed_rows"]

_VERSIONS = ">=2.6"


def _init_process_group(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def init_process_group(backend: str | None = None, *args: Any, **kwargs: Any) -> Any:
        kwargs.pop("device_id", None)
        kwargs.pop("pg_options", None)
        result = original(backend if backend == "fake" else "gloo", *args, **kwargs)
        drain_at_exit()
        return result

    return init_process_group


def _destroy_process_group(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def destroy_process_group(group: Any = None) -> None:
        drain()
        original(group)

    return destroy_process_group


def _new_group(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def new_group(
        ranks: Any = None,
        timeout: Any = None,
        backend: str | None = None,
        pg_options: Any = None,
        use_local_synchronization: bool = False,
        group_desc: str | None = None,
        **_kwargs: Any,
    ) -> Any:
        return original(
            ranks,
            timeout=timeout,
            backend=None if backend in (None, "nccl", "ucc") else backend,
            use_local_synchronization=use_local_synchronization,
            group_desc=group_desc,
        )

    return new_group


def _process_group_gloo(original: Any) -> Any:
    class OneWorker(type):
        """Makes the original's instances, each with one worker thread in place of two."""

        def __call__(cls, store: Any, rank: int, size: int, **settings: Any) -> Any:
            options = original._Options()
            names = [name for name in os.environ.get("GLOO_SOCKET_IFNAME", "").split(",") if name]
            options._devices = [original.create_device(interface=name) for name in names] or [
                original.create_default_device()
            ]
            options._threads = 1
            if "timeout" in settings:
                options._timeout = settings.pop("timeout")
            for name, value in settings.items():
                setattr(options, name, value)
            return original(store, rank, size, options)

        def __instancecheck__(cls, instance: Any) -> bool:
            return isinstance(instance, original)

        def __getattr__(cls, name: str) -> Any:
            return getattr(original, name)

    class ProcessGroupGloo(metaclass=OneWorker):
        pass

    return ProcessGroupGloo


class _Works:
    """Several pending operations, awaited as one."""

    def __init__(self, works: Sequence[Any]) -> None:
        self._works = works

    def wait(self, *args: Any) -> bool:
        return all(work.wait(*args) for work in self._works)

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self._works)


def _all_gather(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def all_gather(
        tensor_list: list[torch.Tensor],
        tensor: torch.Tensor,
        group: Any = None,
        async_op: bool = False,
    ) -> Any:
        if one_rank.alone(group):
            with torch.no_grad():
                one_rank.copy(tensor_list[0], tensor)
            return one_rank.Done() if async_op else None
        if len({output.numel() for output in tensor_list}) == 1:
            return original(tensor_list, tensor, group=group, async_op=async_op)
        group = group or dist.group.WORLD
        own = tensor_list[dist.get_rank(group)]
        if own.data_ptr() != tensor.data_ptr():
            own.copy_(tensor)
        works = _Works(
            [
                dist.broadcast(
                    output, src=dist.get_global_rank(group, rank), group=group, async_op=True
                )
                for rank, output in enumerate(tensor_list)
                if output.numel()
            ]
        )
        if async_op:
            return works
        works.wait()
        return None

    return all_gather


def _as_list(sizes: Any) -> Any:
    return sizes.tolist() if isinstance(sizes, torch.Tensor) else sizes


def _all_to_all_single(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def all_to_all_single(
        output: torch.Tensor,
        input: torch.Tensor,
        output_split_sizes: Any = None,
        input_split_sizes: Any = None,
        group: Any = None,
        async_op: bool = False,
    ) -> Any:
        return original(
            output,
            input,
            _as_list(output_split_sizes),
            _as_list(input_split_sizes),
            group=group,
            async_op=async_op,
        )

    return all_to_all_single


def distributed_rows() -> list[Replacement]:
    """The rows for ``torch.distributed``."""

    def row(attribute: str, make: Callable[[Any], Any], why: str) -> Replacement:
        return Replacement(
            target="torch.distributed", attribute=attribute, make=make, why=why, versions=_VERSIONS
        )

    no_nccl = "NCCL needs GPUs; its options and a device mean nothing to gloo"
    return [
        row(
            "init_process_group",
            _init_process_group,
            f"{no_nccl}. At its end the process waits for gloo's workers (gloo_workers.py)",
        ),
        row("new_group", _new_group, no_nccl),
        row(
            "destroy_process_group",
            _destroy_process_group,
            "leaves gloo's workers running, out of reach of what awaits them at the end "
            "(gloo_workers.py)",
        ),
        Replacement(
            target="torch.distributed.distributed_c10d",
            attribute="ProcessGroupGloo",
            make=_process_group_gloo,
            why="a group's two workers write the name of what they finished to one std::string "
            "without a lock: coalesced gathers in flight, as --overlap-param-gather has them, "
            "corrupt the heap (ProcessGroupGloo::runLoop, torch 2.14)",
            versions=_VERSIONS,
        ),
        row(
            "all_gather",
            _all_gather,
            "gloo refuses tensors of unequal sizes, which NCCL gathers by broadcasts "
            "(Megatron's layer-wise optimizer: core/optimizer/layer_wise_optimizer.py). In a group "
            "of one rank it copies, see one_rank.py",
        ),
        row(
            "all_to_all_single",
            _all_to_all_single,
            "Megatron leaves split sizes on the host as tensors, which are lists once they come "
            "from a GPU (core/transformer/moe/token_dispatcher.py)",
        ),
    ]
