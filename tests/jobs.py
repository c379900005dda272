"""Jobs that tests share: each is run once, many of them in one launch.

A test names the jobs it needs in a parameter that has an attribute ``jobs``, and takes the fixture
:func:`results`::

    @pytest.mark.parametrize("case", [Case(...)])
    def test_something(results, case):
        for job in case.jobs:
            assert results[job].losses

The first look-up of a job runs all jobs of as many ranks that the selected tests need, by
``tests/job_runner.py``. All jobs of one model start from one checkpoint.
"""

import dataclasses
import functools
import json
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import PRETRAIN_GPT, REPOSITORY, Value, gpt_args, run_torchrun

__all__ = ["ASYNC", "MODELS", "Job", "JobResult", "Results", "job", "job_argv", "results"]

RUNNER = REPOSITORY / "tests" / "job_runner.py"

ASYNC: Mapping[str, Value] = {"pipeline_schedule": "pipedream-2bw"}

# Learning rate and weight decay change in every iteration: a value of the wrong batch shows.
_FLAGS: Mapping[str, Value] = {
    "hidden_size": 32,
    "seq_length": 32,
    "max_position_embeddings": 32,
    "vocab_size": 128,
    "make_vocab_size_divisible_by": 64,  # 128 rows with two tensor-parallel ranks too
    "micro_batch_size": 2,
    "global_batch_size": 8,
    "train_iters": 10,
    "hidden_dropout": 0,
    "attention_dropout": 0,
    "lr": "3e-3",
    "min_lr": "1e-4",
    "lr_decay_style": "cosine",
    "lr_warmup_iters": 3,
    "start_weight_decay": 0.0,
    "end_weight_decay": 0.1,
    "weight_decay_incr_style": "linear",
    "distributed_timeout_minutes": 2,
}

_MOE: Mapping[str, Value] = {
    "num_experts": 4,
    "moe_router_topk": 2,
    "moe_router_load_balancing_type": "aux_loss",
    "moe_aux_loss_coeff": 0.1,
    "disable_bias_linear": True,
}

MODELS: Mapping[str, Mapping[str, Value]] = {
    "tied": {},
    "untied": {"untie_embeddings_and_output_weights": True},
    "moe": _MOE,
    "moe-untied": {**_MOE, "untie_embeddings_and_output_weights": True},
}
"""Models that a job can train, each with a checkpoint of its own."""


@dataclasses.dataclass(frozen=True)
class Job:
    """A training job; make one with :func:`job`."""

    ranks: int
    model: str
    flags: tuple[tuple[str, Value], ...]
    broken: str | None
    dump: tuple[str, ...]


def job(
    ranks: int = 1,
    *,
    model: str = "tied",
    broken: str | None = None,
    dump: tuple[str, ...] = ("embedding",),
    **flags: Value,
) -> Job:
    """Make a job.

    Args:
        ranks: number of ranks.
        model: a key of ``MODELS``; the job starts from that model's checkpoint.
        broken: a key of ``job_runner.MUTATIONS``.
        dump: see ``job_runner.Recorder``.
        flags: added to those of all jobs, see ``harness.gpt_args``.
    """
    return Job(ranks, model, tuple(sorted(flags.items())), broken, dump)


def job_argv(each: Job, **more: Value) -> list[str]:
    """Make the training script's command line for a job, but for where it starts."""
    return gpt_args(**{**_FLAGS, **MODELS[each.model], **dict(each.flags), **more})


@dataclasses.dataclass(frozen=True)
class JobResult:
    """What a finished job recorded. All numbers have all their digits.

    Attributes:
        job: the job.
        directory: where it wrote.
        losses: of each iteration, from the last stage.
        reported: gradient norms that the training loop was told, None before the first.
        norms: gradient norms of asynchronous updates, by iteration (0 is the first).
        zeros: numbers of zeros in the gradients of asynchronous updates, if counted.
        validation: (number of iterations done, loss) of each evaluation.
    """

    job: Job
    directory: Path
    losses: list[float]
    reported: list[float | None]
    norms: dict[int, float]
    zeros: dict[int, int | None]
    validation: list[tuple[int, float]]

    def tensors(self, rank: int = 0) -> dict[str, Any]:
        """What the job dumped on a rank."""
        found: dict[str, Any] = torch.load(self.directory / f"rank{rank}.pt")
        return found


class Results:
    """The results of jobs, which are run when the first of them is looked up."""

    def __init__(self, wanted: Iterable[Job]) -> None:
        self._wanted = set(wanted)
        self._found: dict[Job, JobResult | str] = {}
        self._directory = tempfile.TemporaryDirectory(prefix="megatron-async-jobs-")
        self._checkpoints: set[str] = set()

    def __getitem__(self, wanted: Job) -> JobResult:
        if wanted not in self._found:
            self._wanted.add(wanted)
            self._run(wanted.ranks)
        found = self._found[wanted]
        if isinstance(found, str):
            pytest.fail(f"{wanted} failed:\n{found}", pytrace=False)
        return found

    def close(self) -> None:
        """Delete the jobs' directories."""
        self._directory.cleanup()

    def _checkpoint(self, model: str) -> Path:
        return Path(self._directory.name) / f"{model}-checkpoint"

    def _run(self, ranks: int) -> None:
        jobs = [j for j in self._wanted if j.ranks == ranks and j not in self._found]
        missing = {j.model for j in jobs} - self._checkpoints
        savers = [self._saver(model) for model in sorted(missing)]
        if ranks != 1 and savers:
            self._launch(1, savers)
            savers = []
        # Sets have no order that is the same in each run.
        jobs.sort(key=repr)
        first = len(self._found)
        paths = [Path(self._directory.name) / f"job-{first + i}" for i in range(len(jobs))]
        specs = [self._spec(each, path) for each, path in zip(jobs, paths, strict=True)]
        self._launch(ranks, [*savers, *specs])
        self._checkpoints |= missing
        for each, path in zip(jobs, paths, strict=True):
            self._found[each] = self._read(each, path)

    def _saver(self, model: str) -> dict[str, Any]:
        directory = Path(self._directory.name) / f"{model}-saver"
        flags: dict[str, Value] = {
            **_FLAGS,
            **MODELS[model],
            "train_iters": 1,
            "lr_warmup_iters": 0,
            "optimizer": "sgd",
            "save": self._checkpoint(model),
            "save_interval": 1,
            "ckpt_format": "torch_dist",
        }
        return _spec(directory, gpt_args(**flags))

    def _spec(self, each: Job, directory: Path) -> dict[str, Any]:
        start: dict[str, Value] = {
            "load": self._checkpoint(each.model),
            "finetune": True,
            "no_load_optim": True,
            "no_load_rng": True,
            "ckpt_format": "torch_dist",
        }
        return _spec(directory, job_argv(each, **start), each.broken, each.dump)

    def _launch(self, ranks: int, specs: list[dict[str, Any]]) -> None:
        with tempfile.NamedTemporaryFile("w", suffix=".json", dir=self._directory.name) as file:
            json.dump(specs, file)
            file.flush()
            run_torchrun(
                ranks, [file.name], launcher=(), script=RUNNER, timeout=120 + 60 * len(specs)
            )

    def _read(self, each: Job, directory: Path) -> JobResult | str:
        numbers = []
        for rank in range(each.ranks):
            file = directory / f"rank{rank}.json"
            if not file.exists():
                logs = [
                    f"---- rank {r} ----\n" + _end(directory / f"rank{r}.log")
                    for r in range(each.ranks)
                ]
                return "\n".join(logs)
            numbers.append(json.loads(file.read_text()))
        last = numbers[-1]
        return JobResult(
            job=each,
            directory=directory,
            losses=last["losses"],
            reported=last["reported"],
            norms=dict(last["norms"]),
            zeros=dict(last["zeros"]),
            validation=[(done, loss) for done, loss in last["validation"]],
        )


def _spec(
    directory: Path, argv: list[str], broken: str | None = None, dump: tuple[str, ...] = ()
) -> dict[str, Any]:
    directory.mkdir()
    return {
        "directory": str(directory),
        "script": str(PRETRAIN_GPT),
        "argv": argv,
        "break": broken,
        "dump": dump,
    }


def _end(log: Path, lines: int = 12) -> str:
    if not log.exists():
        return "(no log)"
    return "\n".join(log.read_text(errors="replace").splitlines()[-lines:])


@functools.cache
def _results_of(session: pytest.Session) -> Results:
    wanted: dict[Job, None] = {}
    for item in session.items:
        for value in getattr(getattr(item, "callspec", None), "params", defaultdict()).values():
            wanted |= dict.fromkeys(getattr(value, "jobs", ()))
    found = Results(wanted)
    session.config.add_cleanup(found.close)
    return found


@pytest.fixture(scope="session")
def results(request: pytest.FixtureRequest) -> Results:
    """The results of the jobs of all selected tests."""
    return _results_of(request.session)
