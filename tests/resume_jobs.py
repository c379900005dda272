"""Training jobs that save, stop and resume, many of them in one launch.

Each job is run by ``tests/job_runner.py`` in a fork of its own. They run in the order given, so a
later one may load what an earlier one saved.
"""

import dataclasses
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from harness import PRETRAIN_GPT, REPOSITORY, Value, gpt_args, run_torchrun

__all__ = ["ASYNC", "COMMON_FLAGS", "Outcome", "Step", "run_steps"]

ASYNC: Mapping[str, Value] = {"pipeline_schedule": "pipedream-2bw"}

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
        failed: whether a rank ended with an error.
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
    logs = directory / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    specs = []
    for step in steps:
        place = logs / f"{ranks}-{step.name}"
        place.mkdir()
        flags = {
            name: _in(directory, value) for name, value in {**COMMON_FLAGS, **step.flags}.items()
        }
        script = PRETRAIN_GPT
        if step.prelude:
            script = place / "script.py"
            script.write_text(f"{step.prelude}\n{PRETRAIN_GPT.read_text()}")
        specs.append(
            {
                "directory": str(place),
                "script": str(script),
                "argv": gpt_args(**flags),
                "break": None,
                "dump": [],
            }
        )
    file = directory / f"jobs-{ranks}-{steps[0].name}.json"
    file.write_text(json.dumps(specs))
    run_torchrun(
        ranks,
        [str(file)],
        launcher=(),
        script=REPOSITORY / "tests" / "job_runner.py",
        timeout=120 + 60 * len(steps),
        env=env,
    )
    outcomes = {
        step.name: _outcome(Path(spec["directory"]), ranks)
        for step, spec in zip(steps, specs, strict=True)
    }
    for name, outcome in outcomes.items():
        if outcome.failed and not may_fail:
            pytest.fail(f"{name} failed:\n{outcome.log[-6000:]}", pytrace=False)
    return outcomes


def _in(directory: Path, value: Value) -> Value:
    return value.replace("{dir}", str(directory)) if isinstance(value, str) else value


def _outcome(place: Path, ranks: int) -> Outcome:
    texts = [(place / f"rank{rank}.log").read_text(errors="replace") for rank in range(ranks)]
    records = [place / f"rank{rank}.json" for rank in range(ranks)]
    codes = [json.loads((place / f"rank{rank}.code").read_text()) for rank in range(ranks)]
    failed = not all(record.exists() for record in records)
    if failed:
        return Outcome(0, [], {}, [], [], "\n".join(texts), failed, codes, [])
    each = [json.loads(record.read_text()) for record in records]
    numbers = each[-1]
    loaded = re.search(r"successfully loaded checkpoint from .* at iteration (\d+)", texts[0])
    return Outcome(
        first=1 + (int(loaded[1]) if loaded else 0),
        losses=numbers["losses"],
        norms={done + 1: norm for done, norm in numbers["norms"]},
        reported=numbers["reported"],
        validation=[(done, loss) for done, loss in numbers["validation"]],
        log=texts[0] + ("\n" + texts[-1] if ranks > 1 else ""),
        failed=failed,
        codes=codes,
        ran=[len(one["reported"]) for one in each],
    )
