"""The demo: reading logs, reporting, running jobs, and the whole of it at a tiny size."""

import csv
import functools
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from megatron_async.tools import demo, demo_report
from megatron_async.tools.demo_report import Result
from megatron_async.tools.job import Job, JobError
from megatron_async.tools.training_log import TrainingLog


def line(number: int, loss: str | None, *, ms: float = 100.0, bubble: str = "") -> str:
    """A line as Megatron writes it, with our bubble at its end."""
    field = "" if loss is None else f" lm loss: {loss} |"
    return (
        f" [2026-01-02 03:04:05.678901] iteration {number:8d}/      80 | consumed samples: "
        f"{32 * number:12d} | elapsed time per iteration (ms): {ms:.1f} | learning rate: "
        f"5.000000E-03 | global batch size:    32 |{field} loss scale: 1.0 | grad norm: 5.276 | "
        f"number of skipped iterations:   0 | number of nan iterations:   0 |{bubble}"
    )


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


def test_log_lines() -> None:
    log = TrainingLog()
    assert log.feed(line(1, "5.550000E+00", ms=1234.5))
    assert log.feed(line(2, "5.500000E+00"))
    assert log.feed(line(3, None, bubble=" bubble: 18.1% |"))
    assert not log.feed("> building train, validation, and test datasets for GPT ...")
    # Megatron prints the mean of the first two losses in the second line: the loss was 5.45.
    assert [one.loss for one in log.iterations] == [5.55, pytest.approx(5.45), None]
    assert [one.number for one in log.iterations] == [1, 2, 3]
    assert [one.seconds for one in log.iterations] == [1.2345, 0.1, 0.1]
    assert [one.bubble for one in log.iterations] == [None, None, pytest.approx(0.181)]


def test_final_validation_loss_is_the_one_at_the_end() -> None:
    log = TrainingLog()
    assert log.final_validation_loss is None
    log.feed(" validation loss at iteration 4 | lm loss value: 5.0E+00 | lm loss PPL: 1.6E+02 | ")
    assert log.final_validation_loss is None
    for name, loss in (("validation", "4.5E+00"), ("test", "9.0E+00")):
        log.feed(f" validation loss at iteration 8 on {name} set | lm loss value: {loss} | ")
    assert log.final_validation_loss == 4.5


def test_table_and_verdict() -> None:
    runs = [
        result("synchronous", 2.0, ms=300, bubble=25),
        result("delayed", 2.4, ms=200, bubble=None),
        result("corrected", 2.1, ms=200, bubble=1.5),
    ]
    rows = demo_report.table(runs).splitlines()
    assert [row.split() for row in rows[1:]] == [
        ["synchronous", "2.0000", "0.300", "25.0%"],
        ["delayed", "2.4000", "0.200", "-"],
        ["corrected", "2.1000", "0.200", "1.5%"],
    ]
    assert len({len(row) for row in rows}) == 1  # the columns line up
    assert "cost 0.4000 of loss" in demo_report.verdict(runs)
    assert "won back 75% of it" in demo_report.verdict(runs)


def test_verdict_without_a_gap() -> None:
    runs = [result("a", 2.0), result("b", 1.99), result("c", 2.5)]
    assert demo_report.verdict(runs) == "The one-step delay cost no loss in this run (-0.0100)."


def test_written_files(tmp_path: Path) -> None:
    csv_path, png_path = demo_report.write([result("a", 2.0), result("b", 2.5)], tmp_path)
    rows = list(csv.DictReader(csv_path.open()))
    assert [row["iteration"] for row in rows if row["run"] == "a"] == list("123456")
    # The second line is taken for the mean of two.
    assert [row["training_loss"] for row in rows[:3]] == ["6", "5", "5"]
    assert [row["validation_loss"] for row in rows if row["validation_loss"]] == ["2", "2.5"]
    assert rows[3]["bubble"] == "0.200"
    assert png_path.read_bytes().startswith(b"\x89PNG")


def test_dataset_is_made_of_the_running_interpreters_library() -> None:
    files = demo.standard_library()
    names = {file.path.name for file in files}
    assert {"argparse.py", "dataclasses.py"} <= names
    assert files == demo.standard_library()  # the same order again
    assert [file.path for file in files] != sorted(file.path for file in files)
    assert not any("site-packages" in file.path.parts for file in files)


def script(tmp_path: Path, body: str) -> list[str]:
    path = tmp_path / "script.py"
    path.write_text(body)
    return [str(path)]


def test_job_hands_on_its_lines_and_its_ranks_environment(tmp_path: Path) -> None:
    body = (
        "import os, sys\n"
        "assert sys.stdin.read() == ''\n"
        "print('rank', os.environ['RANK'], os.environ['OMP_NUM_THREADS'])\n"
    )
    log = tmp_path / "log"
    with Job(script(tmp_path, body), ranks=2, log=log, silence_s=120) as job:
        lines = list(job.follow())
    assert {"rank 0 1", "rank 1 1"} <= set(lines)
    command, *rest = log.read_text().splitlines()
    assert "torch.distributed.run" in command
    assert rest == lines


def test_failed_job_names_the_error_and_the_log(tmp_path: Path) -> None:
    log = tmp_path / "log"
    body = "raise ValueError('the microbatches do not fit')\n"
    job = Job(script(tmp_path, body), ranks=1, log=log, silence_s=120)
    with pytest.raises(JobError) as error, job:
        list(job.follow())
    assert "ValueError: the microbatches do not fit" in str(error.value)
    assert str(log) in str(error.value)


def test_hanging_job_is_ended_with_all_its_ranks(tmp_path: Path) -> None:
    """Also ranks that do not end when they are asked to."""
    body = (
        "import os, signal, time\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "print('PID', os.getpid(), flush=True)\n"
        "time.sleep(600)\n"
    )
    pids = []
    job = Job(script(tmp_path, body), ranks=1, log=tmp_path / "log", silence_s=60)

    def follow() -> None:
        with job:
            for text in job.follow():
                if text.startswith("PID"):
                    pids.append(int(text.split()[1]))
                    job._silence_s = 0.2

    with pytest.raises(JobError, match="printed nothing for 0 s"):
        follow()
    assert len(pids) == 1
    for _ in range(100):
        if not psutil.pid_exists(pids[0]):
            break
        time.sleep(0.1)
    assert not psutil.pid_exists(pids[0])


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
    files = demo.standard_library()[:40]
    monkeypatch.setattr(demo, "QUICK", scale)
    monkeypatch.setattr(demo, "standard_library", lambda: files)
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
    synchronous, delayed, corrected = losses.values()
    # The first two batches run on the initial weights in the asynchronous runs, and only the first
    # one in the synchronous run; the correction changes the weights from the second update on.
    assert synchronous[0] == delayed[0] == corrected[0]
    assert synchronous[1] != delayed[1] == corrected[1]
    assert synchronous[-1] != delayed[-1] != corrected[-1]
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
