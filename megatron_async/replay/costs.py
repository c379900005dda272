"""What the kernels of a trace take, from what actions are said to take."""

from megatron_async.replay.trace import Begin, Communication, End, Iteration, Kernel, Trace
from megatron_async.schedules.actions import Kind
from megatron_async.schedules.simulator import Costs

__all__ = ["OPTIMIZER", "Durations", "compute_stream"]

OPTIMIZER = (Kind.COMPLETE_UPDATE.value, Kind.UPDATE.value)
_REPLICAS = ("DATA_PARALLEL", "DISTRIBUTED_OPTIMIZER_INSTANCE")
"""In what Megatron calls groups among which gradients are reduced (parallel_state.py)."""


def compute_stream(trace: Trace) -> int:
    """Return the stream that forwards and backwards run on: that of the first one's kernels."""
    computing = False
    for item in trace.items:
        if isinstance(item, Begin):
            computing = item.action in (Kind.FORWARD.value, Kind.BACKWARD.value)
        elif isinstance(item, End):
            computing = False
        elif computing and isinstance(item, Kernel):
            return item.stream
    return 0


class Durations:
    """Of each item of one rank's trace.

    The time of a forward, a backward and an optimizer step is spread evenly over its kernels on the
    computing stream; other kernels take no time. The time of a batch's reduction is spread over
    its collectives by their bytes, and so is that of a version's gather.

    Args:
        trace: the rank's.
        costs: per microbatch, step, batch and version; of the trace's stage.
    """

    def __init__(self, trace: Trace, costs: Costs) -> None:
        forward, backward, optimizer = costs.per_stage(trace.stages)[trace.stage]
        times = {
            Kind.FORWARD.value: forward,
            Kind.BACKWARD.value: backward,
            **dict.fromkeys(OPTIMIZER, optimizer),
        }
        self._of = [0.0] * len(trace.items)
        stream = compute_stream(trace)
        kernels: list[int] = []
        time = 0.0
        for position, item in enumerate(trace.items):
            match item:
                case Begin():
                    kernels, time = [], times.get(item.action, 0.0)
                case Kernel() if item.stream == stream:
                    kernels.append(position)
                case End():
                    for each in kernels:
                        self._of[each] = time / len(kernels)
                    kernels, time = [], 0.0
        iterations = sum(isinstance(item, Iteration) for item in trace.items)
        for kinds, total in (
            (("reduce_scatter", "all_reduce"), costs.reduction),
            (("all_gather",), costs.gather),
        ):
            self._spread(trace, kinds, total * iterations)

    def _spread(self, trace: Trace, kinds: tuple[str, ...], total: float) -> None:
        found: dict[int, int] = {}
        for position, item in enumerate(trace.items):
            if (
                isinstance(item, Communication)
                and item.operations[0].name in kinds
                and len(item.ranks) > 1
                and not item.on_host
                and any(part in item.label for part in _REPLICAS)
            ):
                found[position] = sum(
                    end - begin
                    for operation in item.operations
                    for _, begin, end in (operation.writes or operation.reads)
                )
        bytes_ = sum(found.values())
        for position, size in found.items():
            self._of[position] = total * size / bytes_ if bytes_ else 0.0

    def of(self, position: int) -> float:
        """Milliseconds of the item at a position of the trace."""
        return self._of[position]
