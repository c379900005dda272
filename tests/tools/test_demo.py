"""The demo: its report, and the whole of it at a tiny size."""

import csv
import functools
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from megatron_async.tools import corpora, demo, demo_report
from megatron_async.tools.demo_report import Result
from megatron_async.tools.training_log import TrainingLog
from tests.tools.test_training_log import line


def log_of(
    losses: list[float], validation: float, *, ms: float, bubble: float | None
) -> TrainingLog:
    log = TrainingLog()
    share = "" if bubble is None else f" bubble: {bubble:.1f}% |"
    for number, loss in enumerate(losses, start=1):
        log.feed(line(number, f"{loss:.6E}", ms=ms, bubble=share if number > 2 else ""))
    place = f"iteration {len(losses)} on validation set"
    log.feed(f" validation loss at {place} | lm loss value: {validation:.6E} | lm loss PPL: 9.1 | ")
    return log


def result(name: str, validation: float, *, ms: float = 100.0, bubble: float | None = 20) -> Result:
    losses = [6.0, 5.5, 5.0, 4.5, 4.0, 3.5]
    return Result(name=name, title=name, log=log_of(losses, validation, ms=ms, bubble=bubble))


def test_table_and_verdict() -> None:
    runs = [
        result("synchronous", 2.0, ms=300, bubble=25),
        result("delayed", 2.4, ms=200, bubble=None),
        result("corrected", 2.1, ms=200, bubble=1.5),
        result("fresh", 2.02, ms=200, bubble=1.0),
    ]
    rows = demo_report.table(runs).splitlines()
    assert [row.split() for row in rows[1:]] == [
        ["synchronous", "2.0000", "0.300", "25.0%"],
        ["delayed", "2.4000", "0.200", "-"],
        ["corrected", "2.1000", "0.200", "1.5%"],
        ["fresh", "2.0200", "0.200", "1.0%"],
    ]
    assert len({len(row) for row in rows}) == 1  # the columns line up
    assert "cost 0.4000 of loss" in demo_report.verdict(runs)
    assert "won back 75% of it" in demo_report.verdict(runs)
    assert "fresh-2bw with the correction is at +0.0200" in demo_report.verdict(runs)


def test_verdict_without_a_gap() -> None:
    runs = [result("a", 2.0), result("b", 1.99), result("c", 2.5), result("d", 2.0)]
    assert demo_report.verdict(runs) == "The one-step delay cost no loss in this run (-0.0100)."


def test_time_to_loss() -> None:
    """Six iterations: the loss is the mean of all so far.

    The second logged one is taken for the mean of two: the first run has 6, 5, 5, 4.5, 4, 3.5.
    """
    runs = [
        Result(name=name, title=name, log=log_of(losses, 2.0, ms=ms, bubble=None))
        for name, losses, ms in (
            ("synchronous", [6.0, 5.5, 5.0, 4.5, 4.0, 3.5], 300),
            ("fast", [6.0, 5.0, 3.5, 4.0, 4.0, 4.0], 200),
            ("slow", [6.0, 6.0, 6.0, 6.0, 6.0, 6.0], 200),
        )
    ]
    assert demo_report.time_to_loss(runs) == (
        "Time to the synchronous run's last training loss, 4.6667: synchronous 1.8 s, fast 0.6 s, "
        "slow not reached."
    )


def test_written_files(tmp_path: Path) -> None:
    csv_path, png_path = demo_report.write([result("a", 2.0), result("b", 2.5)], tmp_path)
    rows = list(csv.DictReader(csv_path.open()))
    assert [row["iteration"] for row in rows if row["run"] == "a"] == list("123456")
    # The second line is taken for the mean of two.
    assert [row["training_loss"] for row in rows[:3]] == ["6", "5", "5"]
    assert [row["validation_loss"] for row in rows if row["validation_loss"]] == ["2", "2.5"]
    assert rows[3]["bubble"] == "0.200"
    assert png_path.read_bytes().startswith(b"\x89PNG")


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> demo.Scale:
    scale = demo.Scale(
        iterations=6,
        hidden_size=32,
        sequence=32,
        batch=8,
        learning_rate=5e-3,
        validation_batches=1,
    )
    files = corpora.standard_library()[:40]
    monkeypatch.setattr(demo, "QUICK", scale)
    monkeypatch.setattr(corpora, "standard_library", lambda: files)
    return scale


def test_whole_demo_at_a_tiny_size(
    tiny: demo.Scale, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "demo"
    assert demo.main(["--quick", "--output", str(output)]) == 0, capsys.readouterr()
    shown = capsys.readouterr()
    for title, _ in demo.MODES.values():
        assert title in shown.out
        assert title in shown.err  # the progress
    rows = list(csv.DictReader((output / "losses.csv").open()))
    by_run = {name: [row for row in rows if row["run"] == name] for name in demo.MODES}
    assert all(len(rows) == tiny.iterations for rows in by_run.values())
    losses = {name: [row["training_loss"] for row in rows] for name, rows in by_run.items()}
    synchronous, delayed, corrected, fresh = losses.values()
    # The first two batches run on the initial weights in the asynchronous runs, and only the first
    # one in the synchronous run; the correction changes the weights from the second update on.
    assert synchronous[0] == delayed[0] == corrected[0] == fresh[0]
    assert synchronous[1] != delayed[1] == corrected[1]
    # Of each batch one half is delayed with fresh-2bw.
    assert fresh[1] not in (synchronous[1], delayed[1])
    assert len({each[-1] for each in (synchronous, delayed, corrected, fresh)}) == 4
    assert all(row["bubble"] for row in rows if int(row["iteration"]) == tiny.iterations)
    assert (output / "losses.png").stat().st_size > 10_000
    assert all((output / f"{name}.log").stat().st_size > 0 for name in demo.MODES)


def test_failing_run_is_one_message(
    tiny: demo.Scale,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(demo, "MODES", {"broken": ("broken", ("--pipeline-schedule", "zigzag"))})
    assert demo.main(["--quick", "--output", str(tmp_path)]) == 1
    message = [
        text for text in capsys.readouterr().err.splitlines() if "megatron-async demo:" in text
    ]
    assert len(message) == 1
    assert "the run failed" in message[0]


def test_output_that_is_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "taken").touch()
    assert demo.main(["--output", str(tmp_path / "taken")]) == 1
    assert "File exists" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 128 + signal.SIGTERM)]
)
def test_stopped_demo_leaves_no_process(number: signal.Signals, code: int, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "megatron_async.tools.cli", "demo", "--output", str(tmp_path)]
    with subprocess.Popen(
        command,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        # A shell starts what it runs in the background with SIGINT ignored, and that is inherited.
        preexec_fn=functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL),
    ) as process:
        parent = psutil.Process(process.pid)
        log = tmp_path / "synchronous.log"
        while not log.exists() or len(parent.children(recursive=True)) < 3:  # torchrun, two ranks
            assert process.poll() is None
            time.sleep(0.1)
        started = parent.children(recursive=True)
        process.send_signal(number)
        assert process.wait(timeout=120) == code
        _, alive = psutil.wait_procs(started, timeout=20)
    assert alive == []


@pytest.mark.slow
@pytest.mark.timeout(1900)
def test_full_demo_shows_the_papers_ordering(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "megatron_async.tools.cli", "demo", "--output", str(tmp_path)]
    subprocess.run(command, check=True, timeout=1800)
    rows = list(csv.DictReader((tmp_path / "losses.csv").open()))
    final = {row["run"]: float(row["validation_loss"]) for row in rows if row["validation_loss"]}
    assert final["synchronous"] < final["2bw-corrected"] < final["2bw"]
