"""Process groups of our own, beside Megatron's.

What an update sends across stages must not queue behind, or in front of, Megatron's collectives, so
it runs on groups that nobody else uses. Creating a group is itself a collective over all ranks:
every rank has to create every group, in one order.
"""

from collections.abc import Iterable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from megatron_async.megatron.groups import few_block_options, ordered_group

__all__ = ["Ranks", "gather_ranks", "new_groups", "shared_or_new_groups"]

type Ranks = tuple[int, ...]
"""Global ranks of a group, ascending."""


def gather_ranks(group: dist.ProcessGroup | None) -> Ranks:
    """Return the global ranks of a group (None: of the world), in the group's order."""
    if group is None:
        return tuple(range(dist.get_world_size()))
    return tuple(dist.get_process_group_ranks(group))


def new_groups(
    wanted: Sequence[Ranks],
    *,
    timeout_minutes: float | None = None,
    on_host: bool = False,
    few_blocks: bool = False,
) -> list[dist.ProcessGroup | None]:
    """Create one new group for each set of ranks that this rank wants, and warm it up.

    Called by all ranks at the same point; they may want different sets, and different numbers of
    them. Groups of one rank are not created.

    Args:
        wanted: sets of global ranks, each holding this rank. The position of a set in the list
            names the group's purpose: the n-th sets of all ranks make up one family of groups, and
            families never share a group.
        timeout_minutes: time-out of the groups' collectives; torch's default if None.
        on_host: of gloo, for tensors in host memory.
        few_blocks: of NCCL, let a kernel take few blocks of the device, since it may spin for long.

    Returns:
        The groups in the order of ``wanted``, None for sets of one rank.
    """
    everyone: list[Sequence[Ranks]] = [()] * dist.get_world_size()
    dist.all_gather_object(everyone, list(wanted))
    families = max(len(sets) for sets in everyone)
    timeout = None if timeout_minutes is None else timedelta(minutes=timeout_minutes)
    mine: list[dist.ProcessGroup | None] = []
    for family in range(families):
        for ranks in _distinct(sets[family] for sets in everyone if family < len(sets)):
            group: Any = None
            if len(ranks) > 1:
                group = dist.new_group(
                    list(ranks),
                    timeout=timeout,
                    backend="gloo" if on_host else None,
                    pg_options=few_block_options() if few_blocks else None,
                )
            if family < len(wanted) and ranks == tuple(wanted[family]):
                mine.append(group)
                if group is not None:
                    # Communicators are made at the first collective; make them now, all together.
                    device = "cpu" if on_host else "cuda"
                    dist.all_reduce(torch.zeros(1, device=device), group=group)
    return mine


def shared_or_new_groups(
    wanted: Sequence[Ranks], *, timeout_minutes: float | None = None
) -> list[dist.ProcessGroup | None]:
    """Return a group for each set of ranks: one of Megatron's if it has such a group that is used
    in program order alone, else a new one.

    A communicator of NCCL takes some hundred MB of the device. Args and order are those of
    :func:`new_groups`.
    """
    own = (dist.get_rank(),)
    shared = [ordered_group(ranks) if len(ranks) > 1 else None for ranks in wanted]
    made = new_groups(
        [own if group is not None else ranks for ranks, group in zip(wanted, shared, strict=True)],
        timeout_minutes=timeout_minutes,
    )
    return [new if group is None else group for group, new in zip(shared, made, strict=True)]


def _distinct(sets: Iterable[Ranks]) -> list[Ranks]:
    return sorted({tuple(ranks) for ranks in sets})
