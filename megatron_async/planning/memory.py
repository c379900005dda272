"""What a stage keeps in memory, counted from the shape of the model.

Parameters are counted exactly as Megatron's GPT builds them. Weights, gradients, main parameters,
optimizer state and what asynchronous training adds follow from them to the byte (Megatron pads
its gradient buffers, which is not counted). Activations follow the formulas of Korthikanti et al.,
"Reducing Activation Recomputation in Large Transformer Models" (arXiv 2205.05198, table 2), that
megatron/training/theoretical_memory_usage.py uses too; they are an estimate.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields

from megatron_async.optimizers import OPTIMIZERS
from megatron_async.schedules.actions import Action, Kind

__all__ = [
    "Layout",
    "ModelShape",
    "ParameterCount",
    "StageMemory",
    "Storage",
    "check_fits",
    "count_parameters",
    "peak_in_flight",
    "stage_memory",
]


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """A GPT as Megatron's flags describe it. Defaults are Megatron's."""

    layers: int
    hidden_size: int
    attention_heads: int
    vocab_size: int
    """After Megatron's padding."""
    seq_length: int
    query_groups: int | None = None
    """None: as many as heads."""
    kv_channels: int | None = None
    """None: hidden size / heads."""
    ffn_hidden_size: int | None = None
    """None: 4 x hidden size (two thirds of it, in multiples of 64, if gated)."""
    gated: bool = False
    """SwiGLU."""
    bias: bool = True
    """Linear layers have a bias (absent with `--disable-bias-linear`)."""
    rms_norm: bool = False
    learned_positions: bool = True
    """One embedding row for each of `seq_length` positions; False for rotary embeddings."""
    tied: bool = True
    """Input embedding and output layer share their weight."""
    experts: int | None = None
    experts_per_token: int = 2

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, int) and not isinstance(value, bool) and value < 1:
                raise ValueError(f"{field.name} must be positive, got {value}")
        heads, groups = self.attention_heads, self.query_groups or self.attention_heads
        if self.kv_channels is None and self.hidden_size % heads:
            raise ValueError(
                f"--hidden-size {self.hidden_size} does not divide by {heads} heads; "
                "give --kv-channels"
            )
        if heads % groups:
            raise ValueError(f"{heads} heads do not divide into {groups} --num-query-groups")
        if self.experts is not None and self.experts_per_token > self.experts:
            raise ValueError(
                f"--moe-router-topk {self.experts_per_token} is more than {self.experts} experts"
            )

    @property
    def ffn(self) -> int:
        if self.ffn_hidden_size is not None:
            return self.ffn_hidden_size
        if self.gated:
            return int(4 * self.hidden_size * 2 / 3 / 64) * 64
        return 4 * self.hidden_size

    @property
    def query_width(self) -> int:
        return self.attention_heads * (self.kv_channels or self.hidden_size // self.attention_heads)

    @property
    def kv_width(self) -> int:
        groups = self.query_groups or self.attention_heads
        return self.query_width * groups // self.attention_heads


@dataclass(frozen=True, kw_only=True)
class Layout:
    """How the model is spread over ranks."""

    stages: int
    layers_per_stage: Sequence[int]
    tensor_parallel: int = 1
    data_parallel: int = 1
    expert_parallel: int = 1
    sequence_parallel: bool = False

    def __post_init__(self) -> None:
        if len(self.layers_per_stage) != self.stages:
            raise ValueError(f"{len(self.layers_per_stage)} layer counts for {self.stages} stages")
        if min(self.layers_per_stage) < 0:
            raise ValueError(f"a stage cannot have {min(self.layers_per_stage)} layers")
        if self.data_parallel % self.expert_parallel:
            raise ValueError(
                f"expert parallelism of {self.expert_parallel} does not divide data parallelism "
                f"of {self.data_parallel}"
            )


def check_fits(shape: ModelShape, layout: Layout) -> None:
    """Check that what is split divides, as Megatron does when it builds the model.

    Raises:
        ValueError: what does not divide, and by what.
    """
    tensor, expert = layout.tensor_parallel, layout.expert_parallel
    groups = shape.query_groups or shape.attention_heads
    for number, what in (
        (shape.attention_heads, "attention heads"),
        (shape.ffn, "of --ffn-hidden-size"),
        (shape.vocab_size, "of --vocab-size (after padding)"),
    ):
        if number % tensor:
            raise ValueError(f"{number} {what} do not divide into tensor parallelism of {tensor}")
    if groups % tensor and tensor % groups:
        raise ValueError(
            f"{groups} --num-query-groups are neither a multiple nor a divisor of tensor "
            f"parallelism of {tensor}"
        )
    if (shape.experts or expert) % expert:
        raise ValueError(
            f"{shape.experts} experts do not divide into expert parallelism of {expert}"
        )
    if layout.sequence_parallel and shape.seq_length % tensor:
        raise ValueError(
            f"--seq-length {shape.seq_length} does not divide into tensor parallelism of {tensor}, "
            "as --sequence-parallel needs"
        )


@dataclass(frozen=True, kw_only=True)
class ParameterCount:
    """Parameters on one rank of a stage."""

    matrices: int
    """Of the layers' linear maps, which Muon updates."""
    others: int
    """Embeddings, output layer, biases, norms, routers' biases."""
    experts: int = 0
    """How many of `matrices` and `others` belong to experts, which are spread over the
    expert-parallel ranks and whose optimizer state the other data-parallel ranks share."""
    expert_matrices: int = 0
    """How many of `experts` are of `matrices`."""

    @property
    def total(self) -> int:
        return self.matrices + self.others


def count_parameters(shape: ModelShape, layout: Layout, stage: int) -> ParameterCount:
    """Return the parameters of one tensor-parallel rank of a stage."""
    hidden, tp = shape.hidden_size, layout.tensor_parallel
    norm = hidden if shape.rms_norm else 2 * hidden
    qkv = shape.query_width + 2 * shape.kv_width
    fc1 = shape.ffn * (2 if shape.gated else 1)
    mlp_matrices = (hidden * fc1 + shape.ffn * hidden) // tp
    mlp_biases = (fc1 // tp + hidden) if shape.bias else 0
    matrices = (hidden * qkv + shape.query_width * hidden) // tp
    others = 2 * norm + ((qkv // tp + hidden) if shape.bias else 0)
    experts = expert_matrices = 0
    if shape.experts is None:
        matrices += mlp_matrices
        others += mlp_biases
    else:
        here = shape.experts // layout.expert_parallel
        matrices += here * mlp_matrices + hidden * shape.experts
        others += here * mlp_biases + (shape.experts if shape.bias else 0)
        experts = here * (mlp_matrices + mlp_biases)
        expert_matrices = here * mlp_matrices
    layers = layout.layers_per_stage[stage]
    matrices, others, experts = layers * matrices, layers * others, layers * experts
    vocabulary = shape.vocab_size * hidden // tp
    first, last = stage == 0, stage == layout.stages - 1
    if first:
        others += vocabulary + (shape.seq_length * hidden if shape.learned_positions else 0)
    if last:
        others += norm
        # A tied output layer on another stage than the input embedding is a copy of it.
        if not (shape.tied and first):
            others += vocabulary
    return ParameterCount(
        matrices=matrices,
        others=others,
        experts=experts,
        expert_matrices=layers * expert_matrices,
    )


@dataclass(frozen=True, kw_only=True)
class Storage:
    """What is kept for each parameter."""

    bf16: bool = True
    """bf16 weights with fp32 main parameters; else fp32 throughout."""
    optimizer: str = "adam"
    """Name of one whose state is known, see :class:`~megatron_async.optimizers.Optimizer`."""
    distributed_optimizer: bool = False
    """Main parameters, optimizer state, gradient copy and correction are sharded over the
    data-parallel ranks."""
    asynchronous: bool = False
    other_versions: int = 1
    """Weight versions beside the newest, if asynchronous."""
    deferred_update: bool = True
    correction_buffers: int = 0
    """Buffers of the delay correction."""
    second_grad_buffer: bool = False
    grad_reduce_in_bf16: bool = False
    """Gradients are accumulated and reduced in bf16 (`--grad-reduce-in-bf16`)."""
    recompute: bool = False
    """Full recompute: only each layer's input is kept."""
    dropout: bool = True
    """Megatron's default; without, no masks are kept."""
    fused_attention: bool = True
    """Flash attention or selective recompute: no attention scores are kept."""


@dataclass(frozen=True, kw_only=True)
class StageMemory:
    """Bytes on one rank of a stage."""

    weights: int
    gradients: int
    main_parameters: int
    optimizer_state: int
    second_version: int
    """The other weight version, in the model's precision; with PipeDream all the others."""
    gradient_copy: int
    """What a launched update holds until it is completed, fp32."""
    correction: int
    """The delay correction's buffers, fp32."""
    second_grad_buffer: int
    activations: int
    """Of the microbatches in flight at the peak. An estimate."""

    @property
    def total(self) -> int:
        return sum(getattr(self, field.name) for field in fields(self))

    @property
    def added(self) -> int:
        """What asynchronous training adds to the same stage with 1F1B."""
        return self.second_version + self.gradient_copy + self.correction + self.second_grad_buffer


def stage_memory(
    shape: ModelShape,
    layout: Layout,
    storage: Storage,
    *,
    stage: int,
    micro_batch_size: int,
    in_flight: float,
) -> StageMemory:
    """Return the bytes that one rank of a stage keeps.

    Args:
        in_flight: Microbatches whose activations of the whole stage are kept at the peak (see
            `peak_in_flight`); a fraction with interleaved stages.

    Raises:
        ValueError: the optimizer's state is not known.
    """
    count = count_parameters(shape, layout, stage)
    precision = 2 if storage.bf16 else 4
    grad_bytes = 2 if storage.grad_reduce_in_bf16 else 4
    state_bytes = OPTIMIZERS[storage.optimizer].state_bytes
    if state_bytes is None:
        raise ValueError(f"the state of {storage.optimizer} is not known")
    of_matrices, of_others = state_bytes
    dense_shards = layout.data_parallel if storage.distributed_optimizer else 1
    expert_shards = dense_shards // layout.expert_parallel if dense_shards > 1 else 1

    def sharded(of_matrices: float, of_others: float) -> int:
        """Bytes left here of so many a parameter that the distributed optimizer shards."""
        matrices, others = count.expert_matrices, count.experts - count.expert_matrices
        of_experts = of_matrices * matrices + of_others * others
        whole = of_matrices * count.matrices + of_others * count.others
        return round((whole - of_experts) / dense_shards + of_experts / expert_shards)

    asynchronous = storage.asynchronous
    deferred = asynchronous and storage.deferred_update
    # Of two buffers the one keeps still while the other accumulates.
    copies = deferred and not storage.second_grad_buffer
    return StageMemory(
        weights=precision * count.total,
        gradients=grad_bytes * count.total,
        main_parameters=sharded(4, 4) if storage.bf16 else 0,
        optimizer_state=sharded(of_matrices, of_others),
        second_version=precision * storage.other_versions * count.total if asynchronous else 0,
        gradient_copy=sharded(4, 4) if copies else 0,
        correction=sharded(*[4 * storage.correction_buffers] * 2) if asynchronous else 0,
        second_grad_buffer=grad_bytes * count.total
        if deferred and storage.second_grad_buffer
        else 0,
        activations=_activations(
            shape,
            layout,
            storage,
            stage=stage,
            micro_batch_size=micro_batch_size,
            in_flight=in_flight,
        ),
    )


def _activations(
    shape: ModelShape,
    layout: Layout,
    storage: Storage,
    *,
    stage: int,
    micro_batch_size: int,
    in_flight: float,
) -> int:
    tokens = shape.seq_length * micro_batch_size
    hidden, tp = shape.hidden_size, layout.tensor_parallel
    outside = tp if layout.sequence_parallel else 1
    # In bytes per token at 2 bytes a number. Table 2 has 10 h outside the tensor-parallel regions
    # and 24 h inside, 16 h of them for the 4 h wide MLP.
    if storage.recompute:
        layer = 2.0 * hidden / outside
    else:
        wide = shape.ffn * (6 if shape.gated else 4)
        if shape.experts is not None:
            wide *= shape.experts_per_token
        masks = 2.0 if storage.dropout else 0.0
        layer = (8.0 + masks) * hidden / outside + (8.0 * hidden + wide) / tp
        if not storage.fused_attention:
            # What the softmax makes, and with dropout its mask and what it leaves.
            scores = 5.0 if storage.dropout else 2.0
            layer += scores * shape.attention_heads * shape.seq_length / tp
    per_microbatch = tokens * layer * layout.layers_per_stage[stage]
    if stage == 0 and storage.dropout:
        per_microbatch += tokens * hidden / outside  # The mask of the embedding's dropout.
    if not storage.bf16:
        per_microbatch *= 2
    kept = per_microbatch * in_flight
    if stage == layout.stages - 1:
        # The output layer's input and the fp32 logits; on the last stage one microbatch at a time.
        kept += 4 * tokens * (hidden / outside + shape.vocab_size / tp)
    return round(kept)


def peak_in_flight(actions: Sequence[Action]) -> float:
    """Return how many microbatches a stage keeps activations of at the peak, in units of the whole
    stage (a microbatch of one of v model chunks counts 1 / v)."""
    chunks = 1 + max((action.chunk for action in actions), default=0)
    split = any(action.kind is Kind.BACKWARD_WEIGHT for action in actions)
    # What the weights' gradients need is kept until they are made.
    frees = Kind.BACKWARD_WEIGHT if split else Kind.BACKWARD
    now = peak = 0
    for action in actions:
        if action.kind is Kind.FORWARD:
            now += 1
            peak = max(peak, now)
        elif action.kind is frees:
            now -= 1
    return peak / chunks
