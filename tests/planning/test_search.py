"""The search for layouts."""

import re
from dataclasses import replace

import pytest

from megatron_async.planning import check, plan
from megatron_async.planning.candidates import candidate
from megatron_async.planning.devices import DEVICES
from megatron_async.planning.memory import Layout, ModelShape, Storage, count_parameters
from megatron_async.planning.search import Choice, Cluster, Sizes, layouts, search
from megatron_async.planning.times import Rates, parts

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


MIXTURE = replace(
    SHAPE, experts=6, experts_per_token=2, query_groups=4, gated=True, bias=False, tied=False
)


def with_experts(sizes: Sizes | None = None) -> list[Choice]:
    return list(
        layouts(
            MIXTURE,
            Storage(optimizer="muon", distributed_optimizer=True),
            CLUSTER,
            candidates=[candidate("fresh-2bw")],
            global_batch=32,
            micro_batch_sizes=(1,),
            sizes=sizes,
        )
    )


def test_experts_are_shared_by_replicas() -> None:
    every = with_experts()
    sizes = {(c.layout.data_parallel, c.layout.expert_parallel) for c in every}
    # 6 experts are shared by 1 or 2 ranks, and these are replicas of all else.
    assert sizes == {(1, 1), (2, 1), (2, 2), (4, 1), (4, 2), (8, 1), (8, 2)}
    (whole, shared) = (
        next(c for c in every if c.layout.expert_parallel == ep and c.layout.data_parallel == 8)
        for ep in (1, 2)
    )
    # Three of the six experts are elsewhere: 2 + 2 bytes of weights, 4 of gradients; what is
    # sharded takes the same.
    expert = 3 * 1024 * MIXTURE.ffn
    assert whole.memory - shared.memory == 8 * 3 * 8 * expert
    assert shared.costs.reduction < whole.costs.reduction  # experts have half of the replicas
    # Tokens are sent.
    assert shared.costs.per_stage(1)[0][0] > whole.costs.per_stage(1)[0][0]


def test_tokens_for_experts_are_sent_over_the_network_between_nodes() -> None:
    def forward(*, node: int, experts: int = 2) -> float:
        layout = Layout(stages=1, layers_per_stage=[8], data_parallel=2, expert_parallel=experts)
        _, layer, *_ = parts(
            MIXTURE, layout, Storage(), CLUSTER.rates, micro_batch_size=1, node=node
        )
        return layer.forward

    # There and back, each token for two experts, half of them elsewhere; bf16.
    bytes_ = 2 * 2 * 1024 * 1024 * 2 / 2
    alone = forward(node=8, experts=1)
    assert forward(node=2) - alone == pytest.approx(bytes_ / 450e9 * 1e3)
    assert forward(node=1) - alone == pytest.approx(bytes_ / 50e9 * 1e3)


def test_sizes_restrict_the_search() -> None:
    some = with_experts(Sizes(tensor=[1], pipeline=[2, 4], expert=[2]))
    assert {(c.layout.tensor_parallel, c.layout.stages) for c in some} == {(1, 2), (1, 4)}
    assert {c.layout.expert_parallel for c in some} == {2}


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
    experts = [*flags.split(), *("--num-experts", "4", "--expert-model-parallel-size", "4")]
    assert plan.main([*experts, "--pipeline-model-parallel-size", "2"]) == 0
    out = capsys.readouterr().out
    assert "schedule   TP  PP  EP  DP  mbs" in out
    assert "--expert-model-parallel-size 4 --micro-batch-size" in out


CHECKED = (
    "--search --gpus 8 --global-batch-size 16 --device H100 --num-layers 5 --hidden-size 128 "
    "--num-attention-heads 4 --seq-length 128 --num-experts 4 --expert-model-parallel-size 2 "
    "--pipeline-model-parallel-size 4 --schedules fresh-2bw --check"
)


def test_the_fastest_is_built_by_megatron(capsys: pytest.CaptureFixture[str]) -> None:
    assert plan.main(CHECKED.split()) == 0
    out = capsys.readouterr().out
    built = re.findall(r"^stage (\d) +([\d,]+) +([\d,]+)$", out, re.MULTILINE)
    assert [int(stage) for stage, _, _ in built] == [0, 1, 2, 3]
    assert all(counted == there for _, counted, there in built)
    assert out.endswith("They are equal.\n")


@pytest.mark.parametrize("refused", [False, True])
def test_a_count_that_is_wrong_and_a_model_that_is_refused(
    refused: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def built(models: list[tuple[ModelShape, Layout]]) -> list[list[int]]:
        if refused:
            raise RuntimeError("Megatron did not build the model: why")
        [(shape, layout)] = models
        return [[count_parameters(shape, layout, s).total + s // 3 for s in range(4)]]

    monkeypatch.setattr(check, "built_parameters", built)
    assert plan.main(CHECKED.split()) == 1
    shown = capsys.readouterr()
    if refused:
        assert shown.err == "\n--check: Megatron did not build the model: why\n"
    else:
        assert "They differ: please report it." in shown.out


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--gpus 0", "--gpus must be positive, got 0"),
        ("--gpus 1000000007", "--gpus can be searched up to 131072"),
        ("--micro-batch-sizes 1 0", "--micro-batch-sizes must be positive, got 0"),
        ("--pipeline-model-parallel-size -2", "--pipeline-model-parallel-size must be positive"),
        ("--tflops nan", "--tflops must be positive, got nan"),
        ("--network-gb-s 0", "--network-gb-s must be positive"),
        ("--memory-gib -1", "--memory-gib must be positive"),
    ],
)
def test_refused(flags: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    model = "--num-layers 8 --hidden-size 1024 --num-attention-heads 8"
    search = f"--search --gpus 8 --global-batch-size 32 --device H100 {model} {flags}"
    with pytest.raises(SystemExit, match="2"):
        plan.main(search.split())
    assert message in capsys.readouterr().err
