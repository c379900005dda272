"""``megatron-async compare``: the first iteration, stage and tensor in which two runs differ."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from megatron_async.tools import compare

ITERATIONS = (1, 2, 3)


def record(iteration: int, what: str, name: str, value: float) -> dict[str, Any]:
    return {
        "iteration": iteration,
        "version": iteration,
        "what": what,
        "name": name,
        "hash": f"{value}",
        "norm": value,
    }


def lines(stage: int) -> list[dict[str, Any]]:
    """What a rank writes of three updates of two tensors."""
    found = []
    for iteration in ITERATIONS:
        for name in ("a", "b"):
            tensor = f"{stage}.{name}"
            for what in ("gradient", "weight", "state"):
                found.append(record(iteration, what, tensor, iteration + stage))
        found.append(record(iteration, "random", "cpu", 0.0))
    return found


def write(
    folder: Path,
    ranks: Sequence[list[dict[str, Any]]],
    *,
    stages: int | None = None,
    world: int | None = None,
) -> Path:
    folder.mkdir()
    for rank, each in enumerate(ranks):
        head = {
            "rank": rank,
            "world": len(ranks) if world is None else world,
            "stage": rank,
            "stages": stages or len(ranks),
            "tensor_rank": 0,
            "data_rank": 0,
        }
        text = "".join(json.dumps(one) + "\n" for one in [head, *each])
        (folder / f"rank{rank:05d}.jsonl").write_text(text)
    return folder


@pytest.fixture
def runs(tmp_path: Path) -> tuple[Path, Path, list[list[dict[str, Any]]]]:
    """A folder, a second one to be written, and what the first one holds."""
    ranks = [lines(0), lines(1)]
    return write(tmp_path / "a", ranks), tmp_path / "b", ranks


def change(
    ranks: list[list[dict[str, Any]]], rank: int, match: Mapping[str, Any], **values: Any
) -> None:
    (one,) = [
        each for each in ranks[rank] if all(each[name] == want for name, want in match.items())
    ]
    one.update(values)


def test_equal_runs(
    runs: tuple[Path, Path, list[list[dict[str, Any]]]], capsys: pytest.CaptureFixture[str]
) -> None:
    a, b, ranks = runs
    assert compare.main([str(a), str(write(b, ranks))]) == 0
    assert capsys.readouterr().out == "equal: 42 tensors, bytes\n"


def test_the_first_difference_is_named_with_causes_before_effects(
    runs: tuple[Path, Path, list[list[dict[str, Any]]]], capsys: pytest.CaptureFixture[str]
) -> None:
    a, b, ranks = runs
    for iteration in (2, 3):
        weight = {"what": "weight", "name": "1.b", "iteration": iteration}
        change(ranks, 1, weight, hash="x", norm=1.5 * (iteration + 1))
    gradient = {"what": "gradient", "name": "1.a", "iteration": 2}
    change(ranks, 1, gradient, hash="y", norm=6.0, version=7)
    assert compare.main([str(a), str(write(b, ranks))]) == 1
    shown = capsys.readouterr().out.splitlines()
    assert shown[0] == "first difference: iteration 2, stage 1, rank 1: gradient 1.a"
    assert "norm 3 and 6 (relative difference 0.5), hash 3 and y" in shown[1]
    assert shown[2] == "  weight version 2 and 7"
    assert shown[3] == ("in that iteration 2 tensors differ; 3 of 42 in all iterations")
    assert shown[4:] == ["  iteration 2, stage 1, rank 1: weight 1.b, relative 0.33"]


def test_random_state_comes_before_what_is_drawn_from_it(
    runs: tuple[Path, Path, list[list[dict[str, Any]]]],
) -> None:
    a, b, ranks = runs
    change(ranks, 0, {"what": "gradient", "name": "0.a", "iteration": 3}, hash="x")
    change(ranks, 1, {"what": "random", "iteration": 3}, hash="x")
    differences, compared, notes = compare.compare(compare.read(a), compare.read(write(b, ranks)))
    assert [(one.a.what, one.a.rank) for one in differences] == [("random", 1), ("gradient", 0)]
    assert compared == 42
    assert notes == []


def test_a_tolerance_is_one_of_norms(
    runs: tuple[Path, Path, list[list[dict[str, Any]]]], capsys: pytest.CaptureFixture[str]
) -> None:
    a, b, ranks = runs
    change(ranks, 0, {"what": "weight", "name": "0.a", "iteration": 1}, hash="x", norm=1.0 + 1e-7)
    write(b, ranks)
    assert compare.main([str(a), str(b), "--tolerance", "1e-6"]) == 0
    assert "norms to 1e-06" in capsys.readouterr().out
    assert compare.main([str(a), str(b), "--tolerance", "1e-8"]) == 1


def test_a_resumed_run_is_compared_where_both_were(
    runs: tuple[Path, Path, list[list[dict[str, Any]]]], capsys: pytest.CaptureFixture[str]
) -> None:
    a, b, ranks = runs
    late = [[one for one in rank if one["iteration"] > 1] for rank in ranks]
    assert compare.main([str(a), str(write(b, late))]) == 0
    assert capsys.readouterr().out == "equal: 28 tensors, bytes\n"


def test_of_an_iteration_that_was_run_twice_the_last_time_counts(
    runs: tuple[Path, Path, list[list[dict[str, Any]]]],
) -> None:
    a, b, ranks = runs
    wrong = {**ranks[0][0], "hash": "x"}
    assert compare.main([str(a), str(write(b, [[wrong, *ranks[0]], ranks[1]]))]) == 0


def test_other_layouts_are_compared_by_name(
    runs: tuple[Path, Path, list[list[dict[str, Any]]]], capsys: pytest.CaptureFixture[str]
) -> None:
    a, b, ranks = runs
    alone = [one for rank in ranks for one in rank if one["what"] != "random"]
    write(b, [alone])
    assert compare.main([str(a), str(b)]) == 0
    assert capsys.readouterr().out == "equal: 36 tensors, bytes\n"


def test_a_tensor_of_one_run_alone_is_noted(
    runs: tuple[Path, Path, list[list[dict[str, Any]]]], capsys: pytest.CaptureFixture[str]
) -> None:
    a, b, ranks = runs
    ranks[0].append(record(2, "state", "0.a:extra", 1.0))
    assert compare.main([str(a), str(write(b, ranks))]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "1 tensors are in one run alone, the first in iteration 2: state 0.a:extra",
        "equal: 42 tensors, bytes",
    ]


def test_what_cannot_be_compared_is_said(
    runs: tuple[Path, Path, list[list[dict[str, Any]]]],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    a, b, ranks = runs

    def says(text: str) -> None:
        assert compare.main([str(a), str(b)]) == 2
        assert text in capsys.readouterr().err

    b.mkdir()
    says("has no rank*.jsonl: write them with --log-fingerprints")
    b.rmdir()
    write(b, ranks, world=4)
    says("has 2 files of a run of 4 ranks")
    (b / "rank00001.jsonl").write_text('{"world": 2, "rank": 1, "stage": 1, "stages": 2}\n{"a"\n')
    says("rank00001.jsonl, line 2: ")
    (b / "rank00001.jsonl").write_text('{"iteration": 1}\n')
    says("rank00001.jsonl, line 1: ")
    b = write(tmp_path / "c", [[record(9, "weight", "0.a", 1.0)]])
    says("the two runs have no tensor of one iteration in common")
