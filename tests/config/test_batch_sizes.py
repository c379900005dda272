"""Rules on the number of microbatches, with one batch size and with several."""

import argparse
from pathlib import Path

import pytest

from megatron_async.config.settings import AsyncConfig
from megatron_async.config.validation.rule import Subject
from megatron_async.config.validation.schedule import batch_sizes
from tests.config.cases import ASYNC, FACTS, LAYOUT, MODEL, parse, problems, validate


@pytest.fixture
def saved(tmp_path: Path) -> str:
    """A folder with a checkpoint, as far as Megatron looks for one ahead of loading it."""
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("10", encoding="utf-8")
    return str(tmp_path)


@pytest.mark.parametrize(
    ("stages", "microbatches", "runs"),
    [(1, 1, True), (2, 1, True), (4, 3, True), (4, 2, False), (8, 7, True), (8, 6, False)],
)
def test_least_number_of_microbatches(
    parser: argparse.ArgumentParser, stages: int, microbatches: int, runs: bool
) -> None:
    layout = ["--pipeline-model-parallel-size", str(stages), "--micro-batch-size", "3"]
    batch = ["--global-batch-size", str(3 * 2 * microbatches)]
    args = parse(parser, [*MODEL, *layout, *batch, *ASYNC], world_size=2 * stages)
    errors, _ = problems(args)
    assert (errors == []) is runs
    if not runs:
        assert f"{microbatches} microbatches" in errors[0]
        assert f"at least {stages - 1}" in errors[0]
        assert f"{6 * (stages - 1)} samples" in errors[0]


@pytest.mark.parametrize(
    ("schedule", "start", "sizes"),
    [
        ("0:2 1280:4 3840:8", 0, [2, 4, 8]),
        ("0:2 1280:4 3840:8", 9, [2, 4, 8]),  # 10 iterations of 2 make 20 samples, 1280 tokens
        ("0:2 1280:4 3840:8", 10, [4, 8]),
        ("0:2 1280:4 3840:8", 19, [4, 8]),
        ("0:2 1280:4 3840:8", 20, [8]),
        ("0:6 640:12 704:24", 0, [6, 24]),  # 12 is over before it begins: 12 samples are past 11
    ],
)
def test_steps_of_a_batch_size_schedule(
    parser: argparse.ArgumentParser, schedule: str, start: int, sizes: list[int]
) -> None:
    from megatron.core.num_microbatches_calculator import StepBatchsizeNumMicroBatchesCalculator

    argv = ["--step-batch-size-schedule", schedule, "--async-start-iteration", str(start)]
    args = parse(parser, [*MODEL, *LAYOUT, *ASYNC, *argv])
    subject = Subject(args=args, config=AsyncConfig.from_args(args), facts=FACTS)
    assert batch_sizes(subject) == sizes

    calculator = StepBatchsizeNumMicroBatchesCalculator(1, 1, False, 1, schedule, 64)
    consumed, seen = 0, []
    for iteration in range(40):
        calculator.update(consumed, consistency_check=False)
        size = calculator.get_current_global_batch_size()
        if iteration >= start:
            seen.append(size)
        consumed += size
    assert sorted(set(seen)) == sizes


def test_step_with_too_few_microbatches_is_found_wherever_it_stands(
    parser: argparse.ArgumentParser,
) -> None:
    argv = [*MODEL, *LAYOUT, *ASYNC, "--step-batch-size-schedule", "0:2 1280:4"]
    errors, _ = problems(validate(parser, argv))
    assert len(errors) == 1
    assert errors[0].startswith("--step-batch-size-schedule: a batch has 2 microbatches")
    assert problems(validate(parser, [*argv, "--async-start-iteration", "10"])) == ([], [])


@pytest.mark.parametrize(
    ("schedule", "microbatches"),
    [("0:2 1280:4", None), ("0:1 640:2", 2), ("0:2 12800:4", 2)],  # that one's 4 comes too late
)
def test_steps_that_a_resumed_run_may_have_behind_it_do_not_count(
    parser: argparse.ArgumentParser, schedule: str, microbatches: int | None, saved: str
) -> None:
    argv = [*MODEL, *LAYOUT, *ASYNC, "--load", saved, "--step-batch-size-schedule", schedule]
    errors, _ = problems(parse(parser, argv))
    if microbatches is None:
        assert errors == []
    else:
        assert len(errors) == 1
        assert f"a batch has {microbatches} microbatches" in errors[0]


def test_a_run_that_loads_from_an_empty_folder_has_all_steps_ahead_of_it(
    parser: argparse.ArgumentParser, tmp_path: Path
) -> None:
    argv = [*MODEL, *LAYOUT, *ASYNC, "--load", str(tmp_path)]
    errors, _ = problems(parse(parser, [*argv, "--step-batch-size-schedule", "0:2 1280:4"]))
    assert len(errors) == 1
    assert "a batch has 2 microbatches" in errors[0]


@pytest.mark.parametrize(
    ("schedule", "more", "word"),
    [
        ("0:8 1280:12 2560:8", [], "shrinks from 12 to 8 samples at iteration 6"),
        ("0:8 1280:12 2560:9", [], "shrinks from 12 to 9 samples at iteration 6"),
        ("0:8 1280:8 2560:12", [], None),
        ("0:8 12800:4", [], None),  # behind the last of 20 iterations
        ("0:8 10240:4", [], None),  # that one's last sample
        ("0:8 10176:4", ["--train-iters", "21"], "shrinks from 8 to 4 samples at iteration 21"),
        ("0:6 640:9 1280:12", ["--micro-batch-size", "2"], "9 samples, from iteration 3 on"),
        (
            "0:6 640:9",
            ["--micro-batch-size", "2", "--load", "SAVED"],
            "9 samples, from iteration 3 on",
        ),
        ("0:7 640:8", ["--micro-batch-size", "2"], "7 samples, from iteration 1 on"),
        ("0:7 640:8", ["--micro-batch-size", "2", "--load", "SAVED"], None),
    ],
)
def test_batches_on_which_megatron_would_stop_in_mid_run(
    parser: argparse.ArgumentParser, schedule: str, more: list[str], word: str | None, saved: str
) -> None:
    more = [saved if each == "SAVED" else each for each in more]
    argv = [*MODEL, *LAYOUT, *ASYNC, "--step-batch-size-schedule", schedule, *more]
    errors, _ = problems(parse(parser, argv))
    if word is None:
        assert errors == []
    else:
        assert len(errors) == 1
        assert errors[0].startswith("--step-batch-size-schedule: ")
        assert word in errors[0]
