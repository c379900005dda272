"""The runtime of the asynchronous schedules: interprets action lists with Megatron's own steps.

The order of actions is not decided here but in the lists, which each schedule makes for itself. The
state of the pipeline (saved inputs and outputs, the received inputs) lives on between the calls
that Megatron makes once per iteration.

Source: megatron/core/pipeline_parallel/schedules.py,
``forward_backward_pipelining_without_interleaving``, whose steps, communication and bookkeeping of
gradient synchronisation these are.
"""

import contextlib
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import schedules as megatron_schedules
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.utils import get_model_config

from megatron_async.schedules.actions import UPDATES, Action, Kind
from megatron_async.weight_versions import WeightVersions

__all__ = ["InFlight", "Pipeline"]


@dataclass(slots=True)
class InFlight:
    """A microbatch between its forward and its backward on this stage."""

    batch: int
    microbatch: int
    num_microbatches: int
    """Of its batch; the loss was divided by it."""
    input: Any
    output: Any


class Pipeline(ABC):
    """The pipeline of one rank.

    Args:
        weights: the weight versions of the model chunk.
        complete_update: runs a ``COMPLETE_UPDATE`` that stands amid the computation.
        launch_update: runs a ``LAUNCH_UPDATE`` that stands amid the computation, given its batch.
        deferred: whether updates are launched at the end of a call and completed in the next.
        gather_ahead: complete updates earlier where there is room, see the action lists.
        reduce_late: launch updates in the next call, see the action lists.
        before_next_batch: called right before the first forward of the batch after the running
            one; the random state of that moment is what a resumed run has to start from.
        select_batch: called with the batch before each forward and backward of a microbatch;
            whatever is summed up per batch has to go to that one.
    """

    name: ClassVar[str]
    """What ``--pipeline-schedule`` calls it."""
    resumable: ClassVar[bool]
    """Whether a run goes on exactly where it was saved; otherwise it starts afresh from the newest
    weights."""

    def __init__(
        self,
        *,
        weights: WeightVersions,
        complete_update: Callable[[], None],
        launch_update: Callable[[int], None],
        deferred: bool,
        gather_ahead: bool = False,
        reduce_late: bool = False,
        before_next_batch: Callable[[], None] | None = None,
        select_batch: Callable[[int], None] | None = None,
    ) -> None:
        self.weights = weights
        self.batch = 0
        """Batch that the next call runs backward, counted from the start of the asynchronous
        segment."""
        self.in_flight: deque[InFlight] = deque()
        self.filled = False
        """Whether the pipeline holds microbatches of batch :attr:`batch`."""
        self.closing: list[Action] = []
        """The update actions that end the last call; the optimizer's step runs them."""
        self.total_num_tokens: torch.Tensor | None = None
        """Tokens of the last call's batch on the last stage (int scalar)."""
        self._complete_update = complete_update
        self._launch_update = launch_update
        self._deferred = deferred
        self._gather_ahead = gather_ahead
        self._reduce_late = reduce_late
        self._before_next_batch = before_next_batch
        self._select_batch = select_batch
        self._received: deque[Any] = deque()
        """Inputs that were received and not forwarded yet (None on the first stage)."""
        self._p2p: P2PCommunicator | None = None
        self._groups: Any = None

    @abstractmethod
    def actions(
        self,
        *,
        stages: int,
        stage: int,
        num_microbatches: int,
        next_num_microbatches: int,
        batches_left: int,
    ) -> list[Action]:
        """Return the list of the next call, whose updates at its end are the optimizer's step.

        Args:
            stages: p.
            stage: this rank's.
            num_microbatches: m of batch :attr:`batch`.
            next_num_microbatches: m of the batch after it.
            batches_left: see :meth:`__call__`.
        """

    def __call__(
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
        last = batches_left == 1
        actions = self.actions(
            stages=p2p.total_stages,
            stage=p2p.current_stage,
            num_microbatches=num_microbatches,
            next_num_microbatches=next_num_microbatches,
            batches_left=batches_left,
        )
        run = _Call(
            pipeline=self,
            forward_step_func=forward_step_func,
            data_iterator=_only(data_iterator),
            model=model,
            config=config,
            p2p=p2p,
            groups=self._groups,
            num_microbatches=num_microbatches,
            next_num_microbatches=next_num_microbatches,
            shapes=megatron_schedules.get_tensor_shapes(
                seq_length=seq_length,
                micro_batch_size=micro_batch_size,
                decoder_seq_length=decoder_seq_length,
                config=config,
                tp_group=self._groups.tp,
                cp_group=self._groups.cp,
            ),
        )
        if config.timers is not None:
            config.timers("forward-backward", log_level=1).start(
                barrier=config.barrier_with_L1_time
            )
        computing = len(actions)
        while actions[computing - 1].kind in UPDATES:
            computing -= 1
        run.perform(actions[:computing])
        self.closing = actions[computing:]
        self.total_num_tokens = run.total_num_tokens
        if last or not self._reduce_late:
            self.finalize(model, num_tokens=run.total_num_tokens, force_all_reduce=force_all_reduce)
        if config.timers is not None:
            config.timers("forward-backward").stop()
        self.batch += 1
        self.filled = not last
        return run.forward_data_store

    def drop(self) -> None:
        """Forget the microbatches in flight; the next call fills the pipeline anew."""
        self.in_flight.clear()
        self._received.clear()
        self.filled = False

    def _communicator(self, config: Any) -> P2PCommunicator:
        if config.batch_p2p_comm and config.batch_p2p_sync:
            raise RuntimeError(
                "megatron_async: config.batch_p2p_sync has to be False: it synchronises the whole "
                "device after every P2P operation, in-flight collectives of the update included"
            )
        if config.overlap_p2p_comm:
            raise RuntimeError(
                "megatron_async: config.overlap_p2p_comm belongs to the interleaved schedule; "
                f"{self.name} does not have it"
            )
        if self._p2p is None:
            self._p2p = P2PCommunicator(
                pp_group=parallel_state.get_pipeline_model_parallel_group(), config=config
            )
            self._groups = megatron_schedules._build_default_pg_collection()
        return self._p2p

    def finalize(
        self,
        model: Any,
        *,
        num_tokens: torch.Tensor | None = None,
        force_all_reduce: bool | None = False,
    ) -> None:
        """Run the stage's own gradient reductions; with a deferred update, nothing across stages.

        Args:
            model: the DDP-wrapped model chunk.
            num_tokens: of the batch on the last stage, for the per-token loss.
            force_all_reduce: as Megatron has it.
        """
        config = get_model_config(model)
        if config.finalize_model_grads_func is None:
            return
        per_token = config.calculate_per_token_loss and not self._deferred
        config.finalize_model_grads_func(
            [model],
            num_tokens if per_token else None,
            pg_collection=self._groups,
            force_all_reduce=force_all_reduce,
        )


class _Call:
    """One call of the pipeline: what Megatron passed, and how each kind of action is run."""

    def __init__(
        self,
        *,
        pipeline: Pipeline,
        forward_step_func: Callable[..., Any],
        data_iterator: Any,
        model: Any,
        config: Any,
        p2p: P2PCommunicator,
        groups: Any,
        num_microbatches: int,
        next_num_microbatches: int,
        shapes: Any,
    ) -> None:
        self.pipeline = pipeline
        self.forward_step_func = forward_step_func
        self.data_iterator = data_iterator
        self.model = model
        self.config = config
        self.p2p = p2p
        self.groups = groups
        self.num_microbatches = num_microbatches
        self.next_num_microbatches = next_num_microbatches
        self.shapes = shapes
        self.forward_data_store: list[Any] = []
        self.total_num_tokens = torch.zeros([], dtype=torch.int, device="cuda")
        self._batch = pipeline.batch
        self._output: Any = None
        self._output_grad: Any = None
        self._input_grad: Any = None

    def perform(self, actions: list[Action]) -> None:
        p2p, first, last = self.p2p, self.p2p.is_pp_first_stage, self.p2p.is_pp_last_stage
        pipeline = self.pipeline
        synchronised_in = max(
            (i for i, action in enumerate(actions) if action.kind is Kind.BACKWARD), default=-1
        )
        with contextlib.ExitStack() as unsynchronised:
            unsynchronised.enter_context(self._no_sync())
            for i, action in enumerate(actions):
                match action.kind:
                    case Kind.RECV_FORWARD:
                        pipeline._received.append(p2p.recv_forward(self.shapes, first))
                    case Kind.FORWARD:
                        self._forward(action)
                    case Kind.SEND_FORWARD:
                        p2p.send_forward(self._output, last)
                        self._release_output()
                    case Kind.SEND_FORWARD_RECV_BACKWARD:
                        self._output_grad = p2p.send_forward_recv_backward(
                            self._output, self.shapes, last
                        )
                        self._release_output()
                    case Kind.RECV_BACKWARD:
                        self._output_grad = p2p.recv_backward(self.shapes, last)
                    case Kind.BACKWARD:
                        if i == synchronised_in:
                            # Data-parallel reductions start in the batch's last backward.
                            unsynchronised.close()
                        self._backward(action)
                    case Kind.SEND_BACKWARD:
                        p2p.send_backward(self._input_grad, first)
                    case Kind.SEND_BACKWARD_RECV_FORWARD:
                        pipeline._received.append(
                            p2p.send_backward_recv_forward(self._input_grad, self.shapes, first)
                        )
                    case Kind.COMPLETE_UPDATE:
                        pipeline._complete_update()
                    case Kind.LAUNCH_UPDATE:
                        pipeline._launch_update(action.batch)
                    case Kind.UPDATE:
                        raise AssertionError("the whole update is the optimizer's step")

    def _no_sync(self) -> contextlib.AbstractContextManager[Any]:
        if self.config.no_sync_func is None:
            return contextlib.nullcontext()
        context: contextlib.AbstractContextManager[Any] = self.config.no_sync_func()
        return context

    def _forward(self, action: Action) -> None:
        pipeline = self.pipeline
        if action.batch > self._batch and action.microbatch == 0 and pipeline._before_next_batch:
            pipeline._before_next_batch()
        self._select(action)
        num_microbatches = (
            self.num_microbatches if action.batch == self._batch else self.next_num_microbatches
        )
        received = pipeline._received.popleft()
        output, num_tokens = megatron_schedules.forward_step(
            self.forward_step_func,
            self.data_iterator,
            self.model,
            num_microbatches,
            received,
            # Only the last stage fills it, and it never forwards the next batch ahead.
            self.forward_data_store,
            self.config,
            cp_group_size=self.groups.cp.size(),
            is_first_microbatch=action.microbatch == 0,
            current_microbatch=action.microbatch,
            is_last_stage=self.p2p.is_pp_last_stage,
        )
        self.total_num_tokens += num_tokens
        self._output = output
        pipeline.in_flight.append(
            InFlight(
                batch=action.batch,
                microbatch=action.microbatch,
                num_microbatches=num_microbatches,
                input=received,
                output=output,
            )
        )

    def _select(self, action: Action) -> None:
        self.pipeline.weights.compute_on(action.version)
        if self.pipeline._select_batch is not None:
            self.pipeline._select_batch(action.batch)

    def _release_output(self) -> None:
        megatron_schedules.deallocate_output_tensor(
            self._output, self.config.deallocate_pipeline_outputs
        )
        self._output = None

    def _backward(self, action: Action) -> None:
        pipeline = self.pipeline
        done = pipeline.in_flight.popleft()
        if (done.batch, done.microbatch) != (action.batch, action.microbatch):
            raise AssertionError(f"{action} found microbatch {done.microbatch} of {done.batch}")
        self._select(action)
        self._set_moe_loss_scale(done)
        self._input_grad = megatron_schedules.backward_step(
            done.input, done.output, self._output_grad, self.config
        )
        self._output_grad = None

    def _set_moe_loss_scale(self, done: InFlight) -> None:
        """Megatron keeps the auxiliary loss's scale in a global that each forward sets; the last
        forward was of another batch, perhaps of another number of microbatches."""
        config = self.config
        if getattr(config, "num_moe_experts", None) is None:
            return
        scale = megatron_schedules._get_moe_loss_scale(
            config, megatron_schedules.get_tensor_device(_only(done.output))
        )
        if not config.calculate_per_token_loss:
            scale = scale * self.groups.cp.size() / done.num_microbatches
        megatron_schedules.MoEAuxLossAutoScaler.set_loss_scale(scale)


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
