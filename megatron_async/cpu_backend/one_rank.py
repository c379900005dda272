"""Collectives in a group of one rank, which need no other rank and so no worker thread.

Gloo hands every operation to a worker thread and waits for it, whatever the size of the group. In
a group of one rank each collective leaves its tensor as it is, or copies its input to its output:
what is returned is the same, digit for digit.
"""

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from megatron_async.megatron.replaced import Replacement

__all__ = ["Done", "alone", "copy", "leave_to_gloo", "one_rank_rows"]

_WHY = "gloo's worker thread takes longer than all else in a collective of one rank"


_left_to_gloo = False


def leave_to_gloo() -> None:
    """Let gloo run these collectives, too, from now on: to record them where it gets them."""
    global _left_to_gloo
    _left_to_gloo = True


class Done:
    """A collective that has ended, as ``async_op=True`` returns it."""

    def wait(self, *_args: Any) -> bool:
        return True

    def is_completed(self) -> bool:
        return True

    def is_success(self) -> bool:
        return True


def alone(group: Any) -> bool:
    """Whether ``group`` is of this rank alone, and its operations are not being coalesced."""
    group = group if group is not None else dist.group.WORLD
    if _left_to_gloo or group is None or group is dist.GroupMember.NON_GROUP_MEMBER:
        return False
    return group.size() == 1 and group not in dist.distributed_c10d._world.pg_coalesce_state


def copy(output: torch.Tensor, input: torch.Tensor) -> None:
    """Copy what a rank sends to what it receives, unless they are in one place."""
    if output.data_ptr() != input.data_ptr():
        output.copy_(input.reshape(output.shape))


def _at_once(copies: tuple[str, str] | None) -> Callable[[Any], Any]:
    """Make a collective answer at once in a group of one rank.

    Args:
        copies: the arguments that are its output and its input; None if it works in place.
    """

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        parameters = list(inspect.signature(original).parameters)
        of_group, of_async = parameters.index("group"), parameters.index("async_op")

        @functools.wraps(original)
        def collective(*args: Any, **kwargs: Any) -> Any:
            group = args[of_group] if len(args) > of_group else kwargs.get("group")
            if not alone(group):
                return original(*args, **kwargs)
            if copies is not None:
                given = {**dict(zip(parameters, args, strict=False)), **kwargs}
                with torch.no_grad():
                    copy(given[copies[0]], given[copies[1]])
            asynchronous = args[of_async] if len(args) > of_async else kwargs.get("async_op")
            return Done() if asynchronous else None

        return collective

    return make


def _coalescing_manager(original: Callable[..., Any]) -> Callable[..., Any]:
    @contextlib.contextmanager
    def coalescing_manager(
        group: Any = None, device: Any = None, async_ops: bool = False
    ) -> Iterator[Any]:
        if alone(group):
            # What is called in it ends at once.
            yield dist.distributed_c10d._CoalescingManager()
            return
        with original(group=group, device=device, async_ops=async_ops) as manager:
            yield manager

    return coalescing_manager


def one_rank_rows() -> list[Replacement]:
    """The rows for ``torch.distributed``; ``all_gather`` is in :mod:`.distributed_rows`."""
    collectives: dict[str, tuple[str, str] | None] = {
        "all_reduce": None,
        "reduce": None,
        "broadcast": None,
        "barrier": None,
        "all_gather_into_tensor": ("output_tensor", "input_tensor"),
        "reduce_scatter_tensor": ("output", "input"),
    }
    rows = {name: _at_once(copies) for name, copies in collectives.items()}
    return [
        Replacement(
            target="torch.distributed", attribute=name, make=make, why=_WHY, versions=">=2.6"
        )
        for name, make in {**rows, "_coalescing_manager": _coalescing_manager}.items()
    ]
