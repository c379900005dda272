"""MoE metrics of a batch, when microbatches of the next one are forwarded in between.

Megatron's routers add their auxiliary losses to one global tracker, and each iteration's log line
sums it over all ranks and clears it. Here the tracker holds one set of sums per batch, so that a
microbatch that is forwarded ahead counts for its own batch; and the sum over the stages travels
with the deferred update instead of a collective of its own.

Source: megatron/core/transformer/moe/moe_logging.py.
"""

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from megatron_async.megatron import moe

__all__ = ["MoEMetrics"]


class MoEMetrics:
    """The metrics of one rank.

    Args:
        args: Megatron's arguments, of a model with experts.
        batches: how many batches have microbatches in flight at once.
    """

    def __init__(self, args: argparse.Namespace, *, batches: int = 2) -> None:
        self._tracker = moe.metrics_tracker()
        self.names = moe.tracked_names(args)
        self._num_layers = int(args.num_layers) + int(getattr(args, "mtp_num_layers", None) or 0)
        self._entries: list[dict[str, Any]] = [
            moe.metrics(self._tracker),
            *({} for _ in range(batches - 1)),
        ]
        self._evaluated: dict[str, Any] = {}
        self._reported: dict[str, Any] = {}
        self._taken: torch.Tensor | None = None
        self._reports = False
        self._reported_at = 0
        """The iteration whose sums were reported last."""
        self._iteration = 0
        """In which the batch of :attr:`totals` ran."""
        self.totals: torch.Tensor | None = None
        """Sums over all layers' owners of the last completed batch, divided by its number of
        microbatches: (metrics, layers), float64. None before the first."""

    @property
    def size(self) -> int:
        """How many numbers a batch's metrics are."""
        return len(self.names) * self._num_layers

    def select(self, batch: int | None) -> None:
        """Let the routers add to the sums of a batch; None for an evaluation's, which nobody
        reads."""
        moe.set_metrics(
            self._tracker,
            self._evaluated if batch is None else self._entries[batch % len(self._entries)],
        )

    def take(self, batch: int, num_microbatches: int) -> torch.Tensor:
        """Return a batch's metrics, summed over the ranks of this stage, and clear them."""
        self.select(batch)
        self._taken = self._stage_sums(num_microbatches)
        self._tracker.clear()
        return self._taken

    def _stage_sums(self, num_microbatches: int) -> torch.Tensor:
        """Return the selected batch's metrics, summed over the ranks of this stage.

        The reductions are those of ``MoEMetricsTracker._sync_metrics`` but for the one over the
        stages, and in that order.
        """
        tracker = self._tracker
        rows = []
        for name in self.names:
            tracker.ensure_initialized(name, self._num_layers)
            entry = moe.metrics(tracker)[name]
            values = entry.values.clone()
            if entry.reduce_group is not None:
                dist.all_reduce(values, group=entry.reduce_group)
            if entry.avg_group is not None:
                dist.all_reduce(values, group=entry.avg_group, op=dist.ReduceOp.AVG)
            if entry.needs_dp_avg:
                group = parallel_state.get_data_parallel_group(
                    with_context_parallel=False, partial_data_parallel=False
                )
                dist.all_reduce(values, group=group, op=dist.ReduceOp.AVG)
            rows.append(values.double() / num_microbatches)
        return torch.cat(rows) if rows else torch.zeros(0, dtype=torch.float64)

    def _sum_over_stages(self, num_microbatches: int, *, iteration: int) -> None:
        """Make what was taken last, or else what is selected, the totals, by a collective over the
        stages.

        For the first log line, when not all stages have a complete update yet: its average counts
        that iteration.
        """
        taken = self._taken
        sums = self._stage_sums(num_microbatches) if taken is None else taken.clone()
        dist.all_reduce(sums, group=parallel_state.get_pipeline_model_parallel_group())
        self.set_totals(sums.tolist(), iteration=iteration)

    def resume(self, totals: list[float], *, iteration: int) -> None:
        """Go on with the totals that a run has saved, on all ranks."""
        self.set_totals(totals, iteration=iteration)
        self._reports = True

    def set_totals(self, totals: list[float], *, iteration: int) -> None:
        """Keep what came back for a completed batch, which ran in an iteration (1 is the first)."""
        self._iteration = iteration
        self.totals = torch.tensor(totals, dtype=torch.float64).view(
            len(self.names), self._num_layers
        )

    @contextmanager
    def reporting(self, num_microbatches: int, *, iteration: int) -> Iterator[tuple[int, bool]]:
        """Let the tracker's report, which is the body, read the last completed batch's sums; what
        the routers have added for others stays.

        Args:
            num_microbatches: what the report divides by.
            iteration: the running one.

        Yields:
            The iteration that the sums are of, and whether they have not been reported before.
        """
        # Not where there are no totals: stage 0 may have some before the others have.
        if not self._reports:  # on all ranks alike
            self._sum_over_stages(num_microbatches, iteration=iteration)
            self._reports = True
        assert self.totals is not None
        tracker = self._tracker
        selected = moe.metrics(tracker)
        moe.set_metrics(tracker, self._reported)
        try:
            for name, values in zip(self.names, self.totals, strict=True):
                tracker.ensure_initialized(name, self._num_layers)
                entry = moe.metrics(tracker)[name]
                entry.values.copy_((values * num_microbatches).to(entry.values))
            yield self._iteration, self._iteration != self._reported_at
        finally:
            self._reported_at = self._iteration
            moe.set_metrics(tracker, selected)
