"""Several studies against a flag."""

import csv
from pathlib import Path
from typing import Any

import pytest

from megatron_async.study import against, results, runner
from megatron_async.study.cells import Cell
from megatron_async.study.command import main
from megatron_async.study.config import ConfigError, Study
from megatron_async.study.datasets import Prepared
from tests.study.test_config import run_all, study_of

DATASET = Prepared(flags=("--mock-data",), identity="data")


def finished(study: Study, directory: Path, loss: Any) -> Path:
    """A study's folder as its runner leaves it."""
    directory.mkdir()
    runner.write_config(study, DATASET, directory)
    for result in run_all(study, loss).values():
        folder = directory / "cells" / result.name
        folder.mkdir(parents=True)
        results.write(result, folder)
    return directory


def of_length(iterations: int, directory: Path, *, gap: float) -> Path:
    def loss(cell: Cell) -> float:
        late = {"none": 0.0, "one-step": gap}[cell.delay]
        return 2.0 + cell.seed / 10 + late * (0.25 if cell.correction != "none" else 1)

    return finished(study_of(flags={"train-iters": iterations}), directory, loss)


def test_gap_against_the_number_of_steps(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    long = of_length(1000, tmp_path / "long", gap=0.1)
    short = of_length(300, tmp_path / "short", gap=0.4)
    output = tmp_path / "out"
    assert main(["against", "train-iters", str(long), str(short), "--output", str(output)]) == 0
    assert "against-train-iters.png" in capsys.readouterr().out
    rows = list(csv.DictReader((output / "against-train-iters.csv").open()))
    delayed = [row for row in rows if (row["delay"], row["correction"]) == ("one-step", "none")]
    assert [(row["train-iters"], row["gap"]) for row in delayed] == [
        ("300", "0.4"),
        ("1000", "0.1"),
    ]
    text = (output / "against-train-iters.md").read_text()
    assert "| optimizer | mode | train-iters 300 | train-iters 1000 |" in text
    assert "| adam | one-step | +0.4000 ± 0.0000 | +0.1000 ± 0.0000 |" in text
    assert "| adam | one-step + error-feedback | +0.1000 ± 0.0000, 75% back |" in text
    assert (output / "against-train-iters.png").read_bytes().startswith(b"\x89PNG")


def test_what_cannot_be_compared(tmp_path: Path) -> None:
    one = of_length(300, tmp_path / "one", gap=0.4)
    two = of_length(300, tmp_path / "two", gap=0.4)
    with pytest.raises(ConfigError, match=r"the same train-iters, 300"):
        against.read("train-iters", [one, two])
    with pytest.raises(ConfigError, match=r"flags.hidden-size of its study is no number"):
        against.read("hidden-size", [one])
    with pytest.raises(ConfigError, match="holds no study"):
        against.read("train-iters", [tmp_path])
