"""The package's own jobs: followed line by line, and always ended."""

import time
from pathlib import Path

import psutil
import pytest

from megatron_async.tools.job import Job, JobError


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
