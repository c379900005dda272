"""Planning: counted memory, predicted times, drawings. Run as a script it prints the numbers of
parameters of the models that Megatron builds, as JSON."""

import csv
import io
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from megatron_async.planning import plan, timeline
from megatron_async.planning.candidates import TITLES, build_lists, delays_of
from megatron_async.planning.memory import (
    Layout,
    ModelShape,
    Storage,
    count_parameters,
    peak_in_flight,
    stage_memory,
)
from megatron_async.planning.plan import forward_flops, predict
from megatron_async.schedules.simulator import Costs, simulate
from megatron_async.schedules.validator import validate

TINY: dict[str, Any] = {"layers": 8, "hidden_size": 32, "attention_heads": 4, "seq_length": 64}
LLAMA_LIKE: dict[str, Any] = {
    "query_groups": 2,
    "bias": False,
    "gated": True,
    "learned_positions": False,
    "tied": False,
}
MODELS: dict[str, tuple[dict[str, Any], dict[str, int]]] = {
    "tied, PP 4": ({}, {"stages": 4}),
    "tied, PP 1": ({}, {"stages": 1}),
    "untied, PP 1, wide heads": ({"tied": False, "kv_channels": 12}, {"stages": 1}),
    "llama-like, TP 2, PP 2": (
        {**LLAMA_LIKE, "ffn_hidden_size": 96},
        {"stages": 2, "tensor_parallel": 2},
    ),
    "biases, TP 2, PP 2": ({}, {"stages": 2, "tensor_parallel": 2}),
    "experts, EP 2, PP 2": (
        {**LLAMA_LIKE, "experts": 4},
        {"stages": 2, "expert_parallel": 2, "data_parallel": 2},
    ),
    "experts with biases": ({"experts": 4}, {"stages": 1}),
}


def shape_of(options: dict[str, Any]) -> ModelShape:
    return ModelShape(**{**TINY, "vocab_size": 512, **options})


def layout_of(options: dict[str, int]) -> Layout:
    stages = options["stages"]
    return Layout(layers_per_stage=[8 // stages] * stages, **options)


def megatron_counts() -> dict[str, list[int]]:
    """Build every stage of every model, on a process group that only pretends to have ranks."""
    import torch
    import torch.distributed as dist
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.transformer_config import TransformerConfig
    from torch.testing._internal.distributed.fake_pg import FakeStore

    new_group = dist.new_group
    torch.Tensor.cuda = lambda self, *_, **__: self
    torch.cuda.current_device = lambda: torch.device("cpu")
    dist.new_group = lambda *a, **k: new_group(*a, **{**k, "backend": None})

    counts: dict[str, list[int]] = {}
    for name, (model, parallel) in MODELS.items():
        shape, layout = shape_of(model), layout_of(parallel)
        ranks = layout.tensor_parallel * layout.expert_parallel
        counts[name] = []
        for stage in range(layout.stages):
            dist.init_process_group(
                "fake", store=FakeStore(), rank=stage * ranks, world_size=ranks * layout.stages
            )
            parallel_state.initialize_model_parallel(
                layout.tensor_parallel,
                layout.stages,
                expert_model_parallel_size=layout.expert_parallel,
            )
            config = TransformerConfig(
                num_layers=shape.layers,
                hidden_size=shape.hidden_size,
                num_attention_heads=shape.attention_heads,
                num_query_groups=shape.query_groups,
                kv_channels=shape.kv_channels,
                ffn_hidden_size=shape.ffn,
                gated_linear_unit=shape.gated,
                activation_func=torch.nn.functional.silu
                if shape.gated
                else torch.nn.functional.gelu,
                add_bias_linear=shape.bias,
                num_moe_experts=shape.experts,
                tensor_model_parallel_size=layout.tensor_parallel,
                pipeline_model_parallel_size=layout.stages,
                expert_model_parallel_size=layout.expert_parallel,
                pipeline_dtype=torch.float32,
                use_cpu_initialization=True,
            )
            built = GPTModel(
                config,
                get_gpt_layer_local_spec(num_experts=shape.experts),
                vocab_size=shape.vocab_size,
                max_sequence_length=shape.seq_length,
                pre_process=stage == 0,
                post_process=stage == layout.stages - 1,
                share_embeddings_and_output_weights=shape.tied,
                position_embedding_type="learned_absolute" if shape.learned_positions else "rope",
            )
            counts[name].append(sum(parameter.numel() for parameter in built.parameters()))
            parallel_state.destroy_model_parallel()
            dist.destroy_process_group()
    return counts


def test_parameters_are_those_that_megatron_builds() -> None:
    job = subprocess.run(
        [sys.executable, __file__], capture_output=True, text=True, timeout=240, check=False
    )
    assert job.returncode == 0, job.stderr
    built = json.loads(job.stdout.splitlines()[-1])
    counted = {
        name: [
            count_parameters(shape_of(model), layout_of(parallel), stage).total
            for stage in range(parallel["stages"])
        ]
        for name, (model, parallel) in MODELS.items()
    }
    assert counted == built


def memory(*, stage: int = 1, in_flight: float = 3, **storage: Any):
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
    assert memory(recompute=True).activations == 2 * 64 * 2 * 32 * 2 * 3
    logits = 4 * 64 * 2 * (32 + 512)
    assert memory(stage=3, in_flight=1).activations == 34 * 64 * 2 * 32 * 2 + logits


def test_peak_in_flight() -> None:
    two_version = build_lists("pipedream-2bw", stages=4, microbatches=4, iterations=3)
    assert [peak_in_flight(actions) for actions in two_version] == [4, 3, 2, 1]
    assert [
        peak_in_flight(actions)
        for actions in build_lists("1f1b", stages=4, microbatches=2, iterations=3)
    ] == [2, 2, 2, 1]
    whole_batches = build_lists("pipedream", stages=4, microbatches=2, iterations=6)
    assert [peak_in_flight(actions) for actions in whole_batches] == [7, 5, 3, 1]
    interleaved = build_lists("interleaved", stages=4, microbatches=8, iterations=2, chunks=2)
    # 6 + 4 chunk microbatches of warm-up and one more on the first stage.
    assert peak_in_flight(interleaved[0]) == 11 / 2


@pytest.mark.parametrize("name", TITLES)
def test_planned_schedules_are_valid(name: str) -> None:
    lists = build_lists(name, stages=4, microbatches=4, iterations=4)
    ahead = [12, 8, 4, 0] if name == "pipedream" else None
    validate(lists, delay=delays_of(name, stages=4), ahead=ahead)


def test_unknown_schedule() -> None:
    with pytest.raises(ValueError, match="no schedule is named 'gpipe'; there are: 1f1b, "):
        build_lists("gpipe", stages=2, microbatches=2, iterations=4)


def test_predictions() -> None:
    costs = Costs(forward=60, backward=120, optimizer=36)
    times = {name: predict(name, stages=4, microbatches=4, costs=costs).time for name in TITLES}
    assert times == pytest.approx(
        {
            "1f1b": 1296,
            "interleaved": 1026,
            "pipedream-2bw-undeferred": 1116,
            "pipedream-2bw": 756,
            "pipedream": 1116,
        }
    )
    few = predict("pipedream-2bw", stages=4, microbatches=2, costs=costs)
    assert few.problem is not None
    assert "at least 3 microbatches" in few.problem


def test_flops_are_two_for_each_weight_and_token_and_the_scores() -> None:
    shape = shape_of({"bias": False})
    layout = layout_of({"stages": 4})
    matrices = 2 * 12 * 32 * 32
    scores = 2 * 64 * 32  # Both products over half of the positions, 2 layers.
    assert forward_flops(shape, layout, 1, 2) == 2 * (matrices + scores) * 128
    assert forward_flops(shape, layout, 3, 2) == 2 * (matrices + scores + 512 * 32) * 128


def test_plan_prints_times_and_memory(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    table = tmp_path / "plan.csv"
    flags = (
        "--stages 4 --microbatches 4 --forward-ms 60 --backward-ms 120 --optimizer-ms 36 "
        "--layers 8 --hidden-size 32 --heads 4 --vocab-size 512 --seq-length 64 "
        f"--optimizer adam --delay-correction --csv {table}"
    )
    assert plan.main(flags.split()) == 0
    out = capsys.readouterr().out
    assert re.search(r"Megatron's 1F1B +1296 +1\.714 +41\.7 % +4\n", out)
    assert re.search(r"PipeDream-2BW, deferred update +756 +1\.000 +0\.0 % +4\n", out)
    assert "1.71 times as fast" in out
    assert re.search(r"second version +0\.000 +0\.000\n", out)
    with table.open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 4 * len(TITLES)
    middle = next(r for r in rows if (r["schedule"], r["stage"]) == ("pipedream-2bw", "1"))
    assert middle["second_version_bytes"] == str(2 * 25408)
    stashing = next(r for r in rows if (r["schedule"], r["stage"]) == ("pipedream", "1"))
    assert stashing["second_version_bytes"] == str(2 * 2 * 25408)
    assert float(middle["ratio_to_ideal"]) == pytest.approx(1.0)


def test_plan_without_a_model_says_what_is_missing(capsys: pytest.CaptureFixture[str]) -> None:
    assert plan.main(["--stages", "4", "--microbatches", "3"]) == 0
    out = capsys.readouterr().out
    assert "in units of a forward" in out
    assert "interleaved 1F1B needs a multiple of 4 microbatches" in out
    assert "give --layers, --hidden-size and --heads" in out


def test_plan_computes_times_from_a_rate(capsys: pytest.CaptureFixture[str]) -> None:
    flags = (
        "--stages 2 --microbatches 4 --layers 4 --hidden-size 1000 --heads 10 --tflops 1 "
        "--vocab-size 1000 --seq-length 1000 --disable-bias-linear"
    )
    assert plan.main(flags.split()) == 0
    # Last stage, per token: 2 layers of 12 + 1 million weights' worth, output layer 1 million.
    forward = 2 * (2 * 13 + 1)
    assert f"forward {forward} ms, backward {2 * forward} ms" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--stages 4 --microbatches 4 --layers 6 --hidden-size 8 --heads 2", "do not divide"),
        ("--stages 2 --microbatches 4 --layers 6", "needs --layers, --hidden-size and --heads"),
        ("--stages 2 --microbatches 4 --tflops 1", "--tflops needs the model"),
        ("--stages 2 --microbatches 4 --optimizer-ms 1", "times need --forward-ms"),
        ("--stages 2 --microbatches 4 --forward-ms 1 2 3", "forward has 3 times for 2 stages"),
        ("--stages 2 --microbatches 4 --layers 6 --layers-per-stage 2 3", "adds up to 5"),
    ],
)
def test_plan_refuses(flags: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        plan.main(flags.split())
    assert message in capsys.readouterr().err


def test_timeline_text() -> None:
    lists = build_lists("pipedream-2bw", stages=2, microbatches=2, iterations=3)
    run = simulate(lists, Costs(forward=1, backward=2, optimizer=1))
    out = io.StringIO()
    timeline.draw_text(run, out, width=200, colour=False)
    assert out.getvalue().splitlines() == [
        "stage 0 F0-F1-......B0====F0-B1====F1-B0====U==F0-B1====F1-B0====U==...B1====U==",
        "stage 1 ...F0-B0====F1-B1====F0-B0====F1-B1====U==F0-B0====F1-B1====U==......U==",
    ]
    panels = io.StringIO()
    timeline.draw_text(run, panels, width=48, colour=False)
    rows = panels.getvalue().split("\n\n")
    joined = ["".join(panel.splitlines()[stage][8:] for panel in rows) for stage in (0, 1)]
    assert joined == [line[8:] for line in out.getvalue().splitlines()]


def test_timeline_colours_do_not_change_the_text() -> None:
    lists = build_lists("interleaved", stages=2, microbatches=2, iterations=2)
    run = simulate(lists, Costs(forward=1, backward=2))
    plain, coloured = io.StringIO(), io.StringIO()
    timeline.draw_text(run, plain, width=60, colour=False)
    timeline.draw_text(run, coloured, width=60, colour=True)
    assert re.sub(r"\x1b\[[0-9;]*m", "", coloured.getvalue()) == plain.getvalue()
    assert "\x1b[" in coloured.getvalue()
    assert "f0-" in plain.getvalue()


def test_timeline_command(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    picture, table = tmp_path / "timeline.png", tmp_path / "timeline.csv"
    flags = (
        "--stages 4 --microbatches 4 --forward-ms 60 --backward-ms 120 --optimizer-ms 36 "
        f"--schedule all --iterations 2 --width 100 --png {picture} --csv {table}"
    )
    assert timeline.main(flags.split()) == 0
    out = capsys.readouterr().out
    assert "PipeDream-2BW, deferred update: 756 ms per iteration" in out
    assert all(len(line) <= 100 for line in out.splitlines() if line.startswith("stage "))
    assert picture.read_bytes().startswith(b"\x89PNG")
    with table.open() as file:
        rows = list(csv.DictReader(file))
    assert {row["schedule"] for row in rows} == set(TITLES)
    first = rows[1]
    assert (first["kind"], first["started"], first["stopped"]) == ("forward", "0.0", "60.0")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--stages 4 --microbatches 2", "at least 3 microbatches in every batch, got 2"),
        ("--stages 4 --microbatches 3 --schedule all", "leave it out with --schedule"),
        ("--stages 4 --microbatches 4 --forward-ms 0", "must be positive"),
        ("--stages 4 --microbatches 4 --iterations 0", "--iterations must be at least 1"),
        ("--stages 4 --microbatches 4 --optimizer-ms -1", "must not be negative"),
    ],
)
def test_timeline_refuses(flags: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        timeline.main(flags.split())
    assert message in capsys.readouterr().err


if __name__ == "__main__":
    print(json.dumps(megatron_counts()))
