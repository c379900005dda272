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

__all__ = ["Ranks", "gather_ranks", "new_groups"]

type Ranks = tuple[int, ...]
"""Global ranks of a group, ascending."""


def gather_ranks(group: dist.ProcessGroup | None) -> Ranks:
    """Return the global ranks of a group (None: of the world), in the group's order."""
    if group is None:
        return tuple(range(dist.get_world_size()))
    return tuple(dist.get_process_group_ranks(group))


def new_groups(
    wanted: Sequence[Ranks], *, timeout_minutes: float | None = None
) -> list[dist.ProcessGroup | None]:
    """Create one new group for each set of ranks that this rank wants, and warm it up.

    Called by all ranks at the same point; they may want different sets, and different numbers of
    them. Groups of one rank are not created.

    Args:
        wanted: sets of global ranks, each holding this rank. The position of a set in the list
            names the group's purpose: the n-th sets of all ranks make up one family of groups, and
            families never share a group.
        timeout_minutes: time-out of the groups' collectives; torch's default if None.

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
                group = dist.new_group(list(ranks), timeout=timeout)
            if family < len(wanted) and ranks == tuple(wanted[family]):
                mine.append(group)
                if group is not None:
                    # Communicators are made at the first collective; make them now, all together.
                    dist.all_reduce(torch.zeros(1, device="cuda"), group=group)
    return mine


def _distinct(sets: Iterable[Ranks]) -> list[Ranks]:
    return sorted({tuple(ranks) for ranks in sets})
