"""The timeline of a run that was recorded with ``--log-enqueues``, as a device would go through it.

What is done in which order, and what waits for what, is the run's own; how long the computations
take is given, see :mod:`megatron_async.replay`.
"""

from collections.abc import Iterator
from itertools import pairwise

from megatron_async.planning.perfetto import Slice
from megatron_async.replay.commands import Kind as CommandKind
from megatron_async.replay.costs import compute_stream
from megatron_async.replay.device import Device
from megatron_async.replay.rank import Rank
from megatron_async.replay.trace import Begin
from megatron_async.schedules.actions import COMPUTE, UPDATES

__all__ = ["replayed_slices"]

_SHOWN = {kind.value: kind for kind in COMPUTE | UPDATES}


def replayed_slices(device: Device) -> Iterator[Slice]:
    """What the computing stream of each stage's first rank does, and the gaps between.

    Args:
        device: behind its run.
    """
    first: dict[int, Rank] = {}
    for rank in device.ranks:
        first.setdefault(rank.trace.stage, rank)
    for stage, rank in sorted(first.items()):
        done = list(_worked(stage, rank))
        yield from done
        for before, after in pairwise(done):
            if after.started > before.stopped:
                yield Slice(
                    stage=stage,
                    kind=after.kind,
                    started=before.stopped,
                    stopped=after.started,
                    waits=True,
                    batch=after.batch,
                    microbatch=after.microbatch,
                )


def _worked(stage: int, rank: Rank) -> Iterator[Slice]:
    stream = str(compute_stream(rank.trace))
    spans: dict[int, tuple[Begin, float, float]] = {}
    for command in rank.commands:
        action = command.action
        if action is None or action.action not in _SHOWN:
            continue
        if command.stream != stream or command.kind is not CommandKind.KERNEL:
            continue
        assert command.start is not None
        assert command.end is not None
        _, began, _ = spans.get(id(action), (action, command.start, command.end))
        spans[id(action)] = (action, began, command.end)
    for action, began, ended in spans.values():
        if ended > began:
            yield Slice(
                stage=stage,
                kind=_SHOWN[action.action],
                started=began,
                stopped=ended,
                waits=False,
                batch=action.batch,
                microbatch=action.microbatch,
                version=action.version,
            )
