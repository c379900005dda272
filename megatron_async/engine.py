"""What ties schedule, weight versions, update and correction together, for one training run.

Megatron's training loop stays as it is; the hooks hand the few calls that matter to the functions
here. One process trains one model, so there is one engine; it is made when Megatron has built its
optimizer, before a checkpoint is loaded.
"""

import argparse
import copy
import math
import time
from collections.abc import Callable
from typing import Any

import torch
from megatron.core import num_microbatches_calculator, parallel_state
from megatron.core.distributed.finalize_model_grads import _get_shared_word_embedding_weight
from megatron.core.utils import get_attr_wrapped_model, get_model_config
from megatron.training import get_signal_handler

from megatron_async import bubble, random_state, unfinished_saves
from megatron_async.arguments import AsyncConfig
from megatron_async.corrections import make_correction
from megatron_async.deferred_update import DeferredUpdate, Scheduled, UpdateReport, scheduled
from megatron_async.delays import optimizer_delays
from megatron_async.emulated_stages import EmulatedStages
from megatron_async.gradient_buffers import GradientBuffers
from megatron_async.moe_metrics import MoEMetrics
from megatron_async.schedules import delay_of, make_pipeline
from megatron_async.schedules.actions import Kind
from megatron_async.tally import Tally
from megatron_async.weight_versions import WeightVersions, inner_optimizers

__all__ = ["Engine", "attach", "current", "deferring"]

_engine: "Engine | None" = None


def attach(args: argparse.Namespace, model: list[Any], optimizer: Any) -> "Engine":
    """Make the engine of this run; called by all ranks right after the optimizer is built.

    Returns:
        The engine; ``optimizer.step`` is its own from now on.
    """
    global _engine
    _engine = Engine(args, model, optimizer)
    return _engine


def current() -> "Engine | None":
    """Return the engine of this run, None before the optimizer is built or without one."""
    return _engine


def deferring() -> bool:
    """Whether the running iteration's update is deferred, so that nothing may wait for a stage."""
    return _engine is not None and _engine.asynchronous_now and _engine.config.deferred_update


class Engine:
    """The state of one rank's asynchronous training."""

    def __init__(self, args: argparse.Namespace, model: list[Any], optimizer: Any) -> None:
        if len(model) != 1:
            raise ValueError("an asynchronous schedule runs one model chunk per rank")
        self.args = args
        self.config = AsyncConfig.from_args(args)
        self.model_chunk = model[0]
        self.optimizer = optimizer
        self.asynchronous_now = False
        """Whether the running (or last) iteration is asynchronous."""
        self.out_of_time = False
        """Whether all ranks know that --exit-duration-in-mins is over."""
        self.reports: list[UpdateReport] = []
        """Completed updates that were not logged yet."""
        self.last_report: UpdateReport | None = None
        self.correction_started = False
        """Whether an update was made with the correction, so that its buffers hold one."""
        self.next_batch_random_state: random_state.RandomState | None = None
        """The random state before this stage's first forward of the next batch, if microbatches of
        it were forwarded ahead. Else the present state is that."""
        self._synchronous_step: Callable[[], Any] = optimizer.step
        optimizer.step = self.step

        model_config = get_model_config(self.model_chunk)
        # A device-wide synchronisation after every P2P operation would also wait for the update's
        # collectives in flight. PyTorch has not needed it since 2.0.
        model_config.batch_p2p_sync = False

        stages = parallel_state.get_pipeline_model_parallel_world_size()
        stage = parallel_state.get_pipeline_model_parallel_rank()
        delay = delay_of(self.config.schedule, stages=stages, stage=stage)
        emulated = self.config.emulated_pipeline
        self.weights = (
            WeightVersions(self.model_chunk, optimizer, count=delay + 1)
            if emulated is None
            else EmulatedStages(self.model_chunk, optimizer, stages=emulated)
        )
        self.largest_delay = delay_of(self.config.schedule, stages=emulated or stages, stage=0)
        """By how many updates the first stage's gradients are stale, once training is under way."""
        self.corrections = [
            make_correction(
                self.config.correction,
                leaf.optimizer,
                strength=self.config.correction_strength,
                momentum=self.config.correction_momentum,
                adaptive_strength=self.config.correction_adapts,
            )
            for leaf in inner_optimizers(optimizer)
            if self.config.corrected
        ]
        for leaf, correction in zip(inner_optimizers(optimizer), self.corrections, strict=False):
            correction.delays = optimizer_delays(leaf, self.weights)
        self.moe = MoEMetrics(args, batches=delay + 1) if args.num_experts is not None else None
        self.gradients = (
            GradientBuffers(self.model_chunk) if self.config.second_grad_buffer else None
        )
        self._gathers_ahead = bool(args.overlap_param_gather)
        if self._gathers_ahead:
            # The hooks gather for whichever version a module runs on, recomputation included.
            self.model_chunk.disable_forward_pre_hook(param_sync=False)
        self.tally = _tally(args, self.config)
        self._save_watch = unfinished_saves.SaveWatch()
        self._sums: dict[int, dict[str, float]] = {}
        """The tally over all ranks, of the updates of the last batches."""
        self.deferred: DeferredUpdate | None = None
        if self.config.deferred_update:
            self.deferred = DeferredUpdate(
                optimizer=optimizer,
                model_chunk=self.model_chunk,
                weights=self.weights,
                tied_embedding=_tied_embedding(self.model_chunk, model_config),
                num_counted=len(self.tally),
                num_stagewise=self.moe.size if self.moe is not None else 0,
                norm_scope=self.config.grad_norm_scope,
                calculate_per_token_loss=model_config.calculate_per_token_loss,
                count_zeros=optimizer.config.log_num_zeros_in_grad,
                copy_gradients=self.gradients is None,
                timeout_minutes=args.distributed_timeout_minutes,
            )
        self.pipeline = make_pipeline(
            self.config.schedule,
            weights=self.weights,
            complete_update=self.complete_update,
            launch_update=self._launch_update,
            deferred=self.config.deferred_update,
            gather_ahead=self._gathers_ahead,
            reduce_late=self.gradients is not None,
            before_next_batch=self._keep_random_state,
            select_batch=self._select_batch,
        )
        self._ran: dict[int, tuple[int, int, Scheduled]] = {}
        """Of the last batches: the iteration (1 is the first) that ran them, m, and what the
        scheduler had set then."""
        self._unlaunched: int | None = None
        """The batch whose gradients are there and whose update was not launched yet."""

    # Training iterations

    def forward_backward(self, synchronous: Callable[..., Any], **kwargs: Any) -> Any:
        """Run Megatron's forward-backward function, or the asynchronous pipeline in its place.

        Args:
            synchronous: Megatron's own function for this layout.
            kwargs: what Megatron passes to it.
        """
        if kwargs.get("forward_only"):
            self.settle()
            if self.moe is not None:
                self.moe.select(None)
            with _selected(self.weights, self.weights.newest):
                return synchronous(**kwargs)
        iteration = self.args.curr_iteration
        if iteration < self.config.start_iteration:
            self.asynchronous_now = False
            return synchronous(**kwargs)
        if not self.asynchronous_now:
            self._start()
        batch = self.pipeline.batch
        self._ran = {
            batch - 1: self._ran.get(batch - 1, (iteration, 1, [])),
            batch: (iteration + 1, kwargs["num_microbatches"], scheduled(self.optimizer)),
        }
        self.next_batch_random_state = None
        losses = self.pipeline(
            forward_step_func=kwargs["forward_step_func"],
            data_iterator=kwargs["data_iterator"],
            model=kwargs["model"],
            num_microbatches=kwargs["num_microbatches"],
            next_num_microbatches=_next_num_microbatches(self.args),
            batches_left=_batches_left(self.args, iteration),
            seq_length=kwargs["seq_length"],
            micro_batch_size=kwargs["micro_batch_size"],
            decoder_seq_length=kwargs.get("decoder_seq_length"),
            force_all_reduce=kwargs.get("force_all_reduce", False),
        )
        self._unlaunched = batch
        # What Megatron reads at the end of the iteration is this batch's.
        self._select_batch(batch)
        if self.gradients is not None and self.pipeline.filled:
            self.gradients.start_first_reduction()
        return losses

    def _select_batch(self, batch: int) -> None:
        """Let what is summed up per batch go to ``batch``."""
        if self.moe is not None:
            self.moe.select(batch)
        if self.gradients is not None:
            self.gradients.select(batch)

    def _start(self) -> None:
        """Begin the asynchronous segment: the weights of this moment are version 0."""
        self.asynchronous_now = True
        self.weights.restart(newest=0)
        self.correction_started = False
        for correction in self.corrections:
            correction.enable()

    def resume(
        self,
        *,
        batch: int,
        report: UpdateReport | None,
        correction_strength: float | None,
    ) -> None:
        """Go on with an asynchronous segment that was saved.

        Both weight versions and the optimizer's state are loaded already.

        Args:
            batch: the first batch that is to run.
            report: of the last completed update.
            correction_strength: by which the newest weights were corrected; None if they were not,
                or if the correction starts anew.
        """
        self.asynchronous_now = True
        self.pipeline.batch = batch
        self.last_report = report
        if report is not None:
            self.reports = [report]
            stagewise = report.stagewise
            if self.moe is not None and stagewise is not None and len(stagewise) == self.moe.size:
                self.moe.set_totals(stagewise)
        self.correction_started = correction_strength is not None
        for correction in self.corrections:
            correction.enable(applied=correction_strength)

    def _keep_random_state(self) -> None:
        self.next_batch_random_state = random_state.capture()

    def step(self) -> tuple[bool, float | None, int | None]:
        """What Megatron calls as ``optimizer.step()``.

        Returns:
            Success, gradient norm and number of zeros, as Megatron's step does: with a deferred
            update those of the last completed one, None before the first.
        """
        if not self.asynchronous_now:
            result: tuple[bool, float | None, int | None] = self._synchronous_step()
            if self._gathers_ahead:
                self.model_chunk.start_param_sync(force_sync=True)
            return result
        for action in self.pipeline.closing:
            match action.kind:
                case Kind.UPDATE:
                    self._update_at_once(action.batch)
                case Kind.LAUNCH_UPDATE:
                    self._launch_update(action.batch)
                case Kind.COMPLETE_UPDATE:
                    self.complete_update()
        self.pipeline.closing = []
        self._select_gradients_to_zero()
        gathered = self.weights.before_use is None
        if gathered or not self.pipeline.filled or self.args.log_params_norm:
            # Whoever looks at the model between two iterations sees the newest complete version,
            # and after the last one also what was still being gathered.
            self.weights.select(self.weights.newest)
        report = self.last_report
        if report is None:
            return True, None, None
        return report.succeeded, report.grad_norm, report.num_zeros

    def _update_at_once(self, batch: int) -> None:
        self._measure_corrections()
        with self.weights.next_version():
            succeeded, norm, zeros = self._synchronous_step()
        self._gather_ahead()
        self._report(
            UpdateReport(
                batch=batch,
                iteration=self.args.curr_iteration + 1,
                succeeded=succeeded,
                grad_norm=0.0 if norm is None else float(norm),
                num_zeros=zeros,
            )
        )

    def _launch_update(self, batch: int) -> None:
        assert self.deferred is not None
        if self._unlaunched != batch:
            return  # Launched early, for an evaluation or a checkpoint.
        self._unlaunched = None
        iteration, num_microbatches, hyperparameters = self._ran[batch]
        self._select_batch(batch)
        if self.gradients is not None and self.pipeline.filled:
            self.pipeline.finalize(self.model_chunk)
            self.gradients.allow_next_reduction()
        self.deferred.launch(
            batch=batch,
            iteration=iteration,
            hyperparameters=hyperparameters,
            num_tokens=self.pipeline.total_num_tokens,
            counted=self.tally.pack(self._own_numbers()),
            stagewise=None if self.moe is None else self.moe.take(batch, num_microbatches),
        )
        if self.moe is not None:
            self.moe.select(None)

    def _own_numbers(self) -> dict[str, float | torch.Tensor]:
        """Return what this rank adds to the tally."""
        numbers: dict[str, float | torch.Tensor] = {}
        if "signals" in self.tally:
            numbers["signals"] = float(get_signal_handler()._signal_received)
        if "overtime" in self.tally:
            numbers["overtime"] = float(_minutes_trained() > self.args.exit_duration_in_mins)
        if "unfinished saves" in self.tally:
            numbers["unfinished saves"] = float(unfinished_saves.is_running())
        measured = bubble.log()
        if "idle" in self.tally and measured is not None:
            numbers["idle"], numbers["elapsed"] = measured.meter.close_iteration()
        for correction in self.corrections:
            if correction.squares is not None:
                change, size = correction.squares
                numbers["correction"] = numbers.get("correction", 0.0) + change
                numbers["update"] = numbers.get("update", 0.0) + size
        return numbers

    def settle(self) -> None:
        """Complete the update of the last batch that ran, wherever it stands: nothing is pending
        afterwards, and the newest version is that of the last iteration."""
        if self.deferred is not None and self._unlaunched is not None:
            self._launch_update(self._unlaunched)
        self.complete_update()
        self._select_gradients_to_zero()

    def _select_gradients_to_zero(self) -> None:
        """Megatron zeroes gradients first thing in an iteration: those of the batch to come."""
        if self.gradients is not None:
            self.gradients.select(self.pipeline.batch)

    def _gather_ahead(self) -> None:
        """Start to gather the parameters of the version that was just made."""
        if self._gathers_ahead:
            self.model_chunk.start_param_sync()
            self.weights.before_use = self._finish_gather

    def _finish_gather(self) -> None:
        chunk = self.model_chunk
        for group in chunk.bucket_groups + chunk.expert_parallel_bucket_groups:
            if group.param_gather_handle is not None:
                group.param_gather_handle.wait()
                group.param_gather_handle = None

    def complete_update(self) -> None:
        """Complete the launched update, if there is one."""
        if self.deferred is None or not self.deferred.pending:
            return
        self._measure_corrections()
        report = self.deferred.complete(
            check_finite=self.args.check_for_nan_in_loss_and_grad,
        )
        self._gather_ahead()
        if report is not None:
            self._report(report)

    def _report(self, report: UpdateReport) -> None:
        self.reports.append(report)
        self.last_report = report
        self.correction_started = self.config.corrected
        sums = self.tally.unpack(report.counted)
        self._sums = {report.batch: sums, report.batch - 1: self._sums.get(report.batch - 1, {})}
        measured = bubble.log()
        if measured is not None and "idle" in sums:
            measured.add(sums["idle"], sums["elapsed"])
        if self.moe is not None and report.stagewise is not None:
            self.moe.set_totals(report.stagewise)

    def _measure_corrections(self) -> None:
        for correction in self.corrections:
            correction.measure = "correction" in self.tally

    # What Megatron's loop asks between iterations

    def agreed(self, question: str) -> bool | None:
        """Whether any rank was for it at the end of the iteration before the last.

        That one's update is complete on all stages, whereas some have completed a later one. So all
        ranks get the same answer in the same iteration, without a collective of its own.

        Returns:
            None if it is not known, on all ranks alike.
        """
        sums = self._sums.get(self.pipeline.batch - 2, {})
        return sums[question] > 0 if question in sums else None

    def saves_are_written(self) -> bool:
        """Whether all ranks know that no rank is writing a save any more; see :meth:`agreed`."""
        batch = self.pipeline.batch
        covered = self._save_watch.covers(told=batch - 2, running=batch)
        return covered and self.agreed("unfinished saves") is False

    def scalars(self) -> list[tuple[str, float, int]]:
        """Return (name, value, iteration) of what is to be logged, and forget the reports."""
        found: list[tuple[str, float, int]] = []
        for report in self.reports:
            found.append(("update-grad-norm", report.grad_norm, report.iteration))
            sums = self.tally.unpack(report.counted)
            if sums.get("update", 0.0) > 0:
                # Measured in the update before the one that carried it.
                ratio = math.sqrt(sums["correction"] / sums["update"])
                found.append(("delay-correction-ratio", ratio, report.iteration - 1))
        self.reports.clear()
        iteration = self.args.curr_iteration + 1
        found.append(("weight-version", self.weights.newest, iteration))
        found.append(
            ("gradient-delay", min(self.pipeline.batch - 1, self.largest_delay), iteration)
        )
        return found


def _tally(args: argparse.Namespace, config: AsyncConfig) -> Tally:
    writes = bool(args.tensorboard_dir or getattr(args, "wandb_project", ""))
    names = [
        name
        for name, wanted in (
            ("signals", args.exit_signal_handler),
            ("overtime", bool(args.exit_duration_in_mins)),
            ("unfinished saves", args.async_save),
            ("idle", config.log_bubble),
            ("elapsed", config.log_bubble),
            ("correction", config.corrected and writes),
            ("update", config.corrected and writes),
        )
        if wanted
    ]
    return Tally(*names)


def _minutes_trained() -> float:
    from megatron.training import training

    return (time.time() - float(training._TRAIN_START_TIME)) / 60.0


def _tied_embedding(model_chunk: Any, config: Any) -> torch.nn.Parameter | None:
    """Return the embedding weight that another stage has a copy of."""
    group = parallel_state.get_embedding_group(check_initialized=False)
    if group is None or not parallel_state.is_rank_in_embedding_group(ignore_virtual=True):
        return None
    if group.size() < 2:
        return None
    module = get_attr_wrapped_model(model_chunk, "pre_process", return_model_obj=True)
    weight: torch.nn.Parameter | None = _get_shared_word_embedding_weight(module, config)
    return weight if weight is not None and weight.requires_grad else None


def _next_num_microbatches(args: argparse.Namespace) -> int:
    """Return the number of microbatches of the next iteration's batch."""
    calculator = num_microbatches_calculator._GLOBAL_NUM_MICROBATCHES_CALCULATOR
    consumed = args.consumed_train_samples + calculator.get_current_running_global_batch_size()
    following = copy.copy(calculator)
    following.update(consumed, False)
    return int(following.get())


def _batches_left(args: argparse.Namespace, iteration: int) -> int:
    """Return how many iterations there are up to the first one after which the run is known to
    end, the given one (0-indexed) and that one included."""
    ends = [int(args.train_iters)]
    if args.exit_interval:
        ends.append((iteration // args.exit_interval + 1) * args.exit_interval)
    ends += [end for end in args.phase_transition_iterations or () if end > iteration]
    return max(min(ends) - iteration, 1)


class _selected:
    """The model computes on a version inside the block, and on what it had before after it."""

    def __init__(self, weights: WeightVersions, version: int) -> None:
        self._weights = weights
        self._version = version
        self._before = version

    def __enter__(self) -> None:
        self._before = self._weights.selected
        self._weights.select(self._version)

    def __exit__(self, *_: object) -> None:
        self._weights.select(self._before)
