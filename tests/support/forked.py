"""Many jobs of the training script in one launch, each in a fork of its own.

Most of the time of a tiny job goes into imports; here each rank imports once. The jobs run in the
order given, so a later one may load what an earlier one saved. What a job computes is recorded with
all its digits: what Megatron's own ``train_step`` and ``evaluate`` return, what is reported of each
update, and, from torch's optimizer hooks, the parameters. See :mod:`tests.support.forked_ranks` for
the other side.
"""

import dataclasses
import json
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.support.gpt import PRETRAIN_GPT
from tests.support.torchrun import run_torchrun

__all__ = ["ForkedJob", "Record", "run_forked"]

_SECONDS_PER_JOB = 60


@dataclasses.dataclass(frozen=True, kw_only=True)
class ForkedJob:
    """A job.

    Attributes:
        directory: for its logs and what it records; made here.
        argv: the training script's.
        prelude: code to run before the training script, once the hooks are in place.
        dump: see :class:`~tests.support.recorder.Recorder`.
    """

    directory: Path
    argv: Sequence[str]
    prelude: str = ""
    dump: Sequence[str] = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Record:
    """What became of a job; each list has an entry for each rank.

    Attributes:
        directory: the job's.
        codes: exit codes; negative for a signal, None if it did not end by itself.
        logs: what was printed.
        numbers: what was recorded; None of a rank that failed before its end.
    """

    directory: Path
    codes: list[int | None]
    logs: list[str]
    numbers: list[dict[str, Any] | None]

    @property
    def failed(self) -> bool:
        """Whether a rank ended with an error."""
        return any(code != 0 for code in self.codes) or None in self.numbers

    def describe(self, lines: int = 12) -> str:
        """Return the exit codes, and the end of what each rank printed."""
        parts = [f"exit codes {self.codes}"]
        for rank, log in enumerate(self.logs):
            parts += [f"---- rank {rank} ----", *log.splitlines()[-lines:]]
        return "\n".join(parts)


def run_forked(
    ranks: int, jobs: Sequence[ForkedJob], *, env: Mapping[str, str] | None = None
) -> list[Record]:
    """Run jobs in one launch, one after another.

    Args:
        ranks: of each job.
        jobs: the jobs.
        env: added to the environment.

    Returns:
        A record of each, failed ones included.
    """
    specs = [_spec(job) for job in jobs]
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump(specs, file)
        file.flush()
        run_torchrun(
            ranks,
            [file.name],
            launcher=("-m", "tests.support.forked_ranks"),
            script=None,
            timeout=120 + _SECONDS_PER_JOB * len(specs),
            env=env,
        )
    return [_record(job.directory, ranks) for job in jobs]


def _spec(job: ForkedJob) -> dict[str, Any]:
    job.directory.mkdir(parents=True)
    script = PRETRAIN_GPT
    if job.prelude:
        script = job.directory / "script.py"
        script.write_text(f"{job.prelude}\n{PRETRAIN_GPT.read_text()}")
    return {
        "directory": str(job.directory),
        "script": str(script),
        "argv": list(job.argv),
        "dump": list(job.dump),
    }


def _record(directory: Path, ranks: int) -> Record:
    def numbers(rank: int) -> Any:
        file = directory / f"rank{rank}.json"
        return json.loads(file.read_text()) if file.exists() else None

    return Record(
        directory=directory,
        codes=[json.loads((directory / f"rank{rank}.code").read_text()) for rank in range(ranks)],
        logs=[(directory / f"rank{rank}.log").read_text(errors="replace") for rank in range(ranks)],
        numbers=[numbers(rank) for rank in range(ranks)],
    )
