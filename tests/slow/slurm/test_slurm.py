"""examples/gpt.sbatch on a real Slurm: stopped in every way, requeued, resumed to the last digit.

    pytest -m slow tests/slow/slurm

Two nodes with a rank each train examples/models/tiny.conf on CPU ranks over gloo. Some ten minutes
on two idle cores. ``SLURM_TRANSCRIPT`` names a file for what was typed and what the jobs said;
docs/slurm.md holds one.
"""

import dataclasses
import itertools
import os
import re
import shlex
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from tests.slow.slurm.cluster import Cluster, missing
from tests.support.gpt import REPOSITORY
from tests.support.torchrun import environment

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(3600),
    pytest.mark.skipif(bool(missing()), reason=f"not installed: {', '.join(missing())}"),
]

ITERATIONS = 100
SAVE_INTERVAL = 5
SCRIPT = Path(__file__).with_name("paced_gpt.py")
ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")


@dataclasses.dataclass
class Job:
    """A submitted examples/gpt.sbatch."""

    cluster: Cluster
    number: int
    folder: Path

    @property
    def log(self) -> str:
        return (self.folder / "job.log").read_text() if (self.folder / "job.log").exists() else ""

    @property
    def said(self) -> list[str]:
        """Lines of the batch script itself."""
        return re.findall(rf"^\S+ \S+ (job {self.number}\.\d+: .*)$", self.log, re.MULTILINE)

    @property
    def minutes(self) -> int:
        """Whole minutes that the running attempt has taken."""
        hours, minutes, _ = self.cluster.job(self.number)["RunTime"].split(":")
        return 60 * int(hours) + int(minutes)

    @property
    def losses(self) -> list[tuple[int, int, str]]:
        """(attempt, iteration, loss)."""
        path = self.folder / "losses"
        lines = path.read_text().splitlines() if path.exists() else []
        return [(int(a), int(i), loss) for a, i, loss in (line.split() for line in lines)]

    def iterations_of(self, attempt: int) -> list[int]:
        return [iteration for number, iteration, _ in self.losses if number == attempt]

    def wait_for_iterations(self, number: int, *, attempt: int) -> None:
        """Wait until an attempt has done so many."""
        self._wait(lambda: len(self.iterations_of(attempt)) >= number)

    def wait_for_stop(self, *, attempt: int) -> None:
        """Wait until an attempt has said that it was stopped."""
        begin = f"job {self.number}.{attempt}: stopped "
        self._wait(lambda: any(line.startswith(begin) for line in self.said))

    def rank(self, number: int, *, attempt: int) -> psutil.Process:
        """The process of a rank: not torchrun above it, nor the data loader's workers below, nor
        what an earlier attempt has left."""
        of = {"RANK": str(number), "SLURM_RESTART_COUNT": str(attempt)}
        ranks = [
            each
            for each in self.cluster.processes(self.number)
            if of.items() <= each.environ().items()
        ]
        (found,) = [each for each in ranks if each.ppid() not in {above.pid for above in ranks}]
        return found

    def wait_for_end(self) -> str:
        """Wait until the job is out of the queue; return its state."""
        self._wait(lambda: self.cluster.job(self.number)["JobState"] in ENDED)
        return self.cluster.job(self.number)["JobState"]

    def _wait(self, condition: Callable[[], bool], *, seconds: float = 1200) -> None:
        end = time.monotonic() + seconds
        while not condition():
            if time.monotonic() > end:
                pytest.fail(f"{self.cluster.job(self.number)}\n{self.log[-6000:]}")
            time.sleep(0.5)


class Bench:
    """Submits jobs to a cluster and writes the transcript."""

    def __init__(self, cluster: Cluster, root: Path) -> None:
        self.cluster = cluster
        self._root = root
        path = os.environ.get("SLURM_TRANSCRIPT")
        self._transcript = None if path is None else Path(path)
        if self._transcript is not None:
            self._transcript.write_text("")

    def submit(self, name: str, *options: str, **variables: str) -> Job:
        folder = self._root / name
        temporary = folder / "tmp"
        temporary.mkdir(parents=True)
        env = {
            **environment(),
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "TMPDIR": str(temporary),
            "LOSSES": str(folder / "losses"),
            "SCRIPT": str(SCRIPT),
            "OUTPUT": str(folder / "run"),
            "CPU": "1",
            "GPUS": "1",
            "HEAD": "localhost",  # n1 and n2 are names that only Slurm knows
            "NODE_CHECK": "0",
            **variables,
        }
        words = ["--nodes", "2", "--gpus-per-node", "0", *options]
        training = [
            *("--train-samples", str(16 * ITERATIONS), "--save-interval", str(SAVE_INTERVAL)),
            *("--log-interval", "1", "--eval-iters", "0"),
        ]
        settings = [f"{key}={value}" for key, value in variables.items()]
        self.note(f"\n# {name}")
        self.note(
            f"$ CPU=1 GPUS=1 {' '.join(settings)} sbatch {shlex.join(words)} \\\n"
            f"      examples/gpt.sbatch tiny {shlex.join(training)}"
        )
        output = self.cluster.run(
            *("sbatch", "--parsable", "--output", str(folder / "job.log"), *words),
            *("examples/gpt.sbatch", "tiny", *training),
            env=env,
            cwd=REPOSITORY,
        )
        return Job(self.cluster, int(output), folder)

    def type(self, *command: str) -> None:
        self.note(f"$ {shlex.join(command)}")
        self.cluster.run(*command)

    def note(self, line: str) -> None:
        if self._transcript is not None:
            with self._transcript.open("a") as file:
                file.write(line + "\n")

    def close(self, job: Job, *results: str) -> None:
        """Check that nothing is left behind, and end the job's part of the transcript."""
        job._wait(lambda: not self.cluster.processes(job.number), seconds=60)
        # Beside empty folders of torch's caches.
        assert [path for path in (job.folder / "tmp").rglob("*") if path.is_file()] == []
        if "is done" in job.log:
            assert not list((job.folder / "run" / "logs").glob("*.attempts"))
        for line in job.said:
            self.note(line.replace(f"{job.folder}/", ""))
        for line in (*results, "no process and no temporary file left"):
            self.note(f"-> {line}")


@pytest.fixture(scope="module")
def bench() -> Iterator[Bench]:
    # Short: the path of munge's socket must fit into 108 bytes.
    with tempfile.TemporaryDirectory(prefix="slurm-") as folder:
        (Path(folder) / "slurm").mkdir(mode=0o700)
        with Cluster(Path(folder) / "slurm") as cluster:
            yield Bench(cluster, Path(folder))


@pytest.fixture(scope="module")
def uninterrupted(bench: Bench) -> dict[int, str]:
    """The losses by iteration."""
    job = bench.submit("uninterrupted", NODE_CHECK="1")
    assert job.wait_for_end() == "COMPLETED", job.log[-6000:]
    assert "The nodes are fit." in job.log
    assert "2 ranks on 2 nodes" in job.log
    assert len(job.said) == 2
    losses = {iteration: loss for _, iteration, loss in job.losses}
    assert sorted(losses) == list(range(1, ITERATIONS + 1))
    # Each rank's output in a file of its own.
    logs = sorted((job.folder / "run" / "logs" / f"{job.number}.0").iterdir())
    assert [each.name for each in logs] == ["n1", "n2"]
    assert all(list(each.glob("*/attempt_0/0/stdout.log")) for each in logs)
    bench.close(job, f"{ITERATIONS} iterations, last loss {losses[ITERATIONS]}")
    return losses


def test_interrupted_in_every_way(bench: Bench, uninterrupted: dict[int, str]) -> None:
    """One job, five interruptions, the losses of the job that nobody interrupted."""
    job = bench.submit("interrupted", "--time", "60", "--signal", "TERM@60", PACE="1")
    number = str(job.number)

    job.wait_for_iterations(7, attempt=0)
    bench.type("scancel", "--signal=TERM", number)

    job.wait_for_iterations(7, attempt=1)
    bench.type("scontrol", "requeue", number)

    job.wait_for_iterations(7, attempt=2)
    bench.type("scancel", "--signal=KILL", f"{number}.0")

    job.wait_for_iterations(7, attempt=3)
    bench.note("$ kill -KILL PID  # of rank 1, as the kernel does when memory runs out")
    job.rank(1, attempt=3).send_signal(signal.SIGKILL)

    # Slurm looks at the limits once in 30 s, and so signals 60 to 90 s ahead. The limit would hold
    # for the attempts that follow as well, and on a busy machine they take that long to start.
    job.wait_for_iterations(2, attempt=4)
    bench.type("scontrol", "update", f"JobId={number}", f"TimeLimit={job.minutes + 2}")
    job.wait_for_stop(attempt=4)
    bench.type("scontrol", "update", f"JobId={number}", "TimeLimit=60")

    assert job.wait_for_end() == "COMPLETED", job.log[-6000:]
    attempts = [job.iterations_of(attempt) for attempt in range(job.losses[-1][0] + 1)]
    assert len(attempts) >= 6
    assert attempts[0][0] == 1
    assert attempts[-1][-1] == ITERATIONS
    for attempt, (before, after) in enumerate(itertools.pairwise(attempts)):
        resumed = after[0] - 1
        assert f"job {number}.{attempt + 1}: starts on n1 n2 with checkpoint {resumed}" in job.said
        if attempt in (2, 3):  # killed
            assert resumed % SAVE_INTERVAL == 0 or resumed == before[0] - 1
            assert before[-1] - SAVE_INTERVAL - 1 <= resumed <= before[-1]
        else:  # told: saved where it stopped, nothing computed twice
            assert resumed == before[-1]
    found = {(iteration, loss) for _, iteration, loss in job.losses}
    assert found == set(uninterrupted.items())
    for rank, attempt in ((0, 2), (1, 2), (1, 3)):
        end_orphans(job, rank=rank, attempt=attempt)
    parts = ", ".join(f"{each[0]} to {each[-1]}" for each in attempts)
    bench.close(
        job,
        f"iterations {parts}; all {ITERATIONS} losses equal to the uninterrupted job's, to the "
        "last digit",
    )


def end_orphans(job: Job, *, rank: int, attempt: int) -> None:
    """End what a killed rank has started for its saves, and nothing else.

    proctrack/linuxproc follows parents, and loses a process whose parent is gone. proctrack/cgroup,
    which clusters have, does not.
    """
    of = {"RANK": str(rank), "SLURM_RESTART_COUNT": str(attempt)}
    for process in job.cluster.processes(job.number):
        if process.ppid() == 1 and of.items() <= process.environ().items():
            process.kill()


def test_scancel_ends_the_job_for_good(bench: Bench) -> None:
    job = bench.submit("cancelled", PACE="0.5")
    job.wait_for_iterations(7, attempt=0)
    bench.type("scancel", str(job.number))
    assert job.wait_for_end() == "CANCELLED"
    bench.close(job)
    tracker = job.folder / "run" / "checkpoints" / "latest_checkpointed_iteration.txt"
    assert int(tracker.read_text()) == job.iterations_of(0)[-1]  # saved all the same
    assert job.iterations_of(1) == []


def test_a_job_without_progress_gives_up(bench: Bench) -> None:
    """It fails ahead of its first checkpoint, in every attempt."""
    job = bench.submit("no-progress", FAIL_AT="3", REQUEUE_LIMIT="2")
    assert job.wait_for_end() == "FAILED"
    assert sorted({attempt for attempt, _, _ in job.losses}) == [0, 1]
    expected = f"job {job.number}.1: gives up after 2 attempts without a newer checkpoint than none"
    assert job.said[-1].startswith(expected)
    assert "iteration 3 fails, as the test wants it" in job.log
    bench.close(job)
