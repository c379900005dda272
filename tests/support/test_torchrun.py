"""The layer that starts jobs."""

import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.support.gpt import gpt_args
from tests.support.torchrun import run_torchrun, stop


def test_stopping_a_job_ends_processes_in_sessions_of_their_own() -> None:
    # As torchrun starts its ranks.
    code = (
        "import subprocess, sys, time; "
        "rank = [sys.executable, '-c', 'import time; print(1, flush=True); time.sleep(600)']; "
        "child = subprocess.Popen(rank, start_new_session=True, stdout=subprocess.PIPE); "
        "child.stdout.readline(); print(child.pid, flush=True); time.sleep(600)"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None
    child = psutil.Process(int(process.stdout.readline()))
    stop(process)
    assert process.poll() is not None
    assert not child.is_running() or child.status() == psutil.STATUS_ZOMBIE


def test_a_job_that_fails_fails_the_test_and_shows_each_ranks_log(tmp_path: Path) -> None:
    script = tmp_path / "fail.py"
    script.write_text("import os\nprint('I am', os.environ['RANK'])\nraise SystemExit('no luck')\n")
    with pytest.raises(pytest.fail.Exception) as failure:
        run_torchrun(2, [], launcher="none", script=script)
    message = str(failure.value)
    assert "I am 0" in message or "I am 1" in message
    assert "no luck" in message


def test_command_lines() -> None:
    argv = gpt_args(lr=None, bf16=True, mock_data=False, data_path=["a", "b"], num_layers=2)
    line = " ".join(argv)
    assert "--lr 1e-3" not in line
    assert "--mock-data" not in argv
    assert "--bf16" in argv
    assert "--data-path a b" in line
    assert "--num-layers 2" in line
