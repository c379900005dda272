"""Layouts of a model on a number of GPUs, the fastest first.

All combinations of tensor, pipeline, expert and data parallelism, microbatch size and schedule are
looked at. Layers are spread by the exact partition, among those splits that fit the memory. Each
gets a bound that no simulation of it can beat, and layouts are simulated in the order of their
bounds until no bound is below the times that were found: the result is that of simulating all of
them.
"""

import heapq
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

from megatron_async.planning.candidates import Candidate
from megatron_async.planning.memory import (
    Layout,
    ModelShape,
    Storage,
    peak_in_flight,
    stage_memory,
)
from megatron_async.planning.partition import layers_per_stage, partition
from megatron_async.planning.times import Part, Rates, parts, stage_parts
from megatron_async.schedules.schedule import Call, Pipeline, settled_calls
from megatron_async.schedules.simulator import Costs, simulate

__all__ = ["Choice", "Cluster", "Sizes", "layouts", "search"]

_SYNCHRONOUS_CALLS = 4
"""All iterations of a synchronous schedule are equal; a steady state needs so many."""


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Where it is to run.

    Attributes:
        gpus: number of ranks.
        node: ranks of a node; those that share a layer are on one.
        memory_gib: of a rank.
        reserve_gib: of that, for what is not counted: the context, the allocator's gaps,
            temporary tensors.
        communicator_gib: of each NCCL communicator.
        rates: of computation, memory and links.
    """

    gpus: int
    node: int
    memory_gib: float
    reserve_gib: float
    communicator_gib: float
    rates: Rates

    def room(self, layout: Layout) -> float:
        """Bytes of a rank for what is counted.

        A communicator each for the tensor-parallel ranks, the replicas, the stages' messages and
        the ranks of a replica; with expert parallelism for the ranks that share experts, and for
        the experts' replicas.
        """
        tensor, stages, data = layout.tensor_parallel, layout.stages, layout.data_parallel
        communicators = (tensor > 1) + (data > 1) + (stages > 1) + (tensor * stages > 1)
        if layout.expert_parallel > 1:
            communicators += 1 + (data > layout.expert_parallel)
        left = self.memory_gib - self.reserve_gib - communicators * self.communicator_gib
        return left * 2**30


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """To which a search is restricted; None: any.

    Attributes:
        tensor: ranks that share a layer.
        pipeline: stages.
        expert: ranks that share the experts.
    """

    tensor: Sequence[int] | None = None
    pipeline: Sequence[int] | None = None
    expert: Sequence[int] | None = None


@dataclass(frozen=True, kw_only=True)
class Choice:
    """One layout with one schedule.

    Attributes:
        candidate: the schedule.
        layout: stages, layers, tensor, expert and data parallelism.
        micro_batch_size: sequences.
        microbatches: m.
        costs: of its stages, milliseconds.
        bound: no iteration is shorter, milliseconds.
        memory: bytes of the fullest rank.
        delay: of a gradient in updates, mean over stages and microbatches.
        chunks: on each stage.
        time: of an iteration, milliseconds; the bound until it is simulated.
    """

    candidate: Candidate
    layout: Layout
    micro_batch_size: int
    microbatches: int
    costs: Costs
    bound: float
    memory: int
    delay: float
    chunks: int
    time: float

    def simulated(self) -> "Choice":
        """With the time that the simulator finds."""
        pipeline = self.candidate.pipeline(stages=self.layout.stages, chunks=self.chunks)
        schedule = self.candidate.schedule
        calls = _SYNCHRONOUS_CALLS
        if schedule.asynchronous:
            calls = settled_calls(schedule, pipeline, self.microbatches)
        lists = self.candidate.lists(pipeline, microbatches=self.microbatches, iterations=calls)
        return replace(self, time=simulate(lists, self.costs).iteration_time)


def search(found: Sequence[Choice], *, top: int) -> list[Choice]:
    """Return the fastest choices by simulated time; equals in the order given.

    Args:
        found: see :func:`layouts`.
        top: how many.
    """
    waiting = sorted(found, key=lambda choice: choice.bound)
    best: list[tuple[float, int, Choice]] = []  # a heap of the negative times
    for order, choice in enumerate(waiting):
        if len(best) == top and choice.bound >= -best[0][0]:
            break
        done = choice.simulated()
        heapq.heappush(best, (-done.time, -order, done))
        if len(best) > top:
            heapq.heappop(best)
    return [choice for _, _, choice in sorted(best, reverse=True)]


def layouts(
    shape: ModelShape,
    storage: Storage,
    cluster: Cluster,
    *,
    candidates: Sequence[Candidate],
    global_batch: int,
    micro_batch_sizes: Sequence[int] = (1, 2, 4, 8),
    chunks: int = 2,
    sizes: Sizes | None = None,
) -> Iterator[Choice]:
    """Return every layout that can be run and fits.

    Args:
        shape: the model.
        storage: what is kept for each parameter; what a schedule decides is set here.
        cluster: where.
        candidates: schedules to look at.
        global_batch: sequences.
        micro_batch_sizes: to try.
        chunks: of interleaved schedules.
        sizes: to look at.
    """
    for layout in _layouts(shape, cluster, sizes or Sizes()):
        for micro in micro_batch_sizes:
            microbatches, left = divmod(global_batch, micro * layout.data_parallel)
            if not left:
                yield from _with_schedules(
                    shape,
                    storage,
                    cluster,
                    candidates=candidates,
                    layout=layout,
                    micro=micro,
                    microbatches=microbatches,
                    chunks=chunks,
                )


def _layouts(shape: ModelShape, cluster: Cluster, sizes: Sizes) -> Iterator[Layout]:
    """All of them, without layers."""
    groups = shape.query_groups or shape.attention_heads
    for tensor in _divisors(min(cluster.node, cluster.gpus), sizes.tensor):
        if groups % tensor or shape.ffn % tensor or shape.attention_heads % tensor:
            continue
        if cluster.gpus % tensor:
            continue
        for stages in _divisors(cluster.gpus // tensor, sizes.pipeline):
            if stages > shape.layers + 2:
                continue
            data = cluster.gpus // tensor // stages
            # The ranks that share experts are replicas of everything else.
            for expert in _divisors(math.gcd(data, shape.experts or 1), sizes.expert):
                yield Layout(
                    stages=stages,
                    layers_per_stage=[0] * stages,
                    tensor_parallel=tensor,
                    data_parallel=data,
                    expert_parallel=expert,
                    sequence_parallel=tensor > 1,
                )


def _with_schedules(
    shape: ModelShape,
    storage: Storage,
    cluster: Cluster,
    *,
    candidates: Sequence[Candidate],
    layout: Layout,
    micro: int,
    microbatches: int,
    chunks: int,
) -> Iterator[Choice]:
    stages, rates = layout.stages, cluster.rates
    all_parts = parts(shape, layout, storage, rates, micro_batch_size=micro, node=cluster.node)
    times = [part.iteration(microbatches) for part in all_parts]
    most = cluster.room(layout)
    for candidate in candidates:
        schedule = candidate.schedule
        pipeline = candidate.pipeline(stages=stages, chunks=chunks)
        if stages == 1 and schedule.interleaved:
            continue
        peaks = _peaks(candidate, pipeline, microbatches)
        if peaks is None:
            continue
        rule = schedule.rule(pipeline, microbatches)
        room = _Room(
            shape=shape,
            layout=layout,
            micro_batch_size=micro,
            held=[
                replace(
                    storage,
                    asynchronous=schedule.asynchronous,
                    deferred_update=candidate.deferred,
                    other_versions=rule.kept(stage) - 1,
                )
                for stage in range(stages)
            ],
            peaks=peaks,
            most=most,
        )
        if schedule.interleaved:
            per_stage, uneven = divmod(shape.layers, stages)
            if uneven or per_stage % chunks:
                continue
            split = _even(per_stage, stages, len(all_parts))
            if not all(room.fits(stage, *part) for stage, part in enumerate(split)):
                continue
        else:
            try:
                split = partition(times, stages, fits=room.fits)
            except ValueError:
                continue
        layers = layers_per_stage(split)
        own = stage_parts(all_parts, split)
        used = chunks if schedule.interleaved else 1
        bound = _bound(candidate, own, microbatches, used)
        yield Choice(
            candidate=candidate,
            layout=replace(layout, layers_per_stage=layers),
            micro_batch_size=micro,
            microbatches=microbatches,
            costs=_costs(shape, layout, storage, rates, own, micro),
            bound=bound,
            memory=max(room.taken(stage, count) for stage, count in enumerate(layers)),
            delay=rule.mean_staleness(stages),
            chunks=used,
            time=bound,
        )


def _peaks(candidate: Candidate, pipeline: Pipeline, microbatches: int) -> list[float] | None:
    """Microbatches in flight on each stage; None if the schedule cannot run with these numbers."""
    schedule = candidate.schedule
    try:
        if schedule.problems(pipeline, microbatches):
            return None
        schedule.call(
            Call(
                pipeline=pipeline,
                stage=0,
                batch=0,
                microbatches=microbatches,
                next_microbatches=microbatches,
            )
        )
        # Behind the filling of the pipeline nothing is added, unless it is filled with batches.
        few = min(microbatches, 4 * pipeline.stages)
        if schedule.ahead(pipeline, 0, few) != schedule.ahead(pipeline, 0, microbatches):
            few = microbatches
        lists = candidate.lists(pipeline, microbatches=few, iterations=2)
    except ValueError:
        return None
    return [peak_in_flight(actions) for actions in lists]


@dataclass(frozen=True, kw_only=True)
class _Room:
    """What each stage holds with so many layers, and whether it may.

    Attributes:
        held: per stage, what is kept for each parameter.
        peaks: per stage, microbatches in flight.
        most: bytes of a rank.
    """

    shape: ModelShape
    layout: Layout
    micro_batch_size: int
    held: Sequence[Storage]
    peaks: Sequence[float]
    most: float
    counted: dict[tuple[int, int], int] = field(default_factory=dict)

    def taken(self, stage: int, layers: int) -> int:
        """Bytes of a rank."""
        key = (stage, layers)
        if key not in self.counted:
            spread = [0] * self.layout.stages
            spread[stage] = layers
            self.counted[key] = stage_memory(
                self.shape,
                replace(self.layout, layers_per_stage=spread),
                self.held[stage],
                stage=stage,
                micro_batch_size=self.micro_batch_size,
                in_flight=self.peaks[stage],
            ).total
        return self.counted[key]

    def fits(self, stage: int, first: int, end: int) -> bool:
        """As :func:`~megatron_async.planning.partition.partition` asks."""
        layers = end - first - (stage == 0) - (stage == self.layout.stages - 1)
        return layers >= 0 and self.taken(stage, layers) <= self.most


def _costs(
    shape: ModelShape,
    layout: Layout,
    storage: Storage,
    rates: Rates,
    own: Sequence[Part],
    micro: int,
) -> Costs:
    sent = 2.0 * shape.seq_length * micro * shape.hidden_size
    if layout.sequence_parallel:
        sent /= layout.tensor_parallel
    return Costs(
        forward=[part.forward for part in own],
        backward=[part.backward for part in own],
        optimizer=[part.optimizer for part in own],
        latency=rates.message_ms(sent) if layout.stages > 1 else 0.0,
        reduction=max(_reduction(part, layout, storage, rates) for part in own),
    )


def _reduction(part: Part, layout: Layout, storage: Storage, rates: Rates) -> float:
    """Milliseconds of a stage's gradients over its replicas, those of experts over theirs.

    Reduced and scattered, then gathered as bf16 weights; or reduced on all replicas.
    """
    gradient = 2 if storage.grad_reduce_in_bf16 else 4
    bytes_ = gradient + 2 if storage.distributed_optimizer else 2 * gradient
    data = layout.data_parallel
    groups = (
        (part.parameters - part.experts, data),
        (part.experts, data // layout.expert_parallel),
    )
    return sum(
        bytes_ * count * (replicas - 1) / replicas / rates.network_gb_s / 1e6
        for count, replicas in groups
    )


def _bound(candidate: Candidate, own: Sequence[Part], microbatches: int, chunks: int) -> float:
    """What the slowest stage does; with a flush also what others do before and behind it."""
    longest = ahead = 0.0
    schedule = candidate.schedule
    backward = 0.5 if schedule.split_backward else 1.0
    for part in own:
        fill = 0.0 if schedule.asynchronous else ahead / chunks
        longest = max(longest, fill + part.iteration(microbatches))
        ahead += part.forward + backward * part.backward
    return longest


def _even(per_stage: int, stages: int, count: int) -> list[tuple[int, int]]:
    borders = [0, *(1 + per_stage * stage for stage in range(1, stages)), count]
    return list(pairwise(borders))


def _divisors(number: int, among: Sequence[int] | None) -> list[int]:
    found = range(1, number + 1) if among is None else sorted(set(among))
    return [each for each in found if number % each == 0]
