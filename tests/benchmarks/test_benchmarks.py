"""The benchmarks run, and what they write is what they promise. Slow: about a minute each."""

import csv
import statistics
import subprocess
import sys
from pathlib import Path

import pytest
from support.jobs import gpt_flags, run_job

from tests.support.gpt import REPOSITORY
from tests.support.output import read_scalars

BENCHMARKS = REPOSITORY / "benchmarks"

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def rows(name: str, directory: Path, *argv: str, fails: bool = False) -> list[dict[str, str]]:
    """Run a benchmark and return its CSV."""
    table, picture = directory / "rows.csv", directory / "bars.png"
    command = [sys.executable, str(BENCHMARKS / name), *argv]
    command += ["--csv", str(table), "--png", str(picture)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=800, check=False)
    assert (run.returncode != 0) == fails, run.stdout + run.stderr
    assert picture.read_bytes().startswith(b"\x89PNG")
    with table.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


@pytest.mark.parametrize(
    ("name", "ratio"),
    [
        ("paced.py", "ratio_to_ideal"),
        ("real.py", "ratio"),
        ("overhead.py", "ratio"),
        ("slow_dp.py", "ratio"),
        ("time_to_loss.py", "ratio_to_ideal"),
        ("study_speed.py", "ratio"),
    ],
)
def test_quick_benchmarks_write_a_row_per_mode(name: str, ratio: str, tmp_path: Path) -> None:
    found = rows(name, tmp_path, "--quick")
    assert len(found) >= 2
    assert all(float(row[ratio]) > 0 for row in found)
    if ratio == "ratio":
        assert all(row["baseline"] for row in found)


def test_paced_notices_a_misplaced_completion(tmp_path: Path) -> None:
    """On three stages or more the total then has to wait for a receive that waits for it."""
    common = ["--stages", "4", "--microbatches", "4", "--iterations", "4", "--repeats", "1"]
    found = rows(
        "paced.py",
        tmp_path,
        *(*common, "--max-ratio", "1.05", "--modes", "2bw", "2bw-misplaced"),
        fails=True,
    )
    ratios = {row["mode"]: float(row["ratio_to_ideal"]) for row in found}
    assert ratios["2bw"] < 1.05 < ratios["2bw-misplaced"]


def test_the_logged_bubble_is_the_pipelines(tmp_path: Path) -> None:
    """(p - 1) / (m + p - 1) of a synchronous iteration, next to nothing of an asynchronous one."""

    def share(*flags: str) -> float:
        folder = tmp_path / "-".join(["scalars", *flags])
        model = gpt_flags(
            layers=4,
            hidden_size=32,
            heads=2,
            seq_length=32,
            vocab_size=128,
            stages=2,
            microbatches=2,
            iterations=8,
            log_interval=1,
        )
        log = ["--log-pipeline-bubble", "--tensorboard-dir", str(folder)]
        run_job(
            ranks=2,
            flags=[*model, *log, "--tensorboard-log-interval", "1", *flags],
            iterations=8,
            timeout=300,
            settings={"forward_seconds": 0.1, "backward_seconds": 0.2},
        )
        return statistics.median(read_scalars(folder)["pipeline-bubble"].values())

    assert share() == pytest.approx(1 / 3, abs=0.05)
    assert share("--pipeline-schedule", "pipedream-2bw") < 0.05


def test_more_in_flight_hides_late_messages(tmp_path: Path) -> None:
    common = ["--stages", "4", "--microbatches", "6", "--iterations", "3", "--repeats", "1"]
    common += ["--latency-ms", "60", "--modes", "fresh-2bw"]
    (late,) = rows("paced.py", tmp_path, *common)
    (hidden,) = rows("paced.py", tmp_path, *common, "--pipeline-extra-warmup", "3")
    assert float(hidden["simulated_ratio"]) == pytest.approx(1)
    assert float(hidden["ratio_to_ideal"]) < 1.2 < float(late["ratio_to_ideal"])


def test_zero_bubble_of_torch_runs_on_the_same_clock(tmp_path: Path) -> None:
    common = ["--stages", "2", "--microbatches", "4", "--iterations", "3", "--repeats", "1"]
    found = rows("paced.py", tmp_path, *common, "--modes", "torch-zbv", "torch-zb")
    assert len(found) == 2
    for row in found:
        # No faster than its lists: messages and the norm wait for what they have to.
        assert float(row["ratio_to_ideal"]) >= float(row["simulated_ratio"]) - 0.005
