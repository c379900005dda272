"""What a study makes of its results: estimates, tables, files."""

import csv
import random
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure

from megatron_async.study import plots, report
from megatron_async.study.analysis import Analysis, analyse, mean_of, ratio_of
from megatron_async.study.cells import Cell
from megatron_async.study.config import Study
from megatron_async.study.results import CellResult
from tests.study.test_config import IDENTITY, MINIMAL, TUNED, run_all, study_of


def analysis_of(study: Study, loss: Callable[[Cell], float | None]) -> Analysis:
    return analyse(study, run_all(study, loss), identity=IDENTITY)


def losses(table: dict[tuple[str, str], list[float | None]]) -> Callable[[Cell], float | None]:
    """The loss of a cell by delay and correction, and seed from 1 on."""
    return lambda cell: table[cell.delay, cell.correction][cell.seed - 1]


TABLE: dict[tuple[str, str], list[float | None]] = {
    ("none", "none"): [2.0, 2.2, 2.4],
    ("one-step", "none"): [2.5, 2.6, 3.0],
    ("one-step", "error-feedback"): [2.2, 2.3, 2.8],
}


def test_gap_and_recovery_are_taken_seed_by_seed() -> None:
    study = study_of(seeds=[1, 2, 3])
    synchronous, delayed, corrected = analysis_of(study, losses(TABLE)).groups
    assert (synchronous.mode, synchronous.gap, synchronous.recovery) == ("synchronous", None, None)
    assert synchronous.loss is not None
    assert synchronous.loss.value == pytest.approx(2.2)
    assert synchronous.loss.error == pytest.approx(0.2 / 3**0.5)
    # Gaps 0.5, 0.4, 0.6: far closer together than the losses are.
    assert delayed.gap is not None
    assert delayed.gap.value == pytest.approx(0.5)
    assert delayed.gap.error == pytest.approx(0.1 / 3**0.5)
    assert delayed.recovery is None
    # Won back 0.3, 0.3, 0.2 of them.
    assert corrected.mode == "one-step + error-feedback"
    assert corrected.recovery is not None
    assert corrected.recovery.value == pytest.approx(0.8 / 1.5)
    assert corrected.recovery.count == 3


def test_standard_error_of_a_ratio_is_that_of_many_studies() -> None:
    draw = random.Random(0)
    estimates, errors = [], []
    for _ in range(3000):
        gaps = [draw.gauss(0.5, 0.05) for _ in range(8)]
        wins = [0.6 * gap + draw.gauss(0.0, 0.03) for gap in gaps]
        estimate = ratio_of(wins, gaps)
        assert estimate is not None
        assert estimate.error is not None
        estimates.append(estimate.value)
        errors.append(estimate.error)
    assert statistics.fmean(estimates) == pytest.approx(0.6, abs=0.005)
    assert statistics.stdev(estimates) == pytest.approx(statistics.fmean(errors), rel=0.08)


def test_estimates_without_a_spread() -> None:
    assert mean_of([]) is None
    single = mean_of([2.0])
    assert single is not None
    assert (single.value, single.error) == (2.0, None)
    assert ratio_of([0.1, 0.2], [0.0, -0.1]) is None  # there is no gap to win back
    one = ratio_of([0.1], [0.2])
    assert one is not None
    assert (one.value, one.error) == (0.5, None)


def test_diverged_and_missing_runs_are_told(tmp_path: Path) -> None:
    study = study_of(seeds=[1, 2, 3])
    table = {**TABLE, ("one-step", "none"): [None, 2.6, 3.0]}
    results = run_all(study, losses(table))
    last = [name for name in results if "error-feedback" in name and "seed3" in name]
    del results[last[0]]
    analysis = analyse(study, results, identity=IDENTITY)
    _, delayed, corrected = analysis.groups
    assert (delayed.diverged, delayed.missing, len(delayed.losses)) == (1, 0, 2)
    assert delayed.gap is not None
    assert delayed.gap.value == pytest.approx(0.5)  # of seeds 2 and 3
    assert (corrected.diverged, corrected.missing) == (0, 1)
    assert corrected.recovery is not None
    assert corrected.recovery.value == pytest.approx(0.3 / 0.4)  # of seed 2, which all have
    report.write(study, analysis, tmp_path)
    text = (tmp_path / "report.md").read_text()
    assert "adam, one-step: 1 of 3 runs diverged and are left out of the means." in text
    assert "adam, one-step + error-feedback: 1 of 3 runs are not done." in text


def test_wholly_diverged_optimizer(tmp_path: Path) -> None:
    study = study_of(**TUNED)
    analysis = analysis_of(study, lambda cell: None if cell.variant == "adam" else 2.0)
    assert {group.cell.variant for group in analysis.groups} == {"muon"}
    report.write(study, analysis, tmp_path)
    assert "adam: diverged at every learning rate." in (tmp_path / "report.md").read_text()
    study = study_of()
    analysis = analysis_of(study, lambda cell: None if cell.delay != "none" else 2.0)
    assert "| 2.0000 ± 0.0000 | diverged | diverged |" in report.main_table(analysis)


def with_curve(result: CellResult, start: float) -> CellResult:
    assert result.validation_loss is not None
    curve = [result.validation_loss + start / number for number in range(1, 101)]
    values: dict[str, Any] = {
        **vars(result),
        "losses": curve,
        "validation": [(100, result.validation_loss)],
        "seconds": 90.0,
        "versions": {"torch": "2.0"},
    }
    return CellResult(**values)


def test_whole_report(tmp_path: Path) -> None:
    study = study_of(
        optimizers={
            name: {
                "learning-rates": [1e-3, 2e-3],
                "momentum": {"flag": "momentum", "values": [0.8, 0.9]},
            }
            for name in ("adam", "muon")
        },
        seeds=[1, 2, 3],
    )
    results = run_all(
        study,
        lambda cell: (
            (losses(TABLE)(cell) or 0.0) + 100 * cell.learning_rate + (cell.momentum or 0.0)
        ),
    )
    results = {name: with_curve(result, 2.0) for name, result in results.items()}
    analysis = analyse(study, results, identity=IDENTITY)
    paths = report.write(study, analysis, tmp_path / "report")
    assert {path.name for path in paths} == {
        *("report.md", "summary.csv", "cells.csv", "curves.csv"),
        *("curves.png", "gaps.png", "recovery.png", "momentum.png"),
    }
    for path in paths:
        if path.suffix == ".png":
            assert path.read_bytes().startswith(b"\x89PNG")
    text = paths[0].read_text()
    assert "| adam-m0.8 | 0.001 | 3.1000 ± 0.1155 | 3.6000 ± 0.1528 (+0.5000) |" in text
    assert "3.3333 ± 0.1856 (+0.2333, 53% back) |" in text
    assert "| muon-m0.9 | 0.001 | one-step | +0.5000 ± 0.0577 | – | 3 |" in text
    assert "| adam-m0.8 | 0.001 (edge) | 0.001: 2.9000, 0.002: 3.0000 |" in text
    assert all(f"![{path.stem}]({path.name})" in text for path in paths[4:])
    rows = list(csv.DictReader(paths[1].open()))
    assert len(rows) == 4 * 3
    assert rows[1] == {
        "optimizer": "adam-m0.8",
        "momentum": "0.8",
        "delay": "one-step",
        "correction": "none",
        "learning_rate": "0.001",
        "seeds": "3",
        "diverged": "0",
        "loss": "3.6",
        "loss_se": "0.152753",
        "gap": "0.5",
        "gap_se": "0.057735",
        "recovery": "",
        "recovery_se": "",
    }
    cells = list(csv.DictReader(paths[2].open()))
    assert len(cells) == 4 * 3 * 3
    assert {row["status"] for row in cells} == {"finished"}
    curves = list(csv.DictReader(paths[3].open()))
    assert len(curves) == 4 * 3 * 3 * 101
    # 36 of the 40 runs: those that only chose a learning rate are left out.
    assert "36 runs, 0.9 hours without those that chose rates. torch 2.0." in text


def test_gap_within_noise_has_no_recovery(tmp_path: Path) -> None:
    study = study_of(seeds=[1, 2, 3])
    table: dict[tuple[str, str], list[float | None]] = {
        **TABLE,
        ("one-step", "none"): [2.3, 2.0, 2.5],
    }
    report.write(study, analysis_of(study, losses(table)), tmp_path)
    row = [
        line
        for line in (tmp_path / "report.md").read_text().splitlines()
        if "| one-step + error-feedback |" in line and line.startswith("| adam")
    ]
    assert row[-1].split("|")[5].strip() == "gap within noise"
    (adam,) = [
        line
        for line in report.main_table(analysis_of(study, losses(table))).splitlines()
        if line.startswith("| adam")
    ]
    assert "back" not in adam
    summary = (tmp_path / "summary.csv").read_text().splitlines()
    (corrected,) = [one for one in summary if one.startswith("adam,,one-step,error-feedback")]
    assert corrected.endswith(",,")


def test_every_learning_rate_has_a_picture(tmp_path: Path) -> None:
    study = study_of(**TUNED, tuning=False)
    analysis = analysis_of(study, losses({key: one * 2 for key, one in TABLE.items()}))
    names = {path.name for path in report.write(study, analysis, tmp_path)}
    assert "learning-rates.png" in names
    assert "momentum.png" not in names
    assert len(report.main_table(analysis).splitlines()) == 2 + 3 + 1


def test_report_of_a_single_seed(tmp_path: Path) -> None:
    study = study_of(seeds=[1])
    report.write(study, analysis_of(study, losses(TABLE)), tmp_path)
    text = (tmp_path / "report.md").read_text()
    assert "| adam | 0.001 | 2.0000 | 2.5000 (+0.5000) | 2.2000 (+0.2000, 60% back) |" in text


@pytest.mark.parametrize("seeds", [[1], [1, 2, 3]])
def test_pictures_name_error_bars_where_there_are_some(
    seeds: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    titles: list[str] = []

    def saved(figure: Figure, path: Path, **_: object) -> None:
        if path.name in ("gaps.png", "recovery.png"):
            titles.append(figure.axes[0].get_title())
            assert figure.axes[0].get_legend() is None  # it would hide bars
            assert len(figure.legends) == 1

    monkeypatch.setattr(Figure, "savefig", saved)
    plots.write(analysis_of(study_of(seeds=seeds), losses(TABLE)), tmp_path)
    ends = "; bars: standard error over seeds" if len(seeds) > 1 else ""
    assert titles == [f"What the delay costs{ends}", f"What the correction wins back{ends}"]


def test_gaps_are_drawn_against_the_delays_whose_size_is_known(tmp_path: Path) -> None:
    fresh = {"pipeline-schedule": "fresh-2bw"}
    study = study_of(
        flags={**MINIMAL["flags"], "micro-batch-size": 2, "global-batch-size": 16},
        delays=[
            "none",
            "one-step",
            {"name": "all", "flags": {**fresh, "delayed-microbatches": "all"}},
            {"name": "three", "flags": {**fresh, "delayed-microbatches": 3}},
            {"name": "fewest", "flags": fresh},
            {"name": "paci", "flags": {"pipeline-schedule": "paci"}},
        ],
        corrections=["none", {"name": "error-feedback", "delays": ["one-step", "three"]}],
        seeds=[1, 2],
    )
    analysis = analysis_of(study, lambda cell: 2.0 + cell.seed)
    # 8 microbatches of 2, of which 3 are late.
    assert analysis.delay_shares == {"none": 0.0, "one-step": 1.0, "all": 1.0, "three": 3 / 8}
    paths = report.write(study, analysis, tmp_path)
    assert "delays.png" in {path.name for path in paths}
