"""The whole check: on CPU ranks, on pretended GPUs, and where it cannot be run."""

import contextlib
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from megatron_async.gpu_check import bench as bench_module
from megatron_async.gpu_check import command
from megatron_async.gpu_check.bench import Bench, RunFailed
from megatron_async.gpu_check.rows import Result
from megatron_async.gpu_check.run_log import RunLog
from megatron_async.gpu_check.runs import Machine
from megatron_async.tools.job import JobError
from tests.gpu_check.logs import LOSSES, log_of, race_report
from tests.gpu_check.test_runs import machine
from tests.support.gpt import REPOSITORY

NOT_ON_CPU = (
    "losses of CPU ranks",
    "Transformer Engine's losses",
    "races, CUDA sanitizer",
    "bubble",
    "speed over 1F1B",
    "time over plain Megatron",
    *(f"memory {what}, 2 stages" for what in ("added", "held", "at the peak")),
    *(f"memory {what}, 1 stage" for what in ("added", "held", "at the peak")),
)


@pytest.mark.timeout(1900)
def test_all_of_it_on_cpu_ranks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "check"
    status = command.main(["--cpu", "--out", str(output), "--timeout", "1500"])
    shown = capsys.readouterr()
    assert status == 0, shown
    verdicts = {}
    for text in (output / "report.txt").read_text().splitlines()[4:-2]:
        name, _, rest = text.partition("  ")
        verdicts[name] = rest.split("  ")[-1].strip()
    assert verdicts == {
        "deferred updates' losses": "passed",
        "one step of delay shows": "passed",
        **dict.fromkeys(NOT_ON_CPU, "not on CPU ranks"),
    }
    assert "2 passed, 0 failed, 12 not checked" in shown.out
    # Every run was a real one, and only those that differ were run.
    assert sorted(path.stem for path in output.glob("*.log")) == [
        "one-stage-2bw",
        "one-stage-megatron",
        "small-1f1b",
        "small-2bw",
        "small-2bw-undeferred",
    ]
    assert (output / "plan-pp2.txt").read_text().startswith("2 stages, 4 microbatches")


class Pretended(Bench):
    """Runs have the logs that they are given."""

    def __init__(self, on: Machine, output: Path, **logs: RunLog) -> None:
        super().__init__(on, script=Path("pretrain_gpt.py"), output=output, limit_s=1.0)
        self.logs = logs
        self.asked: list[str] = []

    def log(self, name: str, *, with_races: bool = False) -> RunLog:
        self.asked.append(name)
        if name not in self.logs:
            raise RunFailed(f"the run {name} failed")
        return self.logs[name]


type MemoryOfRanks = dict[int, tuple[float, float]]

DELAYED = (LOSSES[0], LOSSES[0], *LOSSES[1:-1])


def good_logs(on: Machine, output: Path) -> dict[str, RunLog]:
    """Logs of a machine on which all is well; memory is what the plan says."""
    from megatron_async.gpu_check.training import LARGE, PIPELINE, SCHEDULE

    def memory(
        bench: Bench, stages: int, microbatches: int
    ) -> list[dict[int, tuple[float, float]]]:
        model = LARGE if stages == 1 else PIPELINE
        plan = bench.plan(model, stages=stages, microbatches=microbatches, schedule=SCHEDULE)
        found: list[MemoryOfRanks] = [{}, {}]
        for stage, parts in enumerate(plan):
            held = parts["total"] - parts["activations"]
            added = sum(parts[name] for name in ("second_version", "gradient_copy", "correction"))
            found[0][stage] = held / 2**20, parts["total"] / 2**20
            found[1][stage] = (held - added) / 2**20, (parts["total"] - added) / 2**20
        return found

    bench = Pretended(on, output)
    names = [
        *("small-2bw", "small-2bw-undeferred", "small-2bw-cpu-ranks", "small-2bw-te"),
        "sanitizer-2bw",
    ]
    logs = {name: log_of(DELAYED, name=name) for name in names}
    logs["small-1f1b"] = log_of(name="small-1f1b")
    logs["sanitizer-planted-race"] = log_of(races=1)
    alone = memory(bench, 1, 8)
    logs["one-stage-2bw"] = log_of(ms=101, memory=alone[0])
    logs["one-stage-megatron"] = log_of(ms=100, memory=alone[1])
    if on.stages > 1:
        ideal = 1 + (on.stages - 1) / on.microbatches
        both = memory(bench, on.stages, on.microbatches)
        logs["2bw"] = log_of(ms=101, bubble=1.0, memory=both[0])
        logs["1f1b"] = log_of(ms=100 * ideal, bubble=100 * (1 - 1 / ideal), memory=both[1])
    return logs


@pytest.mark.parametrize(("gpus", "te"), [(1, False), (1, True), (2, True), (4, False), (8, True)])
def test_a_machine_on_which_all_is_well_passes(gpus: int, te: bool, tmp_path: Path) -> None:
    on = machine(gpus, transformer_engine=te)
    bench = Pretended(on, tmp_path, **good_logs(on, tmp_path))
    rows = {row.name: row for row in command.check(bench)}
    left_out = {name: row.why for name, row in rows.items() if row.result is Result.NOT_CHECKED}
    expected = (
        {}
        if te
        else {"Transformer Engine's losses": "not installed; all runs had --transformer-impl local"}
    )
    if gpus == 1:
        expected |= {"bubble": "needs two GPUs", "speed over 1F1B": "needs two GPUs"}
    assert left_out == expected
    assert all(row.result is not Result.FAILED for row in rows.values()), rows
    # Within the time of one check, a machine does what only it can do.
    assert ("time over plain Megatron" in rows) == (gpus == 1)


def cases() -> dict[str, tuple[str, RunLog]]:
    """By the row that must fail: a run, and what it logs."""
    wrong = log_of([loss * 1.02 for loss in DELAYED])
    return {
        "deferred updates' losses": ("small-2bw-undeferred", wrong),
        "one step of delay shows": ("small-1f1b", log_of(DELAYED)),
        "losses of CPU ranks": ("small-2bw-cpu-ranks", wrong),
        "Transformer Engine's losses": ("small-2bw-te", wrong),
        "races, CUDA sanitizer": ("sanitizer-2bw", log_of(races=1)),
        "bubble": ("2bw", log_of(ms=101, bubble=30)),
        "speed over 1F1B": ("2bw", log_of(ms=140, bubble=1)),
        "memory added, 2 stages": ("2bw", log_of(memory=dict.fromkeys((0, 1), (90000, 90000)))),
        "memory held, 2 stages": ("2bw", log_of(memory=dict.fromkeys((0, 1), (1, 90000)))),
        "memory at the peak, 2 stages": ("2bw", log_of(memory={0: (1, 90000), 1: (1, 5000)})),
    }


@pytest.mark.parametrize("name", cases())
def test_each_check_can_fail(name: str, tmp_path: Path) -> None:
    on = machine(2, transformer_engine=True)
    run, log = cases()[name]
    logs = good_logs(on, tmp_path) | {run: log}
    logs["sanitizer-1f1b"] = log_of()
    rows = {row.name: row for row in command.check(Pretended(on, tmp_path, **logs))}
    assert rows[name].result is Result.FAILED
    assert rows[name].expected, "it failed for another reason than its measurement"


def test_overhead_can_fail(tmp_path: Path) -> None:
    on = machine(1)
    logs = good_logs(on, tmp_path) | {"one-stage-2bw": log_of(ms=120)}
    rows = {row.name: row for row in command.check(Pretended(on, tmp_path, **logs))}
    assert rows["time over plain Megatron"].result is Result.FAILED


def test_a_run_that_failed_fails_every_check_that_needs_it(tmp_path: Path) -> None:
    on = machine(2)
    logs = good_logs(on, tmp_path)
    del logs["2bw"]
    rows = {row.name: row for row in command.check(Pretended(on, tmp_path, **logs))}
    failed = {name for name, row in rows.items() if row.result is Result.FAILED}
    memory = {f"memory {what}, 2 stages" for what in ("added", "held", "at the peak")}
    assert failed == {"bubble", "speed over 1F1B", *memory}
    assert rows["bubble"].measured == "the run 2bw failed"


def checkout(folder: Path, body: str) -> Path:
    folder.mkdir()
    (folder / "pretrain_gpt.py").write_text(body)
    return folder


def test_a_failing_job_shows_the_end_of_its_log_and_its_checks_fail(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A checkout whose script fails; no Megatron is imported."""
    body = "print('last words', flush=True)\nraise ValueError('a broken checkout')\n"
    where = checkout(tmp_path / "megatron", body)
    on = machine()
    bench = Bench(on, script=where / "pretrain_gpt.py", output=tmp_path, limit_s=300)
    for _ in range(2):  # it is run once
        with pytest.raises(RunFailed, match="the run small-1f1b failed"):
            bench.log("small-1f1b")
    shown = capsys.readouterr().out
    assert "ValueError: a broken checkout" in shown
    assert f"---- the end of {tmp_path / 'small-1f1b.log'} ----" in shown
    assert "last words" in shown
    assert shown.count("---- the end of") == 1


def test_a_job_that_takes_too_long_is_ended(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    where = checkout(tmp_path / "megatron", "import time\ntime.sleep(600)\n")
    bench = Bench(machine(), script=where / "pretrain_gpt.py", output=tmp_path, limit_s=3)
    with pytest.raises(RunFailed, match="took longer than 3 s"):
        bench.log("small-1f1b")
    assert "was ended" in capsys.readouterr().out


def test_the_sanitizers_run_may_end_at_a_race(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    environments = []

    class Racing(contextlib.nullcontext[None]):
        def __init__(self, *_: Any, environment: dict[str, str], log: Path, **__: Any) -> None:
            super().__init__()
            log.touch()
            environments.append(environment)

        def follow(self) -> Iterator[str]:
            yield from race_report()
            raise JobError("the run failed with exit code 1")

    monkeypatch.setattr(bench_module, "Job", Racing)
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32")
    bench = Bench(machine(2), script=Path("pretrain_gpt.py"), output=tmp_path, limit_s=300)
    assert bench.log("sanitizer-2bw", with_races=True).races == 1
    assert environments == [{"TORCH_CUDA_SANITIZER": "1", "CUDA_DEVICE_MAX_CONNECTIONS": "32"}]
    with pytest.raises(RunFailed, match="sanitizer-2bw failed"):
        bench.log("sanitizer-2bw")


@pytest.mark.parametrize(
    ("argv", "found", "message"),
    [
        ([], machine(1, megatron=False), "there is no Megatron: give --megatron PATH"),
        (["--megatron", "nowhere"], machine(1), "nowhere has no pretrain_gpt.py"),
        (["--out", "taken"], machine(1), "taken: File exists"),
    ],
)
def test_what_cannot_be_checked_is_one_message(
    argv: list[str],
    found: Machine,
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "taken").touch()
    monkeypatch.setattr(command, "examine", lambda *, cpu: found)
    assert command.main(argv) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith("megatron-async gpu-check: ")
    assert message in shown.err
    assert len(shown.err.splitlines()) == 1


def test_the_script_hands_its_options_on() -> None:
    done = subprocess.run(
        ["bash", REPOSITORY / "examples" / "gpu_check.sh", "--help"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    for flag in ("--cpu", "--out", "--megatron", "--timeout"):
        assert flag in done.stdout


@pytest.mark.parametrize("seconds", ["-3", "0", "nan", "inf", "soon"])
def test_a_time_limit_is_a_number_above_0(seconds: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        command.main([f"--timeout={seconds}"])
    assert f"{seconds} is no number of seconds above 0" in capsys.readouterr().err
