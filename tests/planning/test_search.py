"""The search for layouts."""

from dataclasses import replace

import pytest

from megatron_async.planning import plan
from megatron_async.planning.candidates import candidate
from megatron_async.planning.devices import DEVICES
from megatron_async.planning.memory import ModelShape, Storage
from megatron_async.planning.search import Choice, Cluster, layouts, search
from megatron_async.planning.times import Rates

SHAPE = ModelShape(layers=8, hidden_size=1024, attention_heads=8, vocab_size=51200, seq_length=1024)
SCHEDULES = ["1f1b", "interleaved", "zb-h1", "fresh-2bw"]
CLUSTER = Cluster(
    gpus=8,
    node=4,
    memory_gib=79,
    reserve_gib=4,
    communicator_gib=0.3,
    rates=Rates.of(DEVICES["H100"], network_gb_s=50),
)


def found(cluster: Cluster = CLUSTER, storage: Storage | None = None) -> list[Choice]:
    return list(
        layouts(
            SHAPE,
            storage or Storage(optimizer="muon", distributed_optimizer=True),
            cluster,
            candidates=[candidate(name) for name in SCHEDULES],
            global_batch=32,
            micro_batch_sizes=(1, 2),
        )
    )


def test_every_layout_is_one_of_the_cluster() -> None:
    every = found()
    for choice in every:
        layout = choice.layout
        assert layout.tensor_parallel * layout.stages * layout.data_parallel == 8
        assert layout.tensor_parallel <= 4
        assert choice.micro_batch_size * choice.microbatches * layout.data_parallel == 32
        assert sum(layout.layers_per_stage) == 8
    shapes = {(c.layout.tensor_parallel, c.layout.stages) for c in every}
    assert {(1, 1), (1, 8), (4, 2), (2, 4)} <= shapes
    assert {choice.candidate.name for choice in every} == set(SCHEDULES)


def test_search_finds_what_simulating_everything_finds() -> None:
    every = found()
    times = [choice.simulated() for choice in every]
    for bound, simulated in zip(every, times, strict=True):
        assert simulated.time >= bound.bound * (1 - 1e-9)
    best = sorted(choice.time for choice in times)[:6]
    assert [choice.time for choice in search(every, top=6)] == pytest.approx(best)


def test_a_head_costs_the_last_stage_layers() -> None:
    # A head of 51200 x 1024 is as much work as some four layers: the last stage has none.
    choice = next(
        c
        for c in found()
        if (c.candidate.name, c.layout.stages, c.layout.tensor_parallel) == ("fresh-2bw", 4, 1)
    )
    assert choice.layout.layers_per_stage == [2, 3, 3, 0]


def test_what_does_not_fit_is_left_out() -> None:
    every = found()
    tight = max(choice.memory for choice in every) / 2
    cluster = replace(CLUSTER, memory_gib=tight / 2**30, reserve_gib=0, communicator_gib=0)
    fewer = found(cluster)
    assert fewer
    assert max(choice.memory for choice in fewer) <= tight
    assert found(replace(CLUSTER, memory_gib=0.1)) == []


def test_gradients_in_bf16_take_half() -> None:
    def memory(*, half: bool) -> int:
        storage = Storage(optimizer="muon", distributed_optimizer=True, grad_reduce_in_bf16=half)
        every = found(storage=storage)
        return next(c.memory for c in every if c.layout.stages == c.layout.tensor_parallel == 1)

    parameters = 8 * (12 * 1024**2 + 13 * 1024) + 51200 * 1024 + 1024 * 1024 + 2 * 1024
    assert memory(half=False) - memory(half=True) == 2 * parameters


def test_command(capsys: pytest.CaptureFixture[str]) -> None:
    flags = (
        "--search --gpus 8 --global-batch-size 32 --device H200 --num-layers 8 --hidden-size 1024 "
        "--num-attention-heads 8 --seq-length 1024 --top 2 --each --schedules fresh-2bw 1f1b"
    )
    assert plan.main(flags.split()) == 0
    out = capsys.readouterr().out
    assert out.count("\nfresh-2bw ") == out.count("\n1f1b ") == 2
    assert "The first: --tensor-model-parallel-size " in out
    assert plan.main([*flags.split(), "--memory-gib", "3"]) == 1
    assert "Nothing fits" in capsys.readouterr().out
