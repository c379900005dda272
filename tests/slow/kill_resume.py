"""Kills jobs with SIGKILL at random moments, resumes them until they are done, compares the losses.

    python -m tests.slow.kill_resume [--runs 20] [--seed 0] [--format torch torch_dist]

Every loss of every attempt is compared with those of a job that nobody killed, with all its digits.
Two stages, two replicas, the distributed optimizer, the delay correction and dropout are on. Half
of the kills come at any time, the other half while a checkpoint is being saved; one rank is killed
first and the others at most 0.2 s later. A checkpoint is saved every second iteration.

Exit code 1 if any loss differs, or if a job that was not killed fails.
"""

import argparse
import dataclasses
import functools
import os
import random
import shutil
import signal
import socket
import sys
import tempfile
import time
import warnings
from collections.abc import Sequence
from pathlib import Path

from megatron_async.study.fork_host import import_once
from megatron_async.tools.job import rank_environment
from tests.support.fork import fork
from tests.support.gpt import ASYNC, PRETRAIN_GPT, Value, gpt_args
from tests.support.steps import COMMON_FLAGS

RANKS = 4
ITERATIONS = 12
FLAGS: dict[str, Value] = {
    **COMMON_FLAGS,
    **ASYNC,
    "delay_correction": "error-feedback",
    "pipeline_model_parallel_size": 2,
    "use_distributed_optimizer": True,
    "bf16": True,
    "train_iters": ITERATIONS,
    "save_interval": 2,
}
LIMIT = 300.0
"""Seconds until a job that was not killed counts as hung."""

# Each loss is written with all its digits, at once: a killed process writes nothing at its end.
PRELUDE = """
import os
from megatron.training import get_args, training
train_step = training.train_step
losses = os.open({path!r}, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
def recorded(*args, **kwargs):
    result = train_step(*args, **kwargs)
    if "lm loss" in result[0] and os.environ["RANK"] == {last!r}:
        line = f"{{get_args().curr_iteration + 1}} {{float(result[0]['lm loss'])!r}}"
        os.write(losses, (line + chr(10)).encode())
    return result
training.train_step = recorded
"""


@dataclasses.dataclass(frozen=True)
class Kill:
    """When to kill: so many seconds after the start, or after a line of a save was logged."""

    seconds: float
    save: int | None
    first: int
    others_after: float


class Attempt:
    """One start of a job.

    Args:
        directory: for its logs.
        checkpoints: where it loads from and saves to; None: it does neither.
        format: of the checkpoints.
    """

    def __init__(self, directory: Path, checkpoints: Path | None, format: str) -> None:
        directory.mkdir(parents=True)
        self._directory = directory
        self._losses = directory / "losses"
        script = directory / "script.py"
        prelude = PRELUDE.format(path=str(self._losses), last=str(RANKS - 1))
        script.write_text(f"{prelude}\n{PRETRAIN_GPT.read_text()}")
        flags: dict[str, Value] = {**FLAGS, "ckpt_format": format}
        if checkpoints is not None:
            flags |= {"save": checkpoints, "load": checkpoints}
        self._argv = [str(script), *gpt_args(**flags)]
        self._pids: list[int] = []
        self.started = 0.0

    def start(self) -> None:
        with socket.socket() as free:
            free.bind(("localhost", 0))
            port = free.getsockname()[1]
        self.started = time.monotonic()
        for rank in range(RANKS):
            work = functools.partial(_be_a_rank, rank, port, self._argv)
            self._pids.append(fork(work, log=self._directory / f"rank{rank}.log"))

    def wait(self, kill: Kill | None) -> bool:
        """Wait for the end, kill before it if told so.

        Returns:
            Whether it was killed.

        Raises:
            RuntimeError: it failed, or did not end, though nobody killed it.
        """
        due: float | None = None
        running = set(self._pids)
        failed = False
        while running:
            now = time.monotonic() - self.started
            if kill is not None and due is None and self._is_time(kill):
                due = now + (kill.seconds if kill.save is not None else 0.0)
            if kill is not None and due is not None and now >= due:
                self._kill(kill, running)
                return True
            if now > LIMIT or failed:
                self._kill(Kill(0, None, 0, 0), running)
                raise RuntimeError(self._tail())
            for pid in list(running):
                done, status = os.waitpid(pid, os.WNOHANG)
                if done:
                    running.remove(pid)
                    failed |= status != 0
            time.sleep(0.002)
        if failed:
            raise RuntimeError(self._tail())
        return False

    def _is_time(self, kill: Kill) -> bool:
        if kill.save is None:
            return time.monotonic() - self.started >= kill.seconds
        return self._log(0).count("saving checkpoint at iteration") > kill.save

    def _kill(self, kill: Kill, running: set[int]) -> None:
        first = self._pids[kill.first]
        for pid in (first, *(pid for pid in self._pids if pid != first)):
            if pid in running:
                os.killpg(pid, signal.SIGKILL)  # what it started to write with, too
                os.waitpid(pid, 0)
            if pid == first:
                time.sleep(kill.others_after)

    def _log(self, rank: int) -> str:
        file = self._directory / f"rank{rank}.log"
        return file.read_text(errors="replace") if file.exists() else ""

    def _tail(self) -> str:
        return "\n".join(
            f"---- rank {rank} of {self._directory} ----\n{self._log(rank)[-2000:]}"
            for rank in range(RANKS)
        )

    @property
    def losses(self) -> dict[int, str]:
        """Iteration -> loss with all its digits."""
        if not self._losses.exists():
            return {}
        lines = self._losses.read_text().splitlines()
        return {int(line.split()[0]): line.split()[1] for line in lines if len(line.split()) == 2}


def _be_a_rank(rank: int, port: int, argv: Sequence[str]) -> None:
    os.setpgid(0, 0)
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(RANKS),
        LOCAL_WORLD_SIZE=str(RANKS),
        MASTER_ADDR="localhost",
        MASTER_PORT=str(port),
    )
    from megatron_async.__main__ import main

    main(["--cpu", *argv])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--format", nargs="+", default=["torch", "torch_dist"])
    parser.add_argument("--most-kills", type=int, default=4, help="of one run")
    args = parser.parse_args()
    os.environ.update(rank_environment())
    draw = random.Random(args.seed)
    warnings.simplefilter("ignore")
    import_once()
    root = Path(tempfile.mkdtemp(prefix="megatron-async-kill-"))
    reference = Attempt(root / "reference", None, "torch")
    reference.start()
    reference.wait(None)
    usual = time.monotonic() - reference.started
    expected = reference.losses
    print(
        f"uninterrupted: {len(expected)} iterations in {usual:.1f} s, last loss "
        f"{expected[ITERATIONS]}",
        flush=True,
    )

    good = kills = in_saves = 0
    for run in range(args.runs):
        format = args.format[run % len(args.format)]
        place = root / f"run{run}"
        seen: dict[int, set[str]] = {}
        attempts = kills_here = 0
        story = []
        while True:
            attempt = Attempt(place / f"attempt{attempts}", place / "checkpoints", format)
            attempts += 1
            kill = None
            if kills_here < args.most_kills:
                saving = draw.random() < 0.5
                kill = Kill(
                    seconds=draw.uniform(0, 0.1 if format == "torch" else 1.5)
                    if saving
                    else draw.uniform(0.4 * usual, 1.1 * usual),
                    save=draw.randrange(3) if saving else None,
                    first=draw.randrange(RANKS),
                    others_after=draw.uniform(0, 0.2),
                )
            attempt.start()
            killed = attempt.wait(kill)
            for iteration, loss in attempt.losses.items():
                seen.setdefault(iteration, set()).add(loss)
            if not killed and kills_here:
                break
            if not killed:
                # It was faster than the kill, and there is nothing to see. Once more, from its
                # start.
                shutil.rmtree(place / "checkpoints")
                continue
            kills_here += 1
            kills += 1
            in_saves += kill is not None and kill.save is not None
            done = max(attempt.losses, default=0)
            story.append(f"{done}{'s' if kill is not None and kill.save is not None else ''}")
        exact = seen == {iteration: {loss} for iteration, loss in expected.items()}
        good += exact
        print(
            f"run {run:2d} ({format}): killed behind iterations {', '.join(story)}; "
            f"{'every loss equal' if exact else 'LOSSES DIFFER'}",
            flush=True,
        )
        if exact:
            shutil.rmtree(place)
        else:
            print({i: seen.get(i) for i in expected}, expected, place, flush=True)
    print(f"{good} of {args.runs} runs equal; {kills} kills, {in_saves} of them (s) in a save")
    if good == args.runs:
        shutil.rmtree(root)
    return 0 if good == args.runs else 1


if __name__ == "__main__":
    sys.exit(main())
