"""Predicted times, and the command `megatron-async plan`."""

import csv
import re
from pathlib import Path

import pytest

from megatron_async.planning import plan
from megatron_async.planning.candidates import Candidate, candidate, candidates
from megatron_async.planning.plan import predict
from megatron_async.planning.times import forward_flops
from megatron_async.schedules.simulator import Costs
from tests.planning.models import layout_of, shape_of


def test_predictions() -> None:
    costs = Costs(forward=60, backward=120, optimizer=36)
    times = {
        each.name: predict(each, pipeline=each.pipeline(stages=4), microbatches=4, costs=costs).time
        for each in candidates()
    }
    assert times == pytest.approx(
        {
            "1f1b": 1296,
            "interleaved": 1026,
            "zb-h1": 936,
            "pipedream-2bw-undeferred": 1116,
            "pipedream-2bw": 756,
            "fresh-2bw-undeferred": 1116,
            "fresh-2bw": 756,
            "paci": 756,
            "pipedream": 1116,
        }
    )
    old = candidate("pipedream-2bw")
    few = predict(old, pipeline=old.pipeline(stages=4), microbatches=2, costs=costs)
    assert few.problem is not None
    assert "at least 3 microbatches" in few.problem


def test_more_microbatches_in_flight_hide_late_messages() -> None:
    costs = Costs(forward=60, backward=120, optimizer=36, latency=12)
    fresh = candidate("fresh-2bw")
    plain, extra = (
        predict(
            fresh,
            pipeline=fresh.pipeline(stages=4, extra_warmup=e),
            microbatches=8,
            costs=costs,
        )
        for e in (0, 3)
    )
    assert plain.time > 1.05 * (8 * 180 + 36)
    assert extra.time == pytest.approx(8 * 180 + 36)
    assert plain.in_flight == (4, 3, 2, 1)
    assert extra.in_flight == (7, 5, 3, 1)
    # What the first one does not have is left out.
    old = candidate("1f1b")
    pipeline = old.pipeline(stages=4, extra_warmup=3)
    unchanged = predict(old, pipeline=pipeline, microbatches=8, costs=costs)
    assert unchanged.in_flight == plain.in_flight
    pipeline = fresh.pipeline(stages=4, flags={"delayed_microbatches": 2})
    few = predict(fresh, pipeline=pipeline, microbatches=8, costs=costs)
    assert few.problem is not None
    assert "Give a number from 3 to 8" in few.problem


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
    assert re.search(r"Megatron's 1F1B +1296 +1\.714 +41\.7 % +0 +4\n", out)
    assert re.search(r"PipeDream-2BW, deferred update +756 +1\.000 +0\.0 % +1 +4\n", out)
    assert "1.71 times as fast" in out
    assert re.search(r"second version +0\.000 +0\.000\n", out)
    with table.open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 4 * len(candidates())
    middle = next(r for r in rows if (r["schedule"], r["stage"]) == ("pipedream-2bw", "1"))
    assert middle["second_version_bytes"] == str(2 * 25408)
    stashing = next(r for r in rows if (r["schedule"], r["stage"]) == ("pipedream", "1"))
    assert stashing["second_version_bytes"] == str(2 * 2 * 25408)
    assert float(middle["ratio_to_ideal"]) == pytest.approx(1.0)


def test_the_memory_table_has_the_fullest_stage_of_each_schedule(
    capsys: pytest.CaptureFixture[str],
) -> None:
    # PipeDream is fullest on stage 0, the others where the layers are.
    flags = (
        "--stages 4 --microbatches 4 --layers-per-stage 1 2 9 2 --hidden-size 64 --heads 4 "
        "--vocab-size 512 --seq-length 64 --optimizer adam"
    )
    assert plan.main(flags.split()) == 0
    out = capsys.readouterr().out
    assert re.search(r"stage 0 +stage 2 +stage 3\n", out)
    assert "of ideal: of m (t_f + t_b) + t_opt of the slowest stage" in out


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


MODEL = "--stages 2 --microbatches 4 --layers 4 --hidden-size 64 --heads 4"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--stages 4 --microbatches 4 --layers 6 --hidden-size 8 --heads 2", "do not divide"),
        ("--stages 0 --microbatches 4", "--stages must be at least 1, got 0"),
        ("--stages 4 --microbatches 0", "--microbatches must be at least 1, got 0"),
        ("--stages 4 --microbatches 8 --expert-parallel 0", "--expert-parallel must be at least"),
        ("--stages 4 --microbatches 8 --forward-ms nan", "times must be finite"),
        ("--stages 4 --microbatches 8 --forward-ms 0", "--forward-ms must be positive"),
        ("--stages 4 --microbatches 100000000", "too many to simulate"),
        ("--stages 2 --microbatches 4 --layers 6", "needs --layers, --hidden-size and --heads"),
        ("--stages 2 --microbatches 4 --tflops 1", "--tflops needs the model"),
        ("--stages 2 --microbatches 4 --optimizer-ms 1", "times need --forward-ms"),
        ("--stages 2 --microbatches 4 --forward-ms 1 2 3", "forward has 3 times for 2 stages"),
        ("--stages 2 --microbatches 4 --layers 6 --layers-per-stage 2 3", "adds up to 5"),
        (f"{MODEL} --layers-per-stage 5 -1", "a stage cannot have -1 layers"),
        (f"{MODEL} --layers 0", "layers must be positive, got 0"),
        (f"{MODEL} --hidden-size 66", "--hidden-size 66 does not divide by 4 heads"),
        (f"{MODEL} --num-query-groups 3", "4 heads do not divide into 3 --num-query-groups"),
        (f"{MODEL} --tensor-parallel 3", "4 attention heads do not divide into tensor"),
        (f"{MODEL} --tensor-parallel 4 --vocab-size 258", "258 of --vocab-size"),
        (f"{MODEL} --num-experts 4 --moe-router-topk 5", "--moe-router-topk 5 is more than 4"),
        (
            f"{MODEL} --num-experts 3 --expert-parallel 2 --data-parallel 2",
            "3 experts do not divide into expert parallelism of 2",
        ),
    ],
)
def test_plan_refuses(flags: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        plan.main(flags.split())
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("stages", [1, 2, 4, 9])
@pytest.mark.parametrize("each", candidates(), ids=lambda each: each.name)
def test_the_delay_that_is_shown_is_that_of_a_settled_batch(each: Candidate, stages: int) -> None:
    flags = {"delayed_microbatches": "fewest", "emulate_pipeline_stages": None}
    pipeline = each.pipeline(stages=stages, chunks=2, flags=flags)
    rule = each.schedule.rule(pipeline, 18)
    # With PipeDream the first p batches run on weights that are less old.
    late = [rule.mean_delay(2 * stages + 2, 18, stage) for stage in range(stages)]
    assert [rule.staleness(stage) for stage in range(stages)] == pytest.approx(late)
    assert rule.mean_staleness(stages) == pytest.approx(sum(late) / stages)
