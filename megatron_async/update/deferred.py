"""The update of a batch, in two halves, so that no stage waits for another.

``launch`` stands at the end of a batch's call: it copies the stage's gradients out of the
accumulation buffers, which Megatron zeroes first thing in the next iteration, and posts what has to
cross stages (the partial gradient norm, the tied embedding's gradient). ``complete`` stands almost
a whole batch later, right before the new version is needed: it reads the total, clips by it, and
lets Megatron's unmodified optimizer step.

What is exact: the numbers are those of Megatron's own step, ``ChainedOptimizer.step`` in
megatron/core/optimizer/optimizer.py and the second half of ``finalize_model_grads`` in
megatron/core/distributed/finalize_model_grads.py, up to the order of summation.
"""

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from megatron_async.megatron.data_parallel import ddp_buffers
from megatron_async.megatron.optimizers import (
    gradient_attribute,
    gradients_for_norm,
    inner_optimizers,
    main_parameters_of,
    owns_layer_wise,
    parameters_for_norm,
    statistics_groups,
)
from megatron_async.update.exchange import Exchange, StageExchange
from megatron_async.update.process_groups import (
    Ranks,
    gather_ranks,
    new_groups,
    shared_or_new_groups,
)
from megatron_async.weights.versions import WeightVersions

__all__ = ["DeferredUpdate", "Scheduled", "UpdateReport", "scheduled"]

type Scheduled = list[tuple[dict[str, Any], dict[str, Any]]]
"""(parameter group, the values that the scheduler had set)."""

_SQUARES, _ZEROS, _PARAMETERS, _TOKENS, _REST = range(5)
"""Slots of the message; behind them what the caller wants summed, ``counted`` before
``stagewise``."""


def scheduled(optimizer: Any) -> Scheduled:
    """Return what Megatron's scheduler has set for the batch that is running."""
    return [
        (group, {key: group[key] for key in ("lr", "weight_decay") if key in group})
        for group in optimizer.param_groups
    ]


@dataclass(frozen=True, kw_only=True)
class UpdateReport:
    """What is known of a completed update."""

    batch: int
    """The batch whose gradient made it, counted from the start of the asynchronous segment."""
    iteration: int
    """The iteration (1 is the first) in which that batch ran backward."""
    succeeded: bool = True
    grad_norm: float = 0.0
    """Before clipping, of the batch-averaged gradient."""
    num_zeros: int | None = None
    params_norm: float | None = None
    """Of the weights before the update: all that its launch can know of."""
    counted: list[float] | None = None
    """Sums over all ranks of what they passed to the launch, if they did."""
    stagewise: list[float] | None = None
    """Sums over the stages of what they passed to the launch, if they did."""


@dataclass(slots=True)
class _Pending:
    """An update between its launch and its completion."""

    batch: int
    iteration: int
    gradients: list[tuple[torch.Tensor, torch.Tensor]]
    """(parameter of the torch optimizer, its gradient)."""
    hyperparameters: Scheduled
    exchange: Exchange
    counted: bool
    stagewise: bool
    works: list[Any] = field(default_factory=list)


class DeferredUpdate:
    """Launches and completes the updates of one rank.

    Args:
        optimizer: Megatron's optimizer; its ``prepare_grads`` and ``step_with_ready_grads`` are
            used as they are.
        model_chunk: the DDP-wrapped model chunk, whose gradient buffers are copied from.
        weights: the versions that completed updates make.
        tied_embedding: this rank's copy of the embedding that the first and the last stage share;
            None where there is none, or where both uses are on this rank.
        num_counted: how many numbers of each rank are summed over all ranks, per batch.
        num_stagewise: how many numbers of each stage are summed over the stages, per batch.
        norm_scope: "global" clips by the norm over all stages, "stage" by the stage's own.
        calculate_per_token_loss: divide the gradients by the number of tokens of the batch.
        count_zeros: report the number of zeros in the gradients.
        norm_parameters: report the norm of the weights before the update.
        copy_gradients: copy them out of the accumulation buffers, which hold another batch's by the
            time of the completion; False if those keep still until then.
        timeout_minutes: of the process groups made here.
        waiting: entered around each wait for another stage, to measure it.
    """

    def __init__(
        self,
        *,
        optimizer: Any,
        model_chunk: Any,
        weights: WeightVersions,
        tied_embedding: torch.nn.Parameter | None,
        num_counted: int = 0,
        num_stagewise: int = 0,
        norm_scope: str = "global",
        calculate_per_token_loss: bool = False,
        count_zeros: bool = False,
        norm_parameters: bool = False,
        copy_gradients: bool = True,
        timeout_minutes: float | None = None,
        waiting: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self._waiting = waiting
        self._optimizer = optimizer
        self._leaves = inner_optimizers(optimizer)
        self._attribute = gradient_attribute(optimizer)
        self._weights = weights
        self._norm_scope = norm_scope
        self._per_token = calculate_per_token_loss
        self._count_zeros = count_zeros
        self._norm_parameters = norm_parameters
        self.frozen_squares = 0.0
        """Sum of squares of the weights that are not trained, over all ranks."""
        self._num_counted = num_counted
        self._num_stagewise = num_stagewise
        self._pending: _Pending | None = None
        self._accumulators = {
            buffer.grad_data.untyped_storage().data_ptr()
            for buffer in ddp_buffers(model_chunk)
            if copy_gradients
        }
        self._copies: dict[torch.Tensor, torch.Tensor] = {}
        self._tied_embedding: Any = tied_embedding
        self._tied_main = main_parameters_of(tied_embedding, self._leaves)
        self._layer_wise = tied_embedding is not None and owns_layer_wise(optimizer)

        pipeline = gather_ranks(parallel_state.get_pipeline_model_parallel_group())
        self._stage = parallel_state.get_pipeline_model_parallel_rank()
        stage_ranks = _stage_of_each_rank()
        leaf_ranks = [gather_ranks(group) for group in statistics_groups(optimizer)]
        mine = [r for r in range(dist.get_world_size()) if stage_ranks[r] == self._stage]
        inside = [tuple(r for r in ranks if r in set(mine)) for ranks in leaf_ranks]
        embedding: Ranks = (dist.get_rank(),)
        if tied_embedding is not None:
            embedding = (pipeline[0], pipeline[-1])
        distinct = list(dict.fromkeys(inside))
        # Each family of groups is made by all ranks in this order; a rank that wants fewer kinds
        # of statistics asks for groups of itself.
        kinds = _most_kinds(len(distinct))
        distinct += [(dist.get_rank(),)] * (kinds - len(distinct))
        [column] = new_groups([tuple(pipeline)], timeout_minutes=timeout_minutes, on_host=True)
        # A kernel of it waits on the last stage until the first has finished the batch.
        [self._embedding_group] = new_groups(
            [embedding], timeout_minutes=timeout_minutes, few_blocks=True
        )
        inner = shared_or_new_groups([tuple(mine), *distinct], timeout_minutes=timeout_minutes)
        self._across = StageExchange(
            group=column,
            ranks=tuple(pipeline),
            stage=self._stage,
            size=_REST + num_counted + num_stagewise,
        )
        self._stage_group = inner[0]
        self._inside_groups = dict(zip(distinct, inner[1:], strict=True))
        self._leaf_inside = inside

    @property
    def pending(self) -> bool:
        """Whether an update was launched and not completed."""
        return self._pending is not None

    @property
    def pending_batch(self) -> int:
        """The batch of the launched update; -1 if there is none."""
        return -1 if self._pending is None else self._pending.batch

    @torch.no_grad()
    def launch(
        self,
        *,
        batch: int,
        iteration: int,
        hyperparameters: Scheduled,
        num_tokens: torch.Tensor | None = None,
        counted: torch.Tensor | None = None,
        stagewise: torch.Tensor | None = None,
    ) -> None:
        """Take the gradients of ``batch`` and post what crosses stages.

        Args:
            hyperparameters: what the scheduler had set when the batch ran; it may be the next
                batch's turn already.
            num_tokens: tokens of the batch on this rank's last stage (int scalar), zero elsewhere.
            counted: ``num_counted`` numbers of this rank (1-D, float64), or None on all ranks.
            stagewise: ``num_stagewise`` numbers of this stage (1-D, float64), the same on all of
                its ranks that differ in the stage alone from a rank of another; or None on all.

        Raises:
            RuntimeError: the update before was not completed.
        """
        if self._pending is not None:
            raise RuntimeError("an update was launched before the last one was completed")
        self._optimizer.prepare_grads()
        gradients = self._take_gradients()
        works: list[Any] = []
        if self._embedding_group is not None:
            works = [
                dist.all_reduce(gradient, group=self._embedding_group, async_op=True)
                for gradient in self._tied_gradients(gradients)
            ]
        message = self._partial_sums(num_tokens, counted, stagewise)
        if self._stage == 0 and self._embedding_group is not None:
            # The last stage posted its part before this rank's last backward could start, so the
            # compute stream waits for the transfer alone.
            for work in works:
                work.wait()
            works = []
            message[:_TOKENS] += self._stage_sums(tied=True, parameters=self._norm_parameters)
        exchange = self._across.post(message)
        for parameter, _ in gradients:
            self._set_gradient(parameter, None)
        self._pending = _Pending(
            batch=batch,
            iteration=iteration,
            gradients=gradients,
            hyperparameters=hyperparameters,
            exchange=exchange,
            works=works,
            counted=counted is not None,
            stagewise=stagewise is not None,
        )

    @torch.no_grad()
    def complete(self) -> UpdateReport | None:
        """Step the optimizer with the launched gradients and publish the version they make.

        Waits for the first stage's answer, which in the steady state has long been there.

        Returns:
            The report; None if nothing was launched.

        Raises:
            RuntimeError: the gradient norm is NaN or Inf, and the version is not published; or
                another stage is gone.
        """
        pending, self._pending = self._pending, None
        if pending is None:
            return None
        with self._waiting():
            sums = pending.exchange.wait()
            for work in pending.works:
                work.wait()
        scale = 1.0
        if self._per_token:
            scale = 1.0 / max(sums[_TOKENS], 1.0)
        squares = sums[_SQUARES] if self._norm_scope == "global" else self._own_squares(pending)
        norm = math.sqrt(squares) * scale if squares >= 0 else math.nan
        if not math.isfinite(norm):
            # Whatever --no-check-for-nan-in-loss-and-grad says: that spares synchronisations of the
            # device, and this costs none.
            raise RuntimeError(
                f"rank {dist.get_rank()}, iteration {pending.iteration}: the gradient norm is "
                f"{norm}. The weights made from it were not published and no checkpoint holds them."
            )
        clip = self._optimizer.config.clip_grad
        if clip > 0.0:
            scale *= min(1.0, clip / (norm + 1.0e-6))
        if scale != 1.0 and pending.gradients:
            torch._foreach_mul_([gradient for _, gradient in pending.gradients], scale)
        succeeded = self._step(pending)
        behind_counted = _REST + self._num_counted
        return UpdateReport(
            batch=pending.batch,
            iteration=pending.iteration,
            succeeded=succeeded,
            grad_norm=norm,
            num_zeros=int(sums[_ZEROS]) if self._count_zeros else None,
            params_norm=math.sqrt(max(sums[_PARAMETERS], 0.0) + self.frozen_squares)
            if self._norm_parameters
            else None,
            counted=sums[_REST:behind_counted] if pending.counted else None,
            stagewise=sums[behind_counted:] if pending.stagewise else None,
        )

    def _step(self, pending: _Pending) -> bool:
        for parameter, gradient in pending.gradients:
            self._set_gradient(parameter, gradient)
        scheduled = [
            {key: group[key] for key in values} for group, values in pending.hyperparameters
        ]
        for group, values in pending.hyperparameters:
            group.update(values)
        try:
            with self._weights.next_version():
                return bool(self._optimizer.step_with_ready_grads())
        finally:
            for (group, _), values in zip(pending.hyperparameters, scheduled, strict=True):
                group.update(values)
            for parameter, _ in pending.gradients:
                self._set_gradient(parameter, None)

    def _set_gradient(self, parameter: torch.Tensor, gradient: torch.Tensor | None) -> None:
        setattr(parameter, self._attribute, gradient)

    def _take_gradients(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Copy every gradient that lies in an accumulation buffer; the others are ours already."""
        taken: list[tuple[torch.Tensor, torch.Tensor]] = []
        sources: list[torch.Tensor] = []
        targets: list[torch.Tensor] = []
        for leaf in self._leaves:
            for parameter in leaf.get_parameters():
                gradient = getattr(parameter, self._attribute, None)
                if gradient is None:
                    continue
                if gradient.untyped_storage().data_ptr() in self._accumulators:
                    copy = self._copies.get(parameter)
                    if copy is None:
                        copy = self._copies[parameter] = torch.empty_like(gradient)
                    sources.append(gradient)
                    targets.append(copy)
                    gradient = copy
                    self._set_gradient(parameter, copy)
                taken.append((parameter, gradient))
        if sources:
            torch._foreach_copy_(targets, sources)
        return taken

    def _tied_gradients(
        self, gradients: list[tuple[torch.Tensor, torch.Tensor]]
    ) -> list[torch.Tensor]:
        """Return what the first and the last stage sum, the same pieces on both."""
        if not self._layer_wise:
            return [gradient for p, gradient in gradients if id(p) in self._tied_main]
        # The layer-wise optimizer may give the two copies to different data-parallel ranks, so all
        # of them sum the whole gradient, as Megatron does.
        assert self._tied_embedding is not None
        whole = self._tied_embedding.main_grad.float().clone()
        for i, (parameter, _) in enumerate(gradients):
            if id(parameter) in self._tied_main:
                gradients[i] = (parameter, whole)
                self._set_gradient(parameter, whole)
        return [whole]

    def _partial_sums(
        self,
        num_tokens: torch.Tensor | None,
        counted: torch.Tensor | None,
        stagewise: torch.Tensor | None,
    ) -> torch.Tensor:
        """Return this stage's numbers, the same on all of its ranks that hold the same parameters.

        Blocks only on ranks of this stage. The tied embedding's gradient is left out: it is not
        summed yet.
        """
        behind_counted = _REST + self._num_counted
        message = torch.zeros(
            behind_counted + self._num_stagewise,
            dtype=torch.float64,
            device=torch.cuda.current_device(),
        )
        message[:_TOKENS] = self._stage_sums(tied=False, parameters=self._norm_parameters)
        # Ranks of one tensor-parallel group have the same tokens; count them once.
        if (
            self._per_token
            and num_tokens is not None
            and parallel_state.get_tensor_model_parallel_rank() == 0
        ):
            message[_TOKENS] = num_tokens.to(torch.float64)
        if counted is not None:
            message[_REST:behind_counted] = counted
        if self._stage_group is not None and (self._per_token or counted is not None):
            dist.all_reduce(message[_TOKENS:behind_counted], group=self._stage_group)
        if stagewise is not None:
            message[behind_counted:] = stagewise
        return message

    def _stage_sums(self, *, tied: bool, parameters: bool = False) -> torch.Tensor:
        """Return [sum of squares, number of zeros] of the gradients and the sum of squares of the
        newest weights (0 unless `parameters`), summed over the ranks of this stage that Megatron
        sums over: of the tied embedding, or of all others."""
        device = torch.cuda.current_device()
        total = torch.zeros(_TOKENS, dtype=torch.float64, device=device)
        sums: dict[Ranks, torch.Tensor] = {}
        for leaf, ranks in zip(self._leaves, self._leaf_inside, strict=True):
            part = sums.setdefault(ranks, torch.zeros_like(total))
            own = [p for p in leaf.get_parameters() if (id(p) in self._tied_main) == tied]
            if parameters:
                part[_PARAMETERS] += self._parameter_squares(leaf, own)
            gradients = gradients_for_norm(leaf, own)
            if not gradients:
                continue
            part[_SQUARES] += _squares(gradients)
            if self._count_zeros:
                part[_ZEROS] += sum(g.numel() - torch.count_nonzero(g) for g in gradients)
        for ranks, part in sums.items():
            group = self._inside_groups[ranks]
            if group is not None:
                dist.all_reduce(part, group=group)
            total += part
        return total

    def _parameter_squares(self, leaf: Any, parameters: list[torch.Tensor]) -> torch.Tensor | float:
        """Return this rank's sum of squares of the newest version of an optimizer's parameters."""
        # In 16 bits they are fp32 copies of the newest version; else they follow the model's.
        before = self._weights.selected
        self._weights.select(self._weights.newest)
        try:
            counted = parameters_for_norm(leaf, parameters)
            return _squares(counted) if counted else 0.0
        finally:
            self._weights.select(before)

    def _own_squares(self, pending: _Pending) -> float:
        """The stage's own sum of squares, the tied embedding's summed gradient included."""
        for parameter, gradient in pending.gradients:
            self._set_gradient(parameter, gradient)
        return float((self._stage_sums(tied=False) + self._stage_sums(tied=True))[0])


def _squares(tensors: list[torch.Tensor]) -> torch.Tensor:
    # In fp32, also of gradients in bf16 (--main-grads-dtype).
    return torch.stack(torch._foreach_norm(tensors, dtype=torch.float32)).double().square().sum()


def _stage_of_each_rank() -> list[int]:
    stages: list[int] = [0] * dist.get_world_size()
    dist.all_gather_object(stages, parallel_state.get_pipeline_model_parallel_rank())
    return stages


def _most_kinds(mine: int) -> int:
    counts: list[int] = [0] * dist.get_world_size()
    dist.all_gather_object(counts, mine)
    return max(counts)
