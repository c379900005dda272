"""What an asynchronous schedule is expected to change for a run: time, delay, memory.

Everything follows from the schedule's record and from the formulas of ``megatron-async plan``.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from megatron_async.config.validation.rule import Subject
from megatron_async.config.validation.schedule import least_microbatches
from megatron_async.planning.memory import (
    Layout,
    ModelShape,
    StageMemory,
    Storage,
    check_fits,
    peak_in_flight,
    stage_memory,
)
from megatron_async.schedules.one_f_one_b import ONE_F_ONE_B
from megatron_async.schedules.schedule import Pipeline, Schedule, action_lists, settled_calls
from megatron_async.schedules.simulator import Costs, simulate

__all__ = ["Forecast", "check_model", "forecast"]

_MOST_ACTIONS: Final = 8192
"""Microbatches times stages above which nothing is simulated, which would take seconds."""


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """The numbers of a run.

    Attributes:
        microbatches: m, of the smallest batch.
        ideal_gain: (m + p - 1) / m, iterations of 1F1B over those without any bubble.
        simulated_gain: 1F1B over the schedule in the simulator of ``plan``, with a backward of two
            forwards and no time for optimizer and messages; None where that would take long.
        delays: per stage, by how many updates a gradient is late, a mean over microbatches.
        memory: per stage, what each rank keeps; None if ``plan`` has no formulas for the model.
        more_activations: per stage, bytes of the microbatches that it has in flight beyond those of
            1F1B; empty without ``memory``.
        uncounted: why there is no memory.
    """

    microbatches: int
    ideal_gain: float
    simulated_gain: float | None
    delays: tuple[float, ...]
    memory: tuple[StageMemory, ...] | None
    more_activations: tuple[int, ...] = ()
    uncounted: str = ""

    @property
    def delay(self) -> float:
        """Mean over the stages."""
        return sum(self.delays) / len(self.delays)

    def added(self, stage: int) -> int:
        """Bytes that asynchronous training adds to 1F1B on each rank of a stage."""
        if self.memory is None:
            raise ValueError(f"no formulas for {self.uncounted}")
        return self.memory[stage].added + self.more_activations[stage]


def forecast(subject: Subject) -> Forecast:
    """Compute the numbers of an accepted asynchronous run.

    Raises:
        ValueError: the run is synchronous.
    """
    record = subject.config.schedule_record
    if record is None:
        raise ValueError("the run is synchronous")
    stages, microbatches = subject.stages, least_microbatches(subject)
    memory, uncounted = _memory(subject, record, microbatches)
    plain = _memory(subject, ONE_F_ONE_B, microbatches)[0]
    return Forecast(
        microbatches=microbatches,
        ideal_gain=(microbatches + stages - 1) / microbatches,
        simulated_gain=_simulated(subject, record, microbatches),
        delays=tuple(subject.delays(microbatches)),
        memory=memory,
        more_activations=tuple(
            ours.activations - theirs.activations
            for ours, theirs in zip(memory or (), plain or (), strict=True)
        ),
        uncounted=uncounted,
    )


def check_model(subject: Subject) -> None:
    """Check that heads, groups, experts and the vocabulary divide, which Megatron finds out while
    it builds the model; of models without formulas nothing is known.

    Raises:
        ValueError: what does not.
    """
    if not _unknown(subject):
        check_fits(_shape(subject), _layout(subject))


def _simulated(subject: Subject, record: Schedule, microbatches: int) -> float | None:
    if subject.stages * microbatches > _MOST_ACTIONS:
        return None
    plain = Pipeline(stages=subject.stages, deferred=False)
    return _time(ONE_F_ONE_B, plain, microbatches) / _time(record, subject.pipeline, microbatches)


def _time(schedule: Schedule, pipeline: Pipeline, microbatches: int) -> float:
    calls = settled_calls(schedule, pipeline, microbatches)
    lists = action_lists(schedule, pipeline, [microbatches] * calls)
    return simulate(lists, Costs(forward=1.0, backward=2.0)).iteration_time


def _memory(
    subject: Subject, record: Schedule, microbatches: int
) -> tuple[tuple[StageMemory, ...] | None, str]:
    if reason := _unknown(subject):
        return None, reason
    settings = subject.config
    pipeline = subject.pipeline
    if not record.asynchronous:
        pipeline = Pipeline(stages=pipeline.stages, deferred=False)
    shape, layout = _shape(subject), _layout(subject)
    rule = record.rule(pipeline, microbatches)
    correction = settings.correction_record
    buffers = 0 if correction is None else correction.buffers_with(settings.correction_settings)
    calls = settled_calls(record, pipeline, microbatches)
    lists = action_lists(record, pipeline, [microbatches] * calls)
    return tuple(
        stage_memory(
            shape,
            layout,
            Storage(
                bf16=bool(subject.get("bf16")),
                optimizer=subject.get("optimizer"),
                distributed_optimizer=bool(subject.get("use_distributed_optimizer")),
                asynchronous=True,
                other_versions=rule.kept(stage) - 1,
                deferred_update=settings.deferred_update,
                correction_buffers=buffers,
                second_grad_buffer=settings.second_grad_buffer,
                dropout=any(subject.get(f"{which}_dropout") for which in ("hidden", "attention")),
                recompute=subject.get("recompute_granularity") == "full",
            ),
            stage=stage,
            micro_batch_size=int(subject.get("micro_batch_size")),
            in_flight=peak_in_flight(lists[stage]),
        )
        for stage in range(subject.stages)
    ), ""


def _unknown(subject: Subject) -> str:
    """What of the model or run has no formulas."""
    optimizer = subject.optimizer
    unknown = {
        "multi-latent attention": subject.get("multi_latent_attention"),
        "shared experts": subject.get("moe_shared_expert_intermediate_size"),
        "MoE in some layers only": subject.get("num_experts") is not None
        and subject.get("moe_layer_freq", 1) not in (1, [1] * int(subject.get("num_layers"))),
        "experts with tensor parallelism of their own": subject.get("num_experts") is not None
        and subject.get("expert_tensor_parallel_size", 1)
        != subject.get("tensor_model_parallel_size", 1),
        "multi-token prediction": subject.get("mtp_num_layers"),
        "heterogeneous layers": subject.get("heterogeneous_layers_config_path")
        or subject.get("heterogeneous_layers_config_encoded_json"),
        "emulated stages": subject.emulated is not None,
        f"the state of {subject.get('optimizer')}": optimizer is None
        or optimizer.state_bytes is None,
        "a vocabulary whose size the tokenizer decides (give --vocab-size)": subject.get(
            "padded_vocab_size"
        )
        is None
        and subject.get("vocab_size") is None,
    }
    return ", ".join(name for name, present in unknown.items() if present)


def _shape(subject: Subject) -> ModelShape:
    get = subject.get
    return ModelShape(
        layers=int(get("num_layers")),
        hidden_size=get("hidden_size"),
        attention_heads=get("num_attention_heads"),
        vocab_size=_vocabulary(subject),
        seq_length=get("max_position_embeddings") or get("seq_length"),
        query_groups=get("num_query_groups") if get("group_query_attention") else None,
        kv_channels=get("kv_channels"),
        ffn_hidden_size=get("moe_ffn_hidden_size") or get("ffn_hidden_size"),
        gated=bool(get("swiglu")),
        bias=bool(get("add_bias_linear", True)),
        rms_norm=get("normalization") == "RMSNorm",
        learned_positions=get("position_embedding_type") == "learned_absolute",
        tied=subject.tied,
        experts=get("num_experts"),
        experts_per_token=get("moe_router_topk", 2),
    )


def _vocabulary(subject: Subject) -> int:
    """Rows of the embedding after Megatron's padding."""
    padded = subject.get("padded_vocab_size")
    if padded is not None:
        return int(padded)
    size = int(subject.get("vocab_size"))
    if not subject.get("pad_vocab_size", True):
        return size
    divisor = int(subject.get("make_vocab_size_divisible_by", 128))
    multiple: int = divisor * int(subject.get("tensor_model_parallel_size", 1))
    return int(math.ceil(size / multiple) * multiple)


def _layout(subject: Subject) -> Layout:
    return Layout(
        stages=subject.stages,
        layers_per_stage=_layers(subject),
        tensor_parallel=int(subject.get("tensor_model_parallel_size", 1)),
        data_parallel=subject.replicas * int(subject.get("context_parallel_size", 1)),
        expert_parallel=int(subject.get("expert_model_parallel_size", 1)),
        sequence_parallel=bool(subject.get("sequence_parallel")),
    )


def _layers(subject: Subject) -> Sequence[int]:
    """Layers on each stage."""
    layout = subject.get("pipeline_model_parallel_layout")
    stages, layers = subject.stages, int(subject.get("num_layers"))
    if layout is not None:
        if isinstance(layout, str):
            from megatron.core.transformer.pipeline_parallel_layer_layout import (
                PipelineParallelLayerLayout,
            )

            layout = PipelineParallelLayerLayout.from_str(layout, stages)
        return [
            int(layout.get_num_layers_to_build(vp_stage=0, pp_rank=stage))
            for stage in range(stages)
        ]
    first = subject.get("decoder_first_pipeline_num_layers")
    last = subject.get("decoder_last_pipeline_num_layers")
    if first is None and last is None:
        embedding = bool(subject.get("account_for_embedding_in_pipeline_split"))
        loss = bool(subject.get("account_for_loss_in_pipeline_split"))
        share = (layers + embedding + loss) // stages
        counts = [share] * stages
        counts[0] -= embedding
        counts[-1] -= loss
        return counts
    middle = stages - (first is not None) - (last is not None)
    rest = layers - (first or 0) - (last or 0)
    counts = [rest // middle] * middle if middle else []
    return [
        *([first] if first is not None else []),
        *counts,
        *([last] if last is not None else []),
    ]
