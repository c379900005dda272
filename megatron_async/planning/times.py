"""What the parts of a model take on a device: floating-point operations, bytes and messages.

Computation takes its operations over the rate that training reaches. What computes little takes
its bytes over the memory's bandwidth: the optimizer's step, the embedding. Collectives take what a
ring sends over the slowest link. Nothing here was measured on a GPU; overlap, kernel launches and
contention are left out.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from megatron_async.optimizers import OPTIMIZERS
from megatron_async.planning.devices import Device
from megatron_async.planning.memory import (
    Layout,
    ModelShape,
    ParameterCount,
    Storage,
    count_parameters,
)

__all__ = ["Part", "Rates", "forward_flops", "parts", "stage_parts"]

_MESSAGE_MS = 0.01
"""Before the first byte of a message between stages arrives."""
_NEWTON_SCHULZ = 5
"""Steps of Muon's orthogonalisation; Megatron's default."""


def forward_flops(shape: ModelShape, layout: Layout, stage: int, micro_batch_size: int) -> float:
    """Return the floating-point operations of one microbatch's forward on one rank of a stage.

    Counted: 2 for each weight of a matrix product and token, and causal attention at half of the
    full score matrix, as Megatron's throughput figure does.
    """
    layer, head = _forward_flops(shape)
    per_token = layout.layers_per_stage[stage] * layer
    if stage == layout.stages - 1:
        per_token += head
    return shape.seq_length * micro_batch_size * per_token / layout.tensor_parallel


def _forward_flops(shape: ModelShape) -> tuple[float, float]:
    """Per token, of a layer and of the head."""
    hidden = shape.hidden_size
    mlp = hidden * shape.ffn * (3 if shape.gated else 2)
    if shape.experts is not None:
        mlp = mlp * shape.experts_per_token + hidden * shape.experts
    attention = hidden * (2 * shape.query_width + 2 * shape.kv_width)
    scores = shape.seq_length * shape.query_width
    return 2.0 * (attention + mlp + scores), 2.0 * hidden * shape.vocab_size


@dataclass(frozen=True, kw_only=True)
class Rates:
    """What a machine does in a second.

    Attributes:
        tflops: 10^12 operations of a matrix product that training reaches.
        memory_gb_s: bandwidth of the memory, 10^9 bytes.
        link_gb_s: of the links between the ranks of a node, in each direction.
        network_gb_s: of those between stages and replicas.
    """

    tflops: float
    memory_gb_s: float
    link_gb_s: float
    network_gb_s: float

    @classmethod
    def of(cls, device: Device, *, network_gb_s: float) -> "Rates":
        """Those of a device."""
        return cls(
            tflops=device.peak_tflops * device.share,
            memory_gb_s=device.memory_gb_s,
            link_gb_s=device.link_gb_s,
            network_gb_s=network_gb_s,
        )

    def message_ms(self, bytes_: float) -> float:
        """Of a message between two stages."""
        return _MESSAGE_MS + bytes_ / self.network_gb_s / 1e6


@dataclass(frozen=True, kw_only=True)
class Part:
    """A layer, the embedding or the head, on one rank; milliseconds.

    Attributes:
        forward: of a microbatch.
        backward: likewise, with what is computed anew for it.
        optimizer: of a step.
        parameters: that it adds to the rank.
        experts: how many of them belong to experts, whose replicas are fewer.
    """

    forward: float
    backward: float
    optimizer: float
    parameters: int
    experts: int = 0

    def iteration(self, microbatches: int) -> float:
        """m (t_f + t_b) + t_opt."""
        return microbatches * (self.forward + self.backward) + self.optimizer


def parts(
    shape: ModelShape,
    layout: Layout,
    storage: Storage,
    rates: Rates,
    *,
    micro_batch_size: int,
    node: int = 8,
) -> list[Part]:
    """Return the model's parts in order: embedding, layers, head.

    Args:
        layout: its tensor, expert and data parallelism counts; the stages do not, except that a
            head that is tied is a copy unless there is one stage.
        node: ranks of a node. Tokens are sent to experts over the links in a node if all the ranks
            that share experts are on one.
    """
    tokens = shape.seq_length * micro_batch_size
    activation = 2.0 * tokens * shape.hidden_size  # bf16
    layer_flops, head_flops = _forward_flops(shape)
    tp = layout.tensor_parallel

    def compute(flops: float) -> float:
        return tokens * flops / tp / rates.tflops / 1e9

    # Two all-reduces over the ranks that share the layer, or as many gathers and scatters; those of
    # experts have each token once for each of its experts.
    copies = 1 if shape.experts is None else shape.experts_per_token
    shared = 2 * (1 + copies) * (tp - 1) / tp * activation / rates.link_gb_s / 1e6
    # Tokens go to their experts, and back.
    ep = layout.expert_parallel
    own_tokens = activation / (tp if layout.sequence_parallel else 1)
    gb_s = rates.link_gb_s if tp * ep <= node else rates.network_gb_s
    shared += 2 * copies * (ep - 1) / ep * own_tokens / gb_s / 1e6
    forward = compute(layer_flops) + shared
    again = forward if storage.recompute else 0.0
    few = Layout(
        stages=3,
        layers_per_stage=[0, 1, 0],
        tensor_parallel=tp,
        data_parallel=layout.data_parallel,
        expert_parallel=layout.expert_parallel,
        sequence_parallel=layout.sequence_parallel,
    )
    embedding_count, layer_count, head_count = (
        count_parameters(shape, few, stage) for stage in range(3)
    )
    head_parameters = head_count.total
    if layout.stages == 1 and shape.tied:
        head_parameters -= shape.vocab_size * shape.hidden_size // tp

    sharded = storage.distributed_optimizer
    replicas = layout.data_parallel if sharded else 1
    expert_replicas = layout.data_parallel // ep if sharded else 1

    def step(count: ParameterCount, parameters: int) -> float:
        """Bytes read and written: gradient, main parameter, state and weight."""
        states = OPTIMIZERS[storage.optimizer].state_bytes or (8, 8)
        others = parameters - count.matrices
        bytes_ = parameters * (4 + 2 * 4 + 2) + 2 * (
            states[0] * count.matrices + states[1] * others
        )
        time = bytes_ / rates.memory_gb_s / 1e6
        share = count.experts / parameters
        time *= (1 - share) / replicas + share / expert_replicas
        if count.matrices and "muon" in storage.optimizer:
            dense, experts = _newton_schulz_flops(shape, few)
            time += (dense / replicas + experts / expert_replicas) / rates.tflops / 1e9
        return time

    layer = Part(
        forward=forward,
        backward=2 * compute(layer_flops) + shared + again,
        optimizer=step(layer_count, layer_count.total),
        parameters=layer_count.total,
        experts=layer_count.experts,
    )
    touched = 2 * activation / rates.memory_gb_s / 1e6  # read and written
    embedding = Part(
        forward=touched,
        backward=2 * touched,
        optimizer=step(embedding_count, embedding_count.total),
        parameters=embedding_count.total,
    )
    # The fp32 logits are written and read about four times by the loss, and likewise backward.
    logits = 4 * 4.0 * tokens * shape.vocab_size / tp / rates.memory_gb_s / 1e6
    head = Part(
        forward=compute(head_flops) + logits,
        backward=2 * compute(head_flops) + logits,
        optimizer=step(head_count, head_parameters),
        parameters=head_parameters,
    )
    return [embedding, *[layer] * shape.layers, head]


def _newton_schulz_flops(shape: ModelShape, layout: Layout) -> tuple[float, float]:
    """Of one layer's matrices on a rank: without its experts', and of these.

    For m x n, m <= n, in each step two products of 2 m^2 n and one of 2 m^3. A rank has its own
    part of a matrix (Megatron's ``blockwise``).
    """
    hidden, tp = shape.hidden_size, layout.tensor_parallel
    wide = shape.ffn * (2 if shape.gated else 1)
    qkv = shape.query_width + 2 * shape.kv_width
    attention = [(qkv / tp, hidden), (hidden, shape.query_width / tp)]
    mlp = [(wide / tp, hidden), (hidden, shape.ffn / tp)]
    if shape.experts is None:
        return _newton_schulz([*attention, *mlp]), 0.0
    here = shape.experts // layout.expert_parallel
    router = (shape.experts, hidden)
    return _newton_schulz([*attention, router]), here * _newton_schulz(mlp)


def _newton_schulz(matrices: Sequence[tuple[float, float]]) -> float:
    total = 0.0
    for rows, columns in matrices:
        short, long = sorted((rows, columns))
        total += _NEWTON_SCHULZ * (4 * short**2 * long + 2 * short**3)
    return total


def stage_parts(all_parts: list[Part], split: list[tuple[int, int]]) -> list[Part]:
    """Return the sums of the parts of each stage, see
    :func:`~megatron_async.planning.partition.partition`."""
    return [
        Part(
            forward=sum(part.forward for part in all_parts[first:end]),
            backward=sum(part.backward for part in all_parts[first:end]),
            optimizer=sum(part.optimizer for part in all_parts[first:end]),
            parameters=sum(part.parameters for part in all_parts[first:end]),
            experts=sum(part.experts for part in all_parts[first:end]),
        )
        for first, end in split
    ]
