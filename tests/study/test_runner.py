"""Running a study's cells: several at a time, stopped and started again, failing, diverging.

A stand-in prints what a run of Megatron prints (tests/study/fake_training.py); the last tests run
Megatron itself.
"""

import csv
import io
import json
import math
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil
import pytest

from megatron_async.study import command, config, results, runner
from megatron_async.study.cells import plan
from megatron_async.study.config import Study
from megatron_async.study.datasets import Prepared, prepare
from megatron_async.study.launch import CommandLauncher, ForkLauncher, LaunchError
from megatron_async.study.live import LiveTable, Row
from megatron_async.study.runner import Outcome, RunError
from megatron_async.tools.job import problem_in
from tests.support.gpt import REPOSITORY

FAKE = (sys.executable, str(REPOSITORY / "tests" / "study" / "fake_training.py"))
DATA = Prepared(flags=("--data-path", "data"), identity="data")


def study_of(optimizers: Mapping[str, Any], **changes: Any) -> Study:
    document = {
        "flags": {"train-iters": 4},
        "optimizers": optimizers,
        "delays": ["none", "one-step"],
        "corrections": ["none", "error-feedback"],
        "seeds": [1],
        **changes,
    }
    return config.parse(document, name="test")


def optimizer(*rates: float, fake: str = "train") -> dict[str, Any]:
    return {"learning-rates": list(rates), "flags": {"fake": fake}}


def run(
    study: Study, directory: Path, *, jobs: int = 2, wandb: str | None = None
) -> tuple[Outcome, str]:
    said = io.StringIO()
    outcome = runner.run(
        study,
        directory,
        dataset=DATA,
        launcher=CommandLauncher(FAKE),
        environments=[{}] * jobs,
        extra=command._wandb(study, wandb),
        live=LiveTable(said),
    )
    return outcome, said.getvalue()


def test_all_cells_are_run_once(tmp_path: Path) -> None:
    study = study_of({"adam": optimizer(0.005, 0.01, 0.02), "muon": optimizer(0.01)})
    outcome, said = run(study, tmp_path)
    assert outcome.complete
    assert outcome.started == outcome.total == len(outcome.results) == 3 + 2 + 3
    assert "test: 8 cells; 2 at a time" in said
    by_label = {
        tuple(
            result.settings[key] for key in ("variant", "delay", "correction", "learning_rate")
        ): (result)
        for result in outcome.results.values()
    }
    corrected = by_label["adam", "one-step", "error-feedback", 0.01]
    assert corrected.validation_loss == pytest.approx(2.31)
    assert corrected.losses == [pytest.approx(2.31 + 1 / number) for number in (1, 2, 3, 4)]
    ((number, loss),) = corrected.validation
    assert number == 4
    assert loss == pytest.approx(2.31)
    assert corrected.seconds_per_iteration == 0.1
    assert "--lr 0.01" in " ".join(corrected.command)
    assert set(corrected.versions) >= {"torch", "megatron-core"}

    files = {path: path.stat().st_mtime_ns for path in tmp_path.glob("cells/*/*")}
    again, said = run(study, tmp_path)
    assert again.complete
    assert again.started == 0
    assert again.results == outcome.results
    assert "8 of them done before" in said
    assert files == {path: path.stat().st_mtime_ns for path in tmp_path.glob("cells/*/*")}


def test_changed_configuration_runs_what_changed(tmp_path: Path) -> None:
    run(study_of({"adam": optimizer(0.01), "muon": optimizer(0.01)}), tmp_path)
    outcome, _ = run(study_of({"adam": optimizer(0.01), "muon": optimizer(0.02)}), tmp_path)
    assert (outcome.started, outcome.complete) == (3, True)
    outcome, _ = run(study_of({"adam": optimizer(0.01)}, seeds=[1, 2]), tmp_path)
    assert (outcome.started, outcome.total) == (3, 6)


def test_logging_to_wandb_runs_nothing_again(tmp_path: Path) -> None:
    study = study_of({"adam": optimizer(0.01)}, delays=["none"])
    outcome, _ = run(study, tmp_path, wandb="mine")
    (result,) = outcome.results.values()
    assert "--wandb-project mine --wandb-exp-name test adam" in " ".join(result.command)
    assert run(study, tmp_path)[0].started == 0


def test_half_written_result_is_run_again(tmp_path: Path) -> None:
    study = study_of({"adam": optimizer(0.01)})
    run(study, tmp_path)
    first, second, third = sorted(tmp_path.glob("cells/*/result.json"))
    first.write_text(first.read_text()[:40])
    second.rename(second.with_name("result.json.partial"))
    third.write_text(json.dumps({"name": "other"}))
    outcome, _ = run(study, tmp_path)
    assert (outcome.started, outcome.complete) == (3, True)
    assert not second.with_name("result.json.partial").exists()


def test_diverged_run_is_a_result(tmp_path: Path) -> None:
    study = study_of({"adam": optimizer(0.01, fake="diverge")})
    outcome, said = run(study, tmp_path)
    assert outcome.complete
    assert {result.status for result in outcome.results.values()} == {results.DIVERGED}
    assert all(result.loss == math.inf for result in outcome.results.values())
    assert all(len(result.losses) == 2 for result in outcome.results.values())
    assert said.count("diverged") == 3
    assert run(study, tmp_path)[0].started == 0


def test_failed_run_is_told_and_run_again(tmp_path: Path) -> None:
    optimizers = {"adam": optimizer(0.01), "lion": optimizer(0.01, fake="fail")}
    outcome, said = run(study_of(optimizers), tmp_path)
    assert not outcome.complete
    assert len(outcome.results) == 3
    assert len(outcome.failures) == 3
    assert all(
        "exit code 1: ValueError: the tensors do not fit" in problem
        and str(tmp_path / "cells") in problem
        for problem in outcome.failures.values()
    )
    assert said.count("FAILED") == 3
    # Not mended: the same again. The other optimizer's runs are not touched.
    assert run(study_of(optimizers), tmp_path)[0].started == 3


def test_failed_tuning_leaves_the_grid_open(tmp_path: Path) -> None:
    optimizers = {"adam": optimizer(0.01), "lion": optimizer(0.01, 0.02, fake="fail")}
    outcome, _ = run(study_of(optimizers), tmp_path)
    assert len(outcome.failures) == 2
    assert not outcome.complete


def test_gives_up_when_nothing_works(tmp_path: Path) -> None:
    study = study_of({"adam": optimizer(0.01, fake="fail")}, seeds=[1, 2, 3])
    with pytest.raises(RunError, match=r"3 cells failed and none succeeded: .* do not fit"):
        run(study, tmp_path, jobs=1)
    assert len(list(tmp_path.glob("cells/*"))) == 3


def test_hanging_run_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "_SILENCE_S", 2.0)
    study = study_of({"adam": optimizer(0.01, fake="hang")}, delays=["none"])
    outcome, _ = run(study, tmp_path)
    assert ["printed nothing for 2 s and was ended" in p for p in outcome.failures.values()] == [
        True
    ]
    assert not _children_with("fake_training.py")


def _children_with(word: str) -> list[psutil.Process]:
    found = []
    for child in psutil.Process().children(recursive=True):
        try:
            if any(word in part for part in child.cmdline()):
                found.append(child)
        except psutil.NoSuchProcess:
            continue
    return found


DRIVER = """
import sys, signal
from pathlib import Path
sys.path.insert(0, {repository!r})
from tests.study.test_runner import optimizer, run, study_of
signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
# A shell starts what it runs in the background with SIGINT ignored, and that is inherited.
signal.signal(signal.SIGINT, signal.default_int_handler)
run(study_of({{"adam": optimizer(0.01, fake="hang")}}), Path(sys.argv[1]))
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_stopped_study_leaves_no_process(number: signal.Signals, tmp_path: Path) -> None:
    """Not even when it gets no chance to end them."""
    code = DRIVER.format(repository=str(REPOSITORY))
    with subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], stderr=subprocess.DEVNULL
    ) as process:
        while len(list(tmp_path.glob("cells/*/log.txt"))) < 2 or not all(
            "iteration        2" in path.read_text() for path in tmp_path.glob("cells/*/log.txt")
        ):
            assert process.poll() is None
            time.sleep(0.05)
        started = psutil.Process(process.pid).children(recursive=True)
        assert len(started) == 2
        process.send_signal(number)
        process.wait(timeout=60)
        _, alive = psutil.wait_procs(started, timeout=20)
    assert alive == []
    assert runner.read_results(tmp_path) == {}


def test_second_study_in_a_folder_is_refused(tmp_path: Path) -> None:
    study = study_of({"adam": optimizer(0.01)})
    with runner._alone(tmp_path), pytest.raises(RunError, match="another study is running"):
        run(study, tmp_path)
    assert run(study, tmp_path)[0].complete


def test_run_goes_on_from_its_checkpoints(tmp_path: Path) -> None:
    """The losses are those of all of its starts, the later one where two have an iteration."""
    study = study_of({"adam": optimizer(0.01)}, delays=["none"], checkpoints={"interval": 2})
    (cell,) = plan(study, {}, identity=runner.identity_of(study, DATA.identity))
    folder = runner.folder_of(tmp_path, cell)
    (folder / "checkpoints").mkdir(parents=True)
    (folder / "checkpoints" / "start").write_text("2")
    # From another seed, to tell them apart.
    other = config.flag_words({**cell.flags, "seed": ("50",)})
    earlier = subprocess.run((*FAKE, *other), capture_output=True, text=True, check=True).stdout
    (folder / "log.txt").write_text("".join(earlier.splitlines(keepends=True)[:3]))
    outcome, _ = run(study, tmp_path)
    (result,) = outcome.results.values()
    expected = [2.5 + 1, 2.5 + 1 / 2, 2.01 + 1 / 3, 2.01 + 1 / 4]
    assert result.losses == [pytest.approx(loss) for loss in expected]
    assert "--save-interval 2" in " ".join(result.command)
    assert (folder / "log-001.txt").exists()
    assert not (folder / "checkpoints").exists()


@pytest.mark.parametrize(
    ("output", "problem"),
    [
        ("megatron_async: --cpu added --transformer-impl local\nKeyError: 'x'\n", "KeyError: 'x'"),
        ("megatron_async: --no-deferred-update is set: with\n", ""),
        ("[rank0]: torch.OutOfMemoryError: CUDA\n", "torch.OutOfMemoryError: CUDA"),
        (
            "megatron_async: 1 problem with the arguments:\n  1. --x is wrong.\nValueError: y\n",
            "megatron_async: 1 problem with the arguments:\n  1. --x is wrong.",
        ),
        (
            "pretrain_gpt.py: error: unrecognized arguments: --x\n",
            "error: unrecognized arguments: --x",
        ),
        ("megatron_async: there is no script x.py\n", "there is no script x.py"),
    ],
)
def test_cause_of_a_failure(output: str, problem: str) -> None:
    assert problem_in(output) == problem


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("Unexpected result nan (message='found NaN in local forward loss calculation')", True),
        ("RuntimeError: rank 0, iteration 7: the gradient norm is inf. The weights made", True),
        ("found Inf in local grad norm for bucket #0", True),
        (" iteration 3/ 4 | lm loss: 5.0 | number of nan iterations:   0 |", False),
    ],
)
def test_lines_of_a_diverged_run(line: str, expected: bool) -> None:
    assert results.diverged(line) == expected


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_live_table_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.get_terminal_size", lambda: type("Size", (), {"columns": 70}))
    stream = Terminal()
    table = LiveTable(stream)
    rows = [
        Row(label="adam none", iteration=50, iterations=100, loss=2.5),
        Row(label="muon", iteration=0, iterations=100, loss=None),
    ]
    table.update(done=1, total=4, rows=rows, seconds_left=200.0)
    assert stream.getvalue().splitlines() == [
        "1 of 4 cells done, about 3 min left",
        "  adam none [##########----------]     50/100  loss 2.500",
        "  muon      [--------------------]      0/100",
    ]
    table.say("a line that stays")
    # Three lines up, and everything from there on is replaced.
    assert stream.getvalue().endswith("\x1b[3F\x1b[Ja line that stays\n")
    table.update(done=2, total=4, rows=[], seconds_left=None)
    table.close()
    assert stream.getvalue().endswith("2 of 4 cells done\n\x1b[1F\x1b[J")


def test_live_lines_in_a_log(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(0, 1000, 40))
    monkeypatch.setattr("time.monotonic", lambda: float(next(clock)))
    stream = io.StringIO()
    table = LiveTable(stream)
    for iteration in range(5):
        row = Row(label="adam", iteration=iteration, iterations=9, loss=2.5)
        table.update(done=0, total=2, rows=[row], seconds_left=None)
    assert stream.getvalue().splitlines() == [
        "0 of 2 cells done: adam 2/9  loss 2.500",
        "0 of 2 cells done: adam 4/9  loss 2.500",
    ]


def test_dataset_is_made_once_and_known_by_its_contents(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("some text\n" * 20)
    dataset = config.Dataset(kind="files", paths=(str(tmp_path / "a.txt"),))
    first = prepare(dataset, tmp_path / "one")
    (path,) = (tmp_path / "one" / "data").glob("*.bin")
    written = path.stat().st_mtime_ns
    assert prepare(dataset, tmp_path / "one") == first
    assert path.stat().st_mtime_ns == written
    assert prepare(dataset, tmp_path / "two").identity == first.identity
    (tmp_path / "a.txt").write_text("other text\n" * 20)
    assert prepare(dataset, tmp_path / "three").identity != first.identity
    prefix = config.Dataset(kind="prefix", paths=(str(path.with_suffix("")),))
    assert prepare(prefix, tmp_path).flags[:1] == ("--data-path",)
    missing = config.Dataset(kind="prefix", paths=("nowhere",))
    with pytest.raises(config.ConfigError, match=r"no file nowhere.bin. Make it with"):
        prepare(missing, tmp_path)


def test_gpus_are_shared_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7,8")
    study = study_of({"adam": optimizer(0.01)}, device="gpu", ranks=2)
    assert [one["CUDA_VISIBLE_DEVICES"] for one in command._environments(study, None)] == [
        "4,5",
        "6,7",
    ]
    with pytest.raises(RunError, match=r"3 run.* of 2 GPUs each need more than the 5 GPUs here"):
        command._environments(study, 3)


def test_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["--list"]) == 0
    shown = capsys.readouterr().out
    assert all(f"\n{name} " in f"\n{shown}" for name in config.shipped())
    assert command.main(["quick", "--dry-run", "--set", "seeds=[7]"]) == 0
    shown = capsys.readouterr().out
    assert shown.count("-m megatron_async --cpu") == 6
    assert "--seed 7" in shown
    assert command.main(["report", str(tmp_path)]) == 1
    assert "holds no study" in capsys.readouterr().err
    assert command.main(["nowhere", "--output", str(tmp_path)]) == 1
    assert "megatron-async study: there is no file nowhere" in capsys.readouterr().err
    (tmp_path / "taken").touch()
    assert command.main(["quick", "--output", str(tmp_path / "taken")]) == 1
    assert "taken is a file; name a folder" in capsys.readouterr().err


def test_fork_launcher_that_cannot_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "megatron").mkdir()
    (tmp_path / "megatron" / "__init__.py").write_text("raise ImportError('no such library')\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    study = study_of({"adam": optimizer(0.01)})
    with pytest.raises(LaunchError, match="no such library"):
        runner.run(
            study,
            tmp_path / "out",
            dataset=DATA,
            launcher=ForkLauncher(log=tmp_path / "log"),
            environments=[{}],
            live=LiveTable(io.StringIO()),
        )


def start(*argv: str) -> "subprocess.Popen[bytes]":
    return subprocess.Popen([sys.executable, "-m", "megatron_async.tools.cli", "study", *argv])


@pytest.mark.timeout(900)
def test_quick_study_stopped_and_resumed_shows_the_papers_ordering(tmp_path: Path) -> None:
    with start("quick", "--output", str(tmp_path)) as process:
        while not (done := list(tmp_path.glob("cells/*/result.json"))):
            assert process.poll() is None
            time.sleep(0.05)
        started = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=60) == 128 + signal.SIGTERM
        _, alive = psutil.wait_procs(started, timeout=20)
    assert alive == []
    before = {path: path.stat().st_mtime_ns for path in done}
    with start("quick", "--output", str(tmp_path)) as process:
        assert process.wait(timeout=800) == 0
    assert all(path.stat().st_mtime_ns == written for path, written in before.items())
    rows = list(csv.DictReader((tmp_path / "report" / "summary.csv").open()))
    gaps = {(row["optimizer"], row["correction"]): float(row["gap"]) for row in rows if row["gap"]}
    assert len(rows) == 6
    assert gaps["adam", "none"] > 2 * gaps["muon", "none"] > 0
    for name in ("adam", "muon"):
        assert gaps[name, "error-feedback"] < gaps[name, "none"]


@pytest.mark.slow
def test_a_fork_trains_as_a_process_of_its_own_does(tmp_path: Path) -> None:
    small = ["--set", "flags.train-iters=6", "--set", "optimizers.adam=null"]
    for name, flags in (("forked", []), ("separate", ["--no-fork"])):
        with start("quick", "--output", str(tmp_path / name), *small, *flags) as process:
            assert process.wait(timeout=500) == 0
    forked, separate = (runner.read_results(tmp_path / name) for name in ("forked", "separate"))
    assert len(forked) == 3
    assert {name: (one.losses, one.validation) for name, one in forked.items()} == {
        name: (one.losses, one.validation) for name, one in separate.items()
    }


@pytest.mark.slow
def test_killed_run_goes_on_from_its_checkpoint_with_the_same_losses(tmp_path: Path) -> None:
    changes = (
        *("optimizers.adam=null", "flags.train-iters=24", "delays=[one-step]"),
        *("corrections=[error-feedback]", "checkpoints={interval: 8}"),
    )
    flags = [word for change in changes for word in ("--set", change)]
    with start("quick", "--output", str(tmp_path / "whole"), *flags) as process:
        assert process.wait(timeout=500) == 0
    with start("quick", "--output", str(tmp_path / "killed"), *flags) as process:
        while not any(
            " iteration       17/" in path.read_text()
            for path in tmp_path.glob("killed/cells/*/log.txt")
        ):
            assert process.poll() is None
            time.sleep(0.02)
        started = psutil.Process(process.pid).children(recursive=True)
        process.kill()
    assert psutil.wait_procs(started, timeout=20)[1] == []
    assert runner.read_results(tmp_path / "killed") == {}
    with start("quick", "--output", str(tmp_path / "killed"), *flags) as process:
        assert process.wait(timeout=500) == 0
    (whole,) = runner.read_results(tmp_path / "whole").values()
    (resumed,) = runner.read_results(tmp_path / "killed").values()
    assert len(list(tmp_path.glob("killed/cells/*/log-001.txt"))) == 1
    assert resumed.losses == whole.losses
    assert resumed.validation == whole.validation
