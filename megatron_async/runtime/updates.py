"""The updates of one rank: what each action of the lists that belongs to an update does.

The lists say when; an evaluation or a checkpoint in between asks for all that is pending to be done
at once, and what the lists have of it later is then skipped.
"""

import argparse
from collections.abc import Callable
from typing import Any

from megatron_async.corrections.base import DelayCorrection
from megatron_async.megatron.data_parallel import start_param_gathers
from megatron_async.runtime.counters.counter import Counters
from megatron_async.runtime.counters.moe_metrics import MoEMetrics
from megatron_async.runtime.interpreter import Handler
from megatron_async.runtime.run import run
from megatron_async.schedules.actions import Action, Kind
from megatron_async.update.deferred import DeferredUpdate, Scheduled, UpdateReport
from megatron_async.update.router_biases import RouterBiases
from megatron_async.weights.versions import WeightVersions

__all__ = ["Updates"]


class Updates:
    """Makes the updates.

    Args:
        args: Megatron's.
        model_chunk: the DDP-wrapped model chunk.
        weights: the versions that updates make.
        corrections: of the optimizers of this rank.
        counters: their numbers travel with deferred updates.
        moe: metrics of a mixture of experts, if it is one.
        router_biases: what an update gives its version beside the optimizer's step.
        deferred: launches and completes; None without ``--deferred-update``.
        synchronous_step: Megatron's own ``optimizer.step``.
        gather_ahead: new versions are gathered by actions of their own.
        staleness: from a number of microbatches, by how many updates the gradients of such a batch
            are late on this stage.
    """

    def __init__(
        self,
        *,
        args: argparse.Namespace,
        model_chunk: Any,
        weights: WeightVersions,
        corrections: list[DelayCorrection],
        counters: Counters,
        moe: MoEMetrics | None,
        router_biases: RouterBiases,
        deferred: DeferredUpdate | None,
        synchronous_step: Callable[[], Any],
        gather_ahead: bool,
        staleness: Callable[[int], float],
    ) -> None:
        self.reports: list[UpdateReport] = []
        """Completed updates that were not logged yet."""
        self.last_report: UpdateReport | None = None
        self._args = args
        self._model_chunk = model_chunk
        self._weights = weights
        self._corrections = corrections
        self._counters = counters
        self._moe = moe
        self._router_biases = router_biases
        self._deferred = deferred
        self._synchronous_step = synchronous_step
        self._gather_ahead = gather_ahead
        self._staleness = staleness
        self._ran: dict[int, tuple[int, int, Scheduled]] = {}
        """Of the last batches: the iteration (1 is the first) that ran them, m, and what the
        scheduler had set then."""
        self._num_tokens: Any = None
        self._unlaunched: int | None = None
        """The batch whose gradients are there and whose update was not launched yet."""
        self._ungathered: int | None = None
        """The version that was made and whose gather was not started yet."""
        self._gathering: int | None = None
        """The version whose gather is under way."""
        self._gathers: list[Any] = []
        """What is to be waited for."""

    @property
    def handlers(self) -> dict[Kind, Handler]:
        """By kind of action."""
        return {
            Kind.LAUNCH_UPDATE: self._launch,
            Kind.COMPLETE_UPDATE: self._complete,
            Kind.UPDATE: self._update,
            Kind.START_GATHER: self._start_gather,
            Kind.FINISH_GATHER: self._finish_gather,
        }

    def will_run(
        self, batch: int, *, iteration: int, num_microbatches: int, hyperparameters: Scheduled
    ) -> None:
        """Called before a batch's call.

        Args:
            batch: the batch.
            iteration: the iteration (1 is the first).
            num_microbatches: of the batch.
            hyperparameters: what the scheduler has set.
        """
        before = self._ran.get(batch - 1)
        self._ran = {batch: (iteration, num_microbatches, hyperparameters)}
        if before is not None:
            self._ran[batch - 1] = before

    def has_run(self, batch: int, num_tokens: Any) -> None:
        """Called after a batch's call, when its gradients are there.

        Args:
            batch: the batch.
            num_tokens: of the batch on the last stage (int scalar).
        """
        self._unlaunched = batch
        self._num_tokens = num_tokens

    def resume(self, report: UpdateReport | None) -> None:
        """Go on behind a saved update."""
        self.last_report = report
        if report is not None:
            self.reports = [report]
            stagewise = report.stagewise
            if self._moe is not None and stagewise is not None and len(stagewise) == self._moe.size:
                self._moe.resume(stagewise, iteration=report.iteration)

    def set_frozen_squares(self, squares: float) -> None:
        """Let the reported norm of the weights count those that are not trained."""
        if self._deferred is not None:
            self._deferred.frozen_squares = squares

    def settle(self, finish_reduction: Callable[[int], None]) -> None:
        """Do all that is pending: the newest version is then that of the last batch, complete.

        Args:
            finish_reduction: finishes the reduction of a batch's gradients, if that is not done.
        """
        if self._deferred is not None and self._unlaunched is not None:
            batch = self._unlaunched
            finish_reduction(batch)
            self._launch(Action(stage=0, kind=Kind.LAUNCH_UPDATE, batch=batch))
        self._complete(Action(stage=0, kind=Kind.COMPLETE_UPDATE, batch=-1))
        self.finish_gather()

    def finish_gather(self) -> None:
        """Let the newest version be complete on this rank."""
        if self._ungathered is not None:
            version = self._ungathered
            self._start_gather(Action(stage=0, kind=Kind.START_GATHER, batch=-1, version=version))
        if self._gathering is not None:
            for work in self._gathers:
                work.wait()
            self._gathers = []
            self._gathering = None

    # Actions

    def _launch(self, action: Action) -> None:
        assert self._deferred is not None
        if self._unlaunched != action.batch:
            return  # Launched early.
        self._unlaunched = None
        iteration, num_microbatches, hyperparameters = self._ran[action.batch]
        moe = self._moe
        self._deferred.launch(
            batch=action.batch,
            iteration=iteration,
            hyperparameters=hyperparameters,
            num_tokens=self._num_tokens,
            counted=self._counters.pack(),
            stagewise=None if moe is None else moe.take(action.batch, num_microbatches),
        )
        if moe is not None:
            moe.select(None)

    def _complete(self, action: Action) -> None:
        if self._deferred is None or not self._deferred.pending:
            return
        self.finish_gather()
        self._before_step(self._deferred.pending_batch)
        report = self._deferred.complete()
        assert report is not None
        self._made(report)

    def _update(self, action: Action) -> None:
        self.finish_gather()
        self._before_step(action.batch)
        with self._weights.next_version():
            succeeded, norm, zeros = self._synchronous_step()
        self._made(
            UpdateReport(
                batch=action.batch,
                iteration=self._args.curr_iteration + 1,
                succeeded=succeeded,
                grad_norm=0.0 if norm is None else float(norm),
                num_zeros=zeros,
            )
        )

    def _start_gather(self, action: Action) -> None:
        if self._ungathered != action.version:
            return  # Gathered early.
        self._gathers = start_param_gathers(self._model_chunk)
        self._gathering, self._ungathered = self._ungathered, None
        if self._weights.count > 1:
            # Until it is complete, nobody is to find it in the model.
            self._weights.select(self._weights.newest - 1)

    def _finish_gather(self, action: Action) -> None:
        if self._gathering == action.version:
            self.finish_gather()

    def _before_step(self, batch: int) -> None:
        iteration, num_microbatches, _ = self._ran[batch]
        for correction in self._corrections:
            correction.delay = self._staleness(num_microbatches)
        self._counters.before_update(iteration)
        if run.fingerprints is not None:
            run.fingerprints.begin(iteration=iteration, version=batch + 1)

    def _made(self, report: UpdateReport) -> None:
        self._router_biases.publish()
        self._ungathered = self._weights.newest if self._gather_ahead else None
        self.reports.append(report)
        self.last_report = report
        self._counters.receive(report.batch, report.counted)
        if self._moe is not None and report.stagewise is not None:
            self._moe.set_totals(report.stagewise, iteration=report.iteration)
