"""Counted memory."""

from typing import Any

import pytest

from megatron_async.planning.built import built_parameters
from megatron_async.planning.candidates import candidate
from megatron_async.planning.memory import (
    Layout,
    ModelShape,
    StageMemory,
    Storage,
    count_parameters,
    peak_in_flight,
    stage_memory,
)
from tests.planning.models import LLAMA_LIKE, MODELS, TINY, layout_of, shape_of
from tests.schedules.lists import Lists


def test_parameters_are_those_that_megatron_builds() -> None:
    models = [(shape_of(model), layout_of(parallel)) for model, parallel in MODELS.values()]
    counted = [
        [count_parameters(shape, layout, stage).total for stage in range(layout.stages)]
        for shape, layout in models
    ]
    assert counted == built_parameters(models)


def memory(*, stage: int = 1, in_flight: float = 3, **storage: Any) -> StageMemory:
    shape = ModelShape(**TINY, vocab_size=512)
    layout = Layout(stages=4, layers_per_stage=[2] * 4, data_parallel=4)
    return stage_memory(
        shape,
        layout,
        Storage(**storage),
        stage=stage,
        micro_batch_size=2,
        in_flight=in_flight,
    )


def test_asynchronous_training_adds_what_it_says() -> None:
    parameters = 25408  # Of a middle stage, as Megatron builds it.
    synchronous = memory()
    assert synchronous.weights == 2 * parameters
    assert synchronous.gradients == 4 * parameters
    assert synchronous.main_parameters == 4 * parameters
    assert synchronous.optimizer_state == 8 * parameters
    assert synchronous.added == 0
    deferred = memory(asynchronous=True, correction_buffers=1)
    assert deferred.second_version == 2 * parameters
    assert deferred.gradient_copy == 4 * parameters
    assert deferred.correction == 4 * parameters
    assert deferred.second_grad_buffer == 0
    assert deferred.total == synchronous.total + deferred.added
    adaptive = memory(asynchronous=True, correction_buffers=2)
    assert adaptive.added - deferred.added == 4 * parameters
    assert memory(asynchronous=True, deferred_update=False).added == 2 * parameters
    assert memory(asynchronous=True, bf16=False).second_version == 4 * parameters
    stashing = memory(asynchronous=True, deferred_update=False, other_versions=3)
    assert stashing.added == stashing.second_version == 3 * 2 * parameters
    assert memory(bf16=False).main_parameters == 0
    second_buffer = memory(asynchronous=True, second_grad_buffer=True)
    assert second_buffer.gradient_copy == 0
    assert second_buffer.added == 6 * parameters


def test_distributed_optimizer_shards_what_it_shards() -> None:
    whole = memory(asynchronous=True, correction_buffers=1)
    shard = memory(asynchronous=True, correction_buffers=1, distributed_optimizer=True)
    for part in ("main_parameters", "optimizer_state", "gradient_copy", "correction"):
        assert getattr(shard, part) == getattr(whole, part) / 4
    for part in ("weights", "gradients", "second_version", "activations"):
        assert getattr(shard, part) == getattr(whole, part)


def test_expert_state_is_sharded_over_fewer_ranks() -> None:
    shape = shape_of({**LLAMA_LIKE, "experts": 4})
    layout = Layout(stages=1, layers_per_stage=[8], data_parallel=4, expert_parallel=2)
    count = count_parameters(shape, layout, 0)
    held = stage_memory(
        shape,
        layout,
        Storage(distributed_optimizer=True),
        stage=0,
        micro_batch_size=1,
        in_flight=1,
    )
    dense = count.total - count.experts
    assert held.main_parameters == pytest.approx(4 * (dense / 4 + count.experts / 2), abs=1)


def test_muon_keeps_adams_state_for_what_is_no_matrix() -> None:
    matrices = 2 * 12 * 32 * 32
    assert memory(optimizer="muon").optimizer_state == 4 * matrices + 8 * (25408 - matrices)


def test_activations() -> None:
    # 34 s b h bytes a layer (arXiv 2205.05198, table 2), 2 layers, 3 microbatches in flight.
    assert memory().activations == 34 * 64 * 2 * 32 * 2 * 3
    assert memory(bf16=False).activations == 2 * memory().activations
    scores = 5 * 4 * 64 * 64 * 2
    assert memory(fused_attention=False).activations == (34 * 64 * 2 * 32 + scores) * 2 * 3
    # Without dropout two masks of a byte a layer, and three of the five scores.
    assert memory(dropout=False).activations == 32 * 64 * 2 * 32 * 2 * 3
    bare = memory(fused_attention=False, dropout=False).activations
    assert bare == (32 * 64 * 2 * 32 + scores * 2 // 5) * 2 * 3
    assert memory(recompute=True).activations == 2 * 64 * 2 * 32 * 2 * 3
    logits = 4 * 64 * 2 * (32 + 512)
    assert memory(stage=3, in_flight=1).activations == 34 * 64 * 2 * 32 * 2 + logits


def lists_of(name: str, *, stages: int, microbatches: int, iterations: int) -> Lists:
    planned = candidate(name)
    pipeline = planned.pipeline(stages=stages)
    return planned.lists(pipeline, microbatches=microbatches, iterations=iterations)


@pytest.mark.parametrize(
    ("name", "microbatches", "iterations", "expected"),
    [
        ("pipedream-2bw", 4, 3, [4, 3, 2, 1]),
        ("1f1b", 2, 3, [2, 2, 2, 1]),
        ("pipedream", 2, 6, [7, 5, 3, 1]),
    ],
)
def test_peak_in_flight(name: str, microbatches: int, iterations: int, expected: list[int]) -> None:
    lists = lists_of(name, stages=4, microbatches=microbatches, iterations=iterations)
    assert [peak_in_flight(actions) for actions in lists] == expected


def test_peak_in_flight_of_model_chunks() -> None:
    lists = lists_of("interleaved", stages=4, microbatches=8, iterations=2)
    # 6 + 4 chunk microbatches of warm-up and one more on the first stage.
    assert peak_in_flight(lists[0]) == 11 / 2
