"""Runs the action lists of one rank with Megatron's own steps and communication.

What is done in which order is not decided here but in the lists, which each schedule makes for
itself. For each kind of action there is a handler: those of computation and communication are
here, those of a batch's update are handed in. The state of the pipeline (saved inputs and outputs,
the received inputs) lives on between the calls that Megatron makes once per iteration.

Source: megatron/core/pipeline_parallel/schedules.py,
``forward_backward_pipelining_without_interleaving``, whose steps, communication and bookkeeping of
gradient synchronisation these are.
"""

import contextlib
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.utils import get_model_config

from megatron_async.megatron import pipeline as megatron_pipeline
from megatron_async.runtime.links import Links
from megatron_async.runtime.run import run
from megatron_async.schedules.actions import COMMUNICATION, COMPUTE, REDUCTIONS, Action, Kind
from megatron_async.schedules.schedule import Call, Pipeline, Schedule, made_by_all_stages
from megatron_async.weights.versions import WeightVersions

__all__ = ["Handler", "InFlight", "Interpreter"]

type Handler = Callable[[Action], None]

_BEFORE_STEP = COMPUTE | COMMUNICATION | REDUCTIONS
"""What runs in the forward-backward function; what a list has behind the last of these is the
optimizer's step."""


@dataclass(slots=True)
class InFlight:
    """A microbatch between its forward and its backward on this stage."""

    batch: int
    microbatch: int
    num_microbatches: int
    """Of its batch; the loss was divided by it."""
    input: Any
    output: Any


@dataclass(slots=True)
class _Arguments:
    """What Megatron passed to the running call."""

    forward_step_func: Callable[..., Any]
    data_iterator: Any
    model: Any
    config: Any
    num_microbatches: int
    next_num_microbatches: int
    shapes: Any
    force_all_reduce: bool | None


class Interpreter:
    """The pipeline of one rank.

    Args:
        schedule: makes the lists.
        pipeline: what they are made for.
        weights: the weight versions of the model chunk.
        updates: the handlers of a batch's update and of the gathers.
        links: for lists with messages that are not waited for.
        after_reduction: called with the batch when its gradients are reduced.
        before_batch: called with a batch right before its first forward; the random state of that
            moment is what a resumed run has to start the batch from.
        select_batch: called with the batch before each forward and backward of a microbatch;
            whatever is summed up per batch has to go to that one.
    """

    def __init__(
        self,
        *,
        schedule: Schedule,
        pipeline: Pipeline,
        weights: WeightVersions,
        updates: Mapping[Kind, Handler],
        links: Links | None = None,
        after_reduction: Callable[[int], None] | None = None,
        before_batch: Callable[[int], None] | None = None,
        select_batch: Callable[[int], None] | None = None,
    ) -> None:
        self.schedule = schedule
        self.pipeline = pipeline
        self.weights = weights
        self.batch = 0
        """Batch that the next call runs backward, counted from the start of the asynchronous
        segment."""
        self.in_flight: deque[InFlight] = deque()
        self.filled = False
        """Whether the pipeline holds microbatches of batch :attr:`batch`."""
        self.total_num_tokens: torch.Tensor | None = None
        """Tokens of the last call's batch on the last stage (int scalar)."""
        self.version_between_calls = 0
        """The newest version that is complete on every stage once what ends the last call was run,
        without a wait that the lists do not have."""
        self._start = 0
        """The batch with which the pipeline was filled last."""
        self._closing: list[Action] = []
        """What ends the last call; the optimizer's step runs it."""
        self._reduced = -1
        """The last batch whose gradients are reduced."""
        self._links = links
        self._after_reduction = after_reduction
        self._before_batch = before_batch
        self._select_batch = select_batch
        self._received: deque[Any] = deque()
        """Inputs that were received and not forwarded yet (None on the first stage)."""
        self._p2p: Any = None
        self._groups: Any = None
        self._now: Any = None
        """The :class:`_Arguments` of the running or last call."""
        self._made_by_all: dict[tuple[bool, bool, int, int], bool] = {}
        """Of calls by what they differ in, see :func:`made_by_all_stages`."""
        self._losses: list[Any] = []
        self._tokens: Any = None
        self._output: Any = None
        self._output_grad: Any = None
        self._input_grad: Any = None
        self._unsynchronised = contextlib.ExitStack()
        """The context in which backwards do not start to reduce gradients."""
        self._handlers: dict[Kind, Handler] = {
            Kind.RECV_FORWARD: self._recv_forward,
            Kind.FORWARD: self._forward,
            Kind.SEND_FORWARD: self._send_forward,
            Kind.SEND_FORWARD_RECV_BACKWARD: self._send_forward_recv_backward,
            Kind.RECV_BACKWARD: self._recv_backward,
            Kind.BACKWARD: self._backward,
            Kind.SEND_BACKWARD: self._send_backward,
            Kind.SEND_BACKWARD_RECV_FORWARD: self._send_backward_recv_forward,
            Kind.START_RECV_FORWARD: self._start_recv_forward,
            Kind.FINISH_RECV_FORWARD: self._finish_recv_forward,
            Kind.START_SEND_FORWARD: self._start_send_forward,
            Kind.START_RECV_BACKWARD: self._start_recv_backward,
            Kind.FINISH_RECV_BACKWARD: self._finish_recv_backward,
            Kind.START_SEND_BACKWARD: self._start_send_backward,
            Kind.START_REDUCTION: self._start_reduction,
            Kind.FINISH_REDUCTION: self._finish_reduction,
            **updates,
        }

    def run_call(
        self,
        *,
        forward_step_func: Callable[..., Any],
        data_iterator: Any,
        model: Any,
        num_microbatches: int,
        next_num_microbatches: int,
        batches_left: int,
        seq_length: int,
        micro_batch_size: int,
        decoder_seq_length: int | None = None,
        force_all_reduce: bool | None = False,
    ) -> list[Any]:
        """Run batch :attr:`batch` backward and what the list has of later ones forward.

        Takes what Megatron passes to its forward-backward function, and:

        Args:
            next_num_microbatches: number of microbatches of the batch after this one.
            batches_left: number of batches to the end of the run that is known, this one included;
                with the last one the pipeline is left empty.

        Returns:
            What Megatron's function returns: the reduced losses, one entry per microbatch, on the
            last stage; an empty list elsewhere.

        Raises:
            ValueError: a number of microbatches that the schedule cannot run with.
            RuntimeError: ``batch_p2p_sync`` is on.
        """
        model = _only(model)
        config = get_model_config(model)
        p2p = self._communicator(config)
        if not self.filled:
            self._start = self.batch
        call = Call(
            pipeline=self.pipeline,
            stage=p2p.current_stage,
            batch=self.batch,
            microbatches=num_microbatches,
            next_microbatches=next_num_microbatches,
            start=self._start,
            batches_left=batches_left,
        )
        actions = self.schedule.call(call)
        self._now = _Arguments(
            forward_step_func=forward_step_func,
            data_iterator=_only(data_iterator),
            model=model,
            config=config,
            num_microbatches=num_microbatches,
            next_num_microbatches=next_num_microbatches,
            shapes=megatron_pipeline.tensor_shapes(
                seq_length=seq_length,
                micro_batch_size=micro_batch_size,
                decoder_seq_length=decoder_seq_length,
                config=config,
                groups=self._groups,
            ),
            force_all_reduce=force_all_reduce,
        )
        self._losses = []
        self._tokens = torch.zeros([], dtype=torch.int, device="cuda")
        if config.timers is not None:
            config.timers("forward-backward", log_level=1).start(
                barrier=config.barrier_with_L1_time
            )
        step_from = len(actions)
        while actions[step_from - 1].kind not in _BEFORE_STEP:
            step_from -= 1
        with self._unsynchronised:
            if config.no_sync_func is not None:
                self._unsynchronised.enter_context(config.no_sync_func())
            self._perform(actions[:step_from])
        self._closing = actions[step_from:]
        # Only forwards read it. Held until the process ends, it would keep a data loader's workers
        # alive, and with --exit-signal-handler these do not end at SIGTERM: the exit would hang.
        self._now.data_iterator = None
        self.total_num_tokens = self._tokens
        if config.timers is not None:
            config.timers("forward-backward").stop()
        self.version_between_calls = self.batch + 1 if self._is_made_by_all(call) else self.batch
        self.batch += 1
        self.filled = batches_left != 1
        if not self.filled and self._links is not None:
            self._links.drain()
        return self._losses

    def run_step(self) -> None:
        """Run what ends the call's list: the optimizer's step."""
        closing, self._closing = self._closing, []
        self._perform(closing)

    def finish_reduction(self, batch: int) -> None:
        """Finish the reduction of a batch's gradients now, wherever it stands in the lists."""
        self._finish_reduction(
            Action(stage=self._p2p.current_stage, kind=Kind.FINISH_REDUCTION, batch=batch)
        )

    def _is_made_by_all(self, call: Call) -> bool:
        key = (call.first, call.last, call.microbatches, call.next_microbatches)
        if key not in self._made_by_all:
            self._made_by_all[key] = made_by_all_stages(self.schedule, call)
        return self._made_by_all[key]

    def _perform(self, actions: list[Action]) -> None:
        for action in actions:
            self._handlers[action.kind](action)

    def _communicator(self, config: Any) -> Any:
        if config.batch_p2p_comm and config.batch_p2p_sync:
            raise RuntimeError(
                "megatron_async: config.batch_p2p_sync has to be False: it synchronises the whole "
                "device after every P2P operation, in-flight collectives of the update included"
            )
        if config.overlap_p2p_comm:
            raise RuntimeError(
                "megatron_async: config.overlap_p2p_comm belongs to the interleaved schedule; "
                f"{self.schedule.name} does not have it"
            )
        if self._p2p is None:
            self._p2p = P2PCommunicator(
                pp_group=parallel_state.get_pipeline_model_parallel_group(), config=config
            )
            self._groups = megatron_pipeline.group_collection()
        return self._p2p

    # Communication

    def _recv_forward(self, action: Action) -> None:
        first = self._p2p.is_pp_first_stage
        self._received.append(self._p2p.recv_forward(self._now.shapes, first))

    def _send_forward(self, action: Action) -> None:
        self._p2p.send_forward(self._output, self._p2p.is_pp_last_stage)
        self._release_output()

    def _send_forward_recv_backward(self, action: Action) -> None:
        self._output_grad = self._p2p.send_forward_recv_backward(
            self._output, self._now.shapes, self._p2p.is_pp_last_stage
        )
        self._release_output()

    def _recv_backward(self, action: Action) -> None:
        last = self._p2p.is_pp_last_stage
        self._output_grad = self._p2p.recv_backward(self._now.shapes, last)

    def _send_backward(self, action: Action) -> None:
        self._p2p.send_backward(self._input_grad, self._p2p.is_pp_first_stage)

    def _send_backward_recv_forward(self, action: Action) -> None:
        self._received.append(
            self._p2p.send_backward_recv_forward(
                self._input_grad, self._now.shapes, self._p2p.is_pp_first_stage
            )
        )

    def _start_recv_forward(self, action: Action) -> None:
        assert self._links is not None
        self._links.activations.start_receive(self._now.shapes, self._now.config.pipeline_dtype)

    def _finish_recv_forward(self, action: Action) -> None:
        assert self._links is not None
        with run.waiting():
            received = self._links.activations.finish_receive()
        self._received.append([None] if received is None else received)

    def _start_send_forward(self, action: Action) -> None:
        assert self._links is not None
        if not self._p2p.is_pp_last_stage:
            self._links.activations.start_send(_listed(self._output))
            self._release_output()

    def _start_recv_backward(self, action: Action) -> None:
        assert self._links is not None
        self._links.gradients.start_receive(self._now.shapes, self._now.config.pipeline_dtype)

    def _finish_recv_backward(self, action: Action) -> None:
        assert self._links is not None
        with run.waiting():
            received = self._links.gradients.finish_receive()
        self._output_grad = [None] if received is None else received

    def _start_send_backward(self, action: Action) -> None:
        assert self._links is not None
        if not self._p2p.is_pp_first_stage:
            self._links.gradients.start_send(_listed(self._input_grad))

    def _release_output(self) -> None:
        megatron_pipeline.release_output(self._output, self._now.config)
        self._output = None

    # Computation

    def _forward(self, action: Action) -> None:
        now = self._now
        if action.microbatch == 0 and self._before_batch is not None:
            self._before_batch(action.batch)
        self._select(action)
        num_microbatches = (
            now.num_microbatches if action.batch == self.batch else now.next_num_microbatches
        )
        received = self._received.popleft()
        self._output, num_tokens = megatron_pipeline.forward_step(
            now.forward_step_func,
            now.data_iterator,
            now.model,
            num_microbatches=num_microbatches,
            received=received,
            # Only the last stage fills it, and it never forwards the next batch ahead.
            losses=self._losses,
            config=now.config,
            groups=self._groups,
            microbatch=action.microbatch,
            is_last_stage=self._p2p.is_pp_last_stage,
        )
        self._tokens += num_tokens
        self.in_flight.append(
            InFlight(
                batch=action.batch,
                microbatch=action.microbatch,
                num_microbatches=num_microbatches,
                input=received,
                output=self._output,
            )
        )

    def _backward(self, action: Action) -> None:
        config = self._now.config
        done = self.in_flight.popleft()
        if (done.batch, done.microbatch) != (action.batch, action.microbatch):
            raise AssertionError(f"{action} found microbatch {done.microbatch} of {done.batch}")
        self._select(action)
        self.weights.before_backward(action.batch, action.microbatch)
        # The last forward was of another batch, perhaps of another number of microbatches.
        megatron_pipeline.set_auxiliary_loss_scales(
            _only(done.output),
            num_microbatches=done.num_microbatches,
            config=config,
            groups=self._groups,
        )
        self._input_grad = megatron_pipeline.backward_step(
            done.input, done.output, self._output_grad, config
        )
        self._output_grad = None

    def _select(self, action: Action) -> None:
        self.weights.compute_on(action.version)
        if self._select_batch is not None:
            self._select_batch(action.batch)

    # The stage's own reductions

    def _start_reduction(self, action: Action) -> None:
        self._unsynchronised.close()

    def _finish_reduction(self, action: Action) -> None:
        """Reduce the gradients over the stage's own ranks; with a deferred update, nothing across
        stages."""
        if action.batch <= self._reduced:
            return  # Finished early, for an evaluation or a checkpoint.
        self._reduced = action.batch
        now, config = self._now, self._now.config
        if config.finalize_model_grads_func is None:
            return
        if self._select_batch is not None:
            self._select_batch(action.batch)
        # What Megatron passed belongs to the running batch.
        own = action.batch == self.batch
        per_token = config.calculate_per_token_loss and not self.pipeline.deferred
        config.finalize_model_grads_func(
            [now.model],
            self._tokens if per_token else None,
            pg_collection=self._groups,
            force_all_reduce=now.force_all_reduce if own else False,
        )
        if self._after_reduction is not None:
            self._after_reduction(action.batch)


def _listed(value: Any) -> list[torch.Tensor]:
    return value if isinstance(value, list) else [value]


def _only(value: Any) -> Any:
    """Megatron passes a list of model chunks (of iterators) or the only one."""
    if isinstance(value, list):
        if len(value) != 1:
            raise ValueError(
                f"an asynchronous schedule runs one model chunk per rank, got {len(value)}: drop "
                "the flags of virtual pipeline stages (--num-layers-per-virtual-pipeline-stage and "
                "the like)"
            )
        return value[0]
    return value
