"""Training jobs that save, stop and resume, many of them in one launch.

They run in the order given, so a later one may load what an earlier one saved.
"""

import dataclasses
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from tests.support.forked import ForkedJob, Record, run_forked
from tests.support.gpt import Value, gpt_args

__all__ = [
    "COMMON_FLAGS",
    "Outcome",
    "Step",
    "assert_continues",
    "loads",
    "run_steps",
    "saves",
    "tracked",
]

# Dropout is on, as it is by default. Learning rate and weight decay change in every iteration: a
# value of the wrong batch shows.
COMMON_FLAGS: Mapping[str, Value] = {
    "hidden_size": 32,
    "seq_length": 32,
    "max_position_embeddings": 32,
    "vocab_size": 128,
    "micro_batch_size": 2,
    "global_batch_size": 8,
    "train_iters": 7,
    "lr": "3e-3",
    "min_lr": "1e-4",
    "lr_decay_style": "cosine",
    "lr_warmup_iters": 2,
    "start_weight_decay": 0.0,
    "end_weight_decay": 0.1,
    "weight_decay_incr_style": "linear",
    "distributed_timeout_minutes": 2,
}


@dataclasses.dataclass(frozen=True)
class Step:
    """A job.

    Attributes:
        name: unlike those of the other jobs.
        flags: beside the common ones.
        prelude: code to run before the training script, once the hooks are in place.
    """

    name: str
    flags: Mapping[str, Value]
    prelude: str = ""


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What became of a job.

    Attributes:
        first: the first iteration that it ran.
        losses: of each iteration that it ran, with all digits.
        norms: of the gradient of each update of an asynchronous schedule, by iteration.
        reported: what Megatron's loop was told in each iteration, None if nothing.
        validation: (iterations that were run before, loss) of each evaluation.
        log: what rank 0 and the last rank printed.
        failed: whether a rank ended with an error, be it after the last iteration.
        codes: each rank's exit code; negative for a signal, None if it did not end by itself.
        ran: how many iterations each rank ran; empty if the job failed.
    """

    first: int
    losses: list[float]
    norms: dict[int, float]
    reported: list[float | None]
    validation: list[tuple[int, float]]
    log: str
    failed: bool
    codes: list[int | None]
    ran: list[int]

    @property
    def by_iteration(self) -> dict[int, float]:
        """Losses by iteration; 1 is the first of a run."""
        return dict(enumerate(self.losses, self.first))

    @property
    def notices(self) -> list[str]:
        """The package's own log lines about checkpoints."""
        return re.findall(r"^megatron_async: (.*)$", self.log, flags=re.MULTILINE)


def run_steps(
    ranks: int,
    steps: Sequence[Step],
    directory: Path,
    *,
    may_fail: bool = False,
    env: Mapping[str, str] | None = None,
) -> dict[str, Outcome]:
    """Run jobs in one launch, one after another.

    Args:
        ranks: number of ranks of each.
        steps: the jobs. ``{dir}`` in a flag's value stands for ``directory``.
        directory: for logs and checkpoints.
        may_fail: whether a failed job is an outcome instead of a failed test.
        env: added to the environment.

    Returns:
        The outcomes by name.
    """
    jobs = [
        ForkedJob(
            directory=directory / "logs" / f"{ranks}-{step.name}",
            argv=gpt_args(
                **{
                    name: _in(directory, value)
                    for name, value in {**COMMON_FLAGS, **step.flags}.items()
                }
            ),
            prelude=step.prelude,
        )
        for step in steps
    ]
    records = run_forked(ranks, jobs, env=env)
    outcomes = {step.name: _outcome(record) for step, record in zip(steps, records, strict=True)}
    for name, record in zip(outcomes, records, strict=True):
        if record.failed and not may_fail:
            pytest.fail(f"{name} failed: {record.describe(60)}", pytrace=False)
    return outcomes


def saves(name: str, interval: int = 3, **more: Value) -> dict[str, Value]:
    """Flags of a step that saves to a folder, every so many iterations."""
    return {"save": f"{{dir}}/{name}", "save_interval": interval, **more}


def loads(name: str, step: int | None = None, **more: Value) -> dict[str, Value]:
    """Flags of a step that loads what another one has saved to a folder."""
    return {"load": f"{{dir}}/{name}", "ckpt_step": step, **more}


def tracked(checkpoints: Path) -> int:
    """The iteration of the latest checkpoint in a folder."""
    return int((checkpoints / "latest_checkpointed_iteration.txt").read_text())


def assert_continues(
    resumed: Outcome, uninterrupted: Outcome, *, done: int, total: int = 7
) -> None:
    """Compare every digit of every loss and of every gradient norm.

    Args:
        resumed: a run that goes on behind iteration ``done``.
        uninterrupted: the run that was not stopped.
        done: the iteration.
        total: the last one.
    """
    assert not resumed.failed, resumed.log[-3000:]
    assert list(resumed.by_iteration) == list(range(done + 1, total + 1))
    expected = uninterrupted.by_iteration
    assert resumed.by_iteration == {i: expected[i] for i in range(done + 1, total + 1)}
    assert resumed.norms == {i: norm for i, norm in uninterrupted.norms.items() if i > done}
    assert resumed.reported == uninterrupted.reported[done:total]


def _in(directory: Path, value: Value) -> Value:
    return value.replace("{dir}", str(directory)) if isinstance(value, str) else value


def _outcome(record: Record) -> Outcome:
    log = "\n".join(record.logs)
    numbers = record.numbers[-1]
    ran = [len(each["reported"]) for each in record.numbers if each is not None]
    if record.failed or numbers is None:
        return Outcome(0, [], {}, [], [], log, True, record.codes, [])
    first = record.logs[0]
    loaded = re.search(r"successfully loaded checkpoint from .* at iteration (\d+)", first)
    return Outcome(
        first=1 + (int(loaded[1]) if loaded else 0),
        losses=numbers["losses"],
        norms={done + 1: norm for done, norm in numbers["norms"]},
        reported=numbers["reported"],
        validation=[(done, loss) for done, loss in numbers["validation"]],
        log=first + ("\n" + record.logs[-1] if len(record.logs) > 1 else ""),
        failed=False,
        codes=record.codes,
        ran=ran,
    )
