"""The asynchronous part of one rank's training: begun, run, settled, saved and resumed.

Megatron's training loop stays as it is; the hooks hand the few calls that matter to the functions
here. The engine ties the schedule's lists, the weights, the corrections and the updates together;
what an action does is in :mod:`.interpreter` and :mod:`.updates`. It is made when Megatron has
built its optimizer, before a checkpoint is loaded.
"""

import argparse
import atexit
import multiprocessing
import signal
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any

import torch
from megatron.core import num_microbatches_calculator, parallel_state
from megatron.core.utils import get_model_config

from megatron_async.config.settings import AsyncConfig
from megatron_async.corrections.base import DelayCorrection
from megatron_async.megatron import moe, training
from megatron_async.megatron.optimizers import (
    frozen_squares,
    inner_optimizers,
    keep_loss_scale_on_host,
    model_parameters,
)
from megatron_async.megatron.packed_sequences import are_packed
from megatron_async.megatron.pipeline import tied_embedding
from megatron_async.runtime import random_state
from megatron_async.runtime.counters.bubble import IdleCounter
from megatron_async.runtime.counters.correction_ratio import CorrectionRatio
from megatron_async.runtime.counters.counter import Counter, Counters, Scalar
from megatron_async.runtime.counters.exits import ExitVotes
from megatron_async.runtime.counters.moe_metrics import MoEMetrics
from megatron_async.runtime.counters.packed_sequences import PackedSequences
from megatron_async.runtime.counters.saves import UNFINISHED, SaveWatch
from megatron_async.runtime.interpreter import Interpreter
from megatron_async.runtime.links import Links
from megatron_async.runtime.run import run
from megatron_async.runtime.updates import Updates
from megatron_async.schedules import SCHEDULES
from megatron_async.schedules.schedule import action_lists
from megatron_async.schedules.validator import validate
from megatron_async.update.deferred import DeferredUpdate, UpdateReport, scheduled
from megatron_async.update.process_groups import gather_ranks, shared_or_new_groups
from megatron_async.update.router_biases import RouterBiases
from megatron_async.weights.batch_buffers import BatchBuffers
from megatron_async.weights.drifting_stages import DriftingStages
from megatron_async.weights.emulated_stages import EmulatedStages
from megatron_async.weights.gradient_buffers import GradientBuffers
from megatron_async.weights.versions import WeightVersions

__all__ = ["Engine", "attach"]


def attach(args: argparse.Namespace, model: list[Any], optimizer: Any) -> "Engine":
    """Make the engine of this run; called by all ranks right after the optimizer is built.

    Returns:
        The engine; ``optimizer.step`` is its own from now on.
    """
    run.engine = Engine(args, model, optimizer)
    if args.exit_signal_handler:
        atexit.register(_end_workers)  # behind multiprocessing's own, and so run ahead of it
    return run.engine


def _end_workers() -> None:
    """End a data loader's workers, which do not end at SIGTERM with ``--exit-signal-handler``.

    Whatever still refers to their iterator, such as the traceback of an error, multiprocessing
    would send them SIGTERM at the end of the interpreter and wait for them for good.
    """
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch's handler raises at killed workers
    for child in multiprocessing.active_children():
        if child.daemon:
            child.kill()


class Engine:
    """The state of one rank's asynchronous training.

    Args:
        args: Megatron's.
        model: the model chunk, in a list.
        optimizer: Megatron's.

    Raises:
        ValueError: several model chunks.
    """

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
        self.next_batch_random_state: random_state.RandomState | None = None
        """The random state before this stage's first forward of the next batch, if microbatches of
        it were forwarded ahead. Else the present state is that."""
        self._synchronous_step: Callable[[], Any] = optimizer.step
        optimizer.step = self.step
        keep_loss_scale_on_host(optimizer)

        model_config = get_model_config(self.model_chunk)
        # A device-wide synchronisation after every P2P operation would also wait for the update's
        # collectives in flight. PyTorch has not needed it since 2.0.
        model_config.batch_p2p_sync = False

        self.schedule = SCHEDULES[self.config.schedule]
        self.stage = parallel_state.get_pipeline_model_parallel_rank()
        self.pipeline = self.config.pipeline(
            stages=parallel_state.get_pipeline_model_parallel_world_size(),
            gather_ahead=bool(args.overlap_param_gather),
            replicas=parallel_state.get_data_parallel_world_size(with_context_parallel=True),
        )
        microbatches = num_microbatches_calculator.get_num_microbatches()
        emulated = self.schedule.emulated_stages(self.pipeline)
        self._logged_pipeline = replace(self.pipeline, stages=emulated or self.pipeline.stages)
        """Whose first stage's delay is logged."""
        self.weights = self._make_weights(emulated, microbatches)
        self.corrections = self._make_corrections()
        in_flight = self.schedule.batches_in_flight(self.pipeline, self.stage, microbatches)
        self.moe: MoEMetrics | None = None
        if args.num_experts is not None:
            self.moe = MoEMetrics(args, batches=max(in_flight, 2))
        self._router_sums = BatchBuffers(
            moe.router_sums(self.model_chunk), batches=max(in_flight, 2)
        )
        self.router_biases = RouterBiases(self.weights)
        self.gradients = (
            GradientBuffers(self.model_chunk) if self.config.second_grad_buffer else None
        )
        if self.pipeline.gather_ahead:
            # The hooks gather for whichever version a module runs on, recomputation included.
            self.model_chunk.disable_forward_pre_hook(param_sync=False)
        self._save_watch = SaveWatch()
        self.packed: PackedSequences | None = None
        if are_packed(args) and self.pipeline.deferred:
            ranks = torch.distributed.get_world_size()
            self.packed = PackedSequences(
                copies=ranks // parallel_state.get_data_parallel_world_size()
            )
        self.counters = Counters(self._make_counters())
        self.updates = Updates(
            args=args,
            model_chunk=self.model_chunk,
            weights=self.weights,
            corrections=self.corrections,
            counters=self.counters,
            moe=self.moe,
            router_biases=self.router_biases,
            deferred=self._make_deferred(model_config) if self.pipeline.deferred else None,
            synchronous_step=self._synchronous_step,
            gather_ahead=self.pipeline.gather_ahead,
            staleness=lambda count: self.schedule.rule(self.pipeline, count).staleness(self.stage),
        )
        self.loss_group = self._make_loss_group()
        """The replicas, where their loss would be averaged behind a reduction in flight; None where
        it is not."""
        links: Links | None = None
        if self.pipeline.extra_warmup:
            column = parallel_state.get_pipeline_model_parallel_group()
            links = Links(
                ranks=gather_ranks(column),
                stage=self.stage,
                timeout_minutes=args.distributed_timeout_minutes,
            )
        self.interpreter = Interpreter(
            schedule=self.schedule,
            pipeline=self.pipeline,
            weights=self.weights,
            updates=self.updates.handlers,
            links=links,
            after_reduction=self._after_reduction,
            before_batch=self._keep_random_state,
            select_batch=self._select_batch,
        )
        self._microbatches = 1
        """Of the last batch that ran."""
        self._last = False
        """Whether the running call leaves the pipeline empty."""

    @property
    def deferring(self) -> bool:
        """Whether the running iteration's update is deferred, so that nothing may wait for a
        stage."""
        return self.asynchronous_now and self.pipeline.deferred

    def _make_weights(self, emulated: int | None, microbatches: int) -> WeightVersions:
        model, optimizer, schedule = self.model_chunk, self.optimizer, self.schedule
        if emulated is None:
            kept = schedule.rule(self.pipeline, microbatches).kept(self.stage)
            biases = moe.router_biases(model)
            return WeightVersions(model, optimizer, count=kept, buffers=biases)
        if not schedule.drifts:
            return EmulatedStages(model, optimizer, stages=emulated)

        def version(batch: int, microbatch: int, stage: int) -> int:
            # On one stage all that is in flight is of the running batch.
            rule = schedule.rule(self._logged_pipeline, self._microbatches)
            return rule.backward(batch, microbatch, stage)

        return DriftingStages(model, optimizer, stages=emulated, backward_version=version)

    def _make_corrections(self) -> list[DelayCorrection]:
        record = self.config.correction_record
        if record is None:
            return []
        corrections: list[DelayCorrection] = []
        for leaf in inner_optimizers(self.optimizer):
            correction = record.build(leaf.optimizer, self.config.correction_settings)
            if isinstance(self.weights, EmulatedStages):
                of = dict(zip(self.weights.parameters, self.weights.delays, strict=True))
                correction.delays = {
                    own: of[parameter]
                    for own, parameter in model_parameters(leaf, self.weights.parameters).items()
                }
            corrections.append(correction)
        return corrections

    def _make_counters(self) -> list[Counter]:
        counters: list[Counter] = [ExitVotes(self.args)]
        if self.args.async_save:
            counters.append(self._save_watch)
        if self.packed is not None:
            counters.append(self.packed)
        if self.config.log_bubble and run.bubble is not None:
            counters.append(IdleCounter(run.bubble))
        writes = bool(self.args.tensorboard_dir or getattr(self.args, "wandb_project", ""))
        if self.config.corrected and writes:
            interval = self.args.tensorboard_log_interval
            counters.append(CorrectionRatio(self.corrections, interval=interval))
        return counters

    def _make_deferred(self, model_config: Any) -> DeferredUpdate:
        return DeferredUpdate(
            optimizer=self.optimizer,
            model_chunk=self.model_chunk,
            weights=self.weights,
            tied_embedding=tied_embedding(self.model_chunk, model_config),
            num_counted=len(self.counters),
            num_stagewise=self.moe.size if self.moe is not None else 0,
            norm_scope=self.config.grad_norm_scope,
            calculate_per_token_loss=model_config.calculate_per_token_loss,
            count_zeros=self.optimizer.config.log_num_zeros_in_grad,
            norm_parameters=bool(self.args.log_params_norm),
            copy_gradients=self.gradients is None,
            timeout_minutes=self.args.distributed_timeout_minutes,
            waiting=run.waiting,
        )

    def _make_loss_group(self) -> Any:
        if self.gradients is None or self.pipeline.replicas == 1:
            return None
        replicas = parallel_state.get_data_parallel_group(with_context_parallel=True)
        [group] = shared_or_new_groups(
            [gather_ranks(replicas)], timeout_minutes=self.args.distributed_timeout_minutes
        )
        return group

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
            return synchronous(**kwargs)
        iteration = self.args.curr_iteration
        if iteration < self.config.start_iteration:
            self.asynchronous_now = False
            return synchronous(**kwargs)
        batch, microbatches = self.interpreter.batch, kwargs["num_microbatches"]
        following = training.next_num_microbatches(self.args)
        if not self.interpreter.filled:
            self._check_lists(microbatches, following)
        if not self.asynchronous_now:
            self._start()
        self._microbatches = microbatches
        self.updates.will_run(
            batch,
            iteration=iteration + 1,
            num_microbatches=microbatches,
            hyperparameters=scheduled(self.optimizer),
        )
        self.next_batch_random_state = None
        batches_left = training.batches_left(self.args, iteration)
        self._last = batches_left == 1
        losses = self.interpreter.run_call(
            forward_step_func=kwargs["forward_step_func"],
            data_iterator=kwargs["data_iterator"],
            model=kwargs["model"],
            num_microbatches=microbatches,
            next_num_microbatches=following,
            batches_left=batches_left,
            seq_length=kwargs["seq_length"],
            micro_batch_size=kwargs["micro_batch_size"],
            decoder_seq_length=kwargs.get("decoder_seq_length"),
            force_all_reduce=kwargs.get("force_all_reduce", False),
        )
        self.updates.has_run(batch, self.interpreter.total_num_tokens)
        # What Megatron reads at the end of the iteration is this batch's.
        self._select_batch(batch)
        if self.gradients is not None and self.interpreter.filled:
            self.gradients.start_first_reduction()
        return losses

    def step(self) -> tuple[bool, float | None, int | None]:
        """What Megatron calls as ``optimizer.step()``.

        Returns:
            Success, gradient norm and number of zeros, as Megatron's step does: with a deferred
            update those of the last completed one, None before the first.
        """
        if not self.asynchronous_now:
            result: tuple[bool, float | None, int | None] = self._synchronous_step()
            if self.pipeline.gather_ahead:
                self.model_chunk.start_param_sync(force_sync=True)
            return result
        self.interpreter.run_step()
        self._select_gradients_to_zero()
        self._show()
        report = self.updates.last_report
        if report is None:
            return True, None, None
        return report.succeeded, report.grad_norm, report.num_zeros

    def _show(self) -> None:
        """Let whoever looks at the model between two iterations find no gather under way in it, and
        the same version on all stages, unless a stage keeps none but a newer one."""
        oldest_kept = self.weights.newest - self.weights.count + 1
        version = max(self.interpreter.version_between_calls, oldest_kept)
        if version == self.weights.newest:
            self.updates.finish_gather()
        self.weights.select(version)

    def settle(self) -> None:
        """Complete the update of the last batch that ran, wherever it stands, its gather included.

        Nothing is pending afterwards, and the model is the newest version, that of the last
        iteration: what whoever looks at it would find in synchronous training. The stages wait for
        each other, so all ranks have to call it in the same iteration.
        """
        self.updates.settle(self.interpreter.finish_reduction)
        self._select_gradients_to_zero()
        self.weights.select(self.weights.newest)

    # The life of a segment

    def _start(self) -> None:
        """Begin the asynchronous segment: the weights of this moment are version 0."""
        self._go_asynchronous()
        self.weights.restart(newest=0)
        for correction in self.corrections:
            correction.enable()

    def _go_asynchronous(self) -> None:
        self.asynchronous_now = True
        if self.pipeline.deferred:
            if self.args.log_params_norm:
                self.updates.set_frozen_squares(frozen_squares(self.model_chunk))
            # They synchronise the device, bucket by bucket amid the last backward; the update
            # checks the norm of them all.
            self.model_chunk.ddp_config.check_for_nan_in_grad = False

    def _check_lists(self, microbatches: int, following: int) -> None:
        """Check the lists that all stages are about to run.

        Raises:
            ScheduleError: they would train wrongly.
            ValueError: the schedule cannot run with these numbers.
        """
        calls = 2 + self.schedule.batches_in_flight(self.pipeline, 0, microbatches)
        start = self.interpreter.batch
        counts = [microbatches, *[following] * (calls - 1)]
        for drain in (False, True):
            lists = action_lists(self.schedule, self.pipeline, counts, start=start, drain=drain)
            validate(
                lists,
                schedule=self.schedule,
                pipeline=self.pipeline,
                microbatches=counts,
                start=start,
            )

    def state_dict(self) -> dict[str, Any]:
        """Return what a resume needs beside tensors: plain data, the same on all ranks."""
        report = self.updates.last_report
        if self.config.grad_norm_scope != "global":
            report = None  # Each stage has another norm.
        if report is not None:
            report = replace(report, counted=None)  # What is counted depends on the flags.
        corrected = [each.state_dict() for each in self.corrections if each.started]
        return {
            "schedule": self.schedule.name,
            "batch": self.interpreter.batch,
            "weights": self.weights.state_dict(),
            "report": None if report is None else asdict(report),
            "correction": self.config.correction_label if corrected else None,
            "correction_settings": dict(self.config.correction_settings),
            "correction_state": corrected[0] if corrected else None,
            "counters": self.counters.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any], *, corrected: bool) -> None:
        """Go on with a segment that was saved.

        The weight versions and the optimizer's state are loaded already.

        Args:
            state: see :meth:`state_dict`.
            corrected: whether the correction goes on, with its buffers; otherwise it starts anew.
        """
        self._go_asynchronous()
        self.interpreter.batch = state["batch"]
        report = state["report"]
        self.updates.resume(None if report is None else UpdateReport(**report))
        self.counters.load_state_dict(state["counters"])
        for correction in self.corrections:
            if corrected:
                correction.load_state_dict(state["correction_state"])
            else:
                correction.enable()

    # Between the parts

    def _select_batch(self, batch: int) -> None:
        """Let what is summed up per batch go to ``batch``."""
        if self.moe is not None:
            self.moe.select(batch)
        self._router_sums.select(batch)
        if self.gradients is not None:
            self.gradients.select(batch)

    def _select_gradients_to_zero(self) -> None:
        """Megatron zeroes gradients first thing in an iteration: those of the batch to come."""
        if self.gradients is not None:
            self.gradients.select(self.interpreter.batch)

    def _after_reduction(self, batch: int) -> None:
        # The pipeline's last reduction is the iteration's own, as Megatron has it.
        if self.gradients is not None and not (self._last and batch == self.interpreter.batch):
            self.gradients.allow_next_reduction()

    def _keep_random_state(self, batch: int) -> None:
        if batch > self.interpreter.batch:
            self.next_batch_random_state = random_state.capture()
        if run.fingerprints is not None:
            run.fingerprints.start(version=batch + 1)

    # What Megatron's loop asks between iterations

    @property
    def drained(self) -> bool:
        """Whether no stage has a microbatch of a later iteration in flight."""
        return self._last

    def agreed(self, question: str) -> bool | None:
        """Whether any rank was for it at the end of the iteration before the last.

        That one's update is complete on all stages, whereas some have completed a later one. So all
        ranks get the same answer in the same iteration, without a collective of its own.

        Args:
            question: the name of a counter's number.

        Returns:
            None if it is not known, on all ranks alike.
        """
        votes = self.counters.sum(question, batch=self.interpreter.batch - 2)
        return None if votes is None else votes > 0

    def saves_are_written(self) -> bool:
        """Whether all ranks know that no rank is writing a save any more; see :meth:`agreed`."""
        batch = self.interpreter.batch
        covered = self._save_watch.covers(told=batch - 2, running=batch)
        return covered and self.agreed(UNFINISHED) is False

    def scalars(self) -> list[Scalar]:
        """Return what is to be logged, and forget the reports."""
        found: list[Scalar] = []
        for report in self.updates.reports:
            found.append(("update-grad-norm", report.grad_norm, report.iteration))
            if report.params_norm is not None:
                found.append(("update-params-norm", report.params_norm, report.iteration - 1))
            found += self.counters.scalars(report.counted, report.iteration)
        self.updates.reports.clear()
        iteration = self.args.curr_iteration + 1
        found.append(("weight-version", self.weights.newest, iteration))
        rule = self.schedule.rule(self._logged_pipeline, self._microbatches)
        stages, batch = self._logged_pipeline.stages, self.interpreter.batch - 1
        late = (rule.mean_delay(batch, self._microbatches, stage) for stage in range(stages))
        delay = sum(late) / stages
        found.append(("gradient-delay", delay, iteration))
        return found
