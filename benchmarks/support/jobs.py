"""Start a training job on the ranks of this machine and read what it measured."""

import json
import os
import statistics
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from megatron_async.tools.job import end_family, rank_environment, torchrun

__all__ = ["SKIPPED", "JobError", "Measurement", "gpt_flags", "run_job", "train_iters"]

_BENCHMARKS = Path(__file__).resolve().parents[1]
_REPOSITORY = _BENCHMARKS.parent
_SCRIPT = Path(__file__).with_name("instrumented_gpt.py")

# As a GPU's caching allocator does. By default each large activation is mapped afresh: a million
# page faults in a short job, a tenth of its time, and no two slots alike.
_KEEP_FREED_MEMORY = ":".join(
    [
        "glibc.malloc.hugetlb=1",
        "glibc.malloc.mmap_threshold=2000000000",
        "glibc.malloc.trim_threshold=4000000000",
    ]
)

SKIPPED = 6
"""Iterations before the measured ones: the pipeline fills, allocators and caches warm up."""


class JobError(Exception):
    """A job failed or was stopped at its time limit; the message ends with the ranks' output."""


@dataclass(frozen=True)
class Measurement:
    """What all ranks of a job measured: `record.Record` of each, as dictionaries."""

    ranks: Sequence[dict[str, Any]]
    iterations: int

    @property
    def iteration_seconds(self) -> list[float]:
        """Each measured iteration's time on the first stage, the fill and the drain left out."""
        ends = self.ranks[0]["ends"]
        window = ends[SKIPPED - 1 : SKIPPED + self.iterations]
        return [after - before for before, after in pairwise(window)]

    @property
    def seconds(self) -> float:
        """Mean time of a measured iteration."""
        return statistics.mean(self.iteration_seconds)

    @property
    def median_seconds(self) -> float:
        """Median time of a measured iteration: what a hiccup of the machine does not change."""
        return statistics.median(self.iteration_seconds)


def train_iters(iterations: int) -> int:
    """How many iterations a job runs to have some measured ones: one more drains the pipeline."""
    return SKIPPED + iterations + 1


def gpt_flags(
    *,
    layers: int,
    hidden_size: int,
    heads: int,
    seq_length: int,
    vocab_size: int,
    stages: int,
    microbatches: int,
    iterations: int,
    micro_batch_size: int = 1,
    data_parallel: int = 1,
    optimizer: str = "adam",
    tied: bool = True,
    log_interval: int = 1000000,
) -> list[str]:
    """Return Megatron's flags of a GPT on made-up data."""
    flags = {
        "num-layers": layers,
        "hidden-size": hidden_size,
        "num-attention-heads": heads,
        "seq-length": seq_length,
        "max-position-embeddings": seq_length,
        "vocab-size": vocab_size,
        "tokenizer-type": "NullTokenizer",
        "micro-batch-size": micro_batch_size,
        "global-batch-size": micro_batch_size * microbatches * data_parallel,
        "train-iters": train_iters(iterations),
        "lr": 1e-4,
        "min-lr": 1e-4,
        "lr-decay-style": "constant",
        "optimizer": optimizer,
        "log-interval": log_interval,
        "eval-iters": 0,
        "eval-interval": 1000000,
        "num-workers": 0,
        "seed": 1234,
        "pipeline-model-parallel-size": stages,
    }
    argv = ["--mock-data"]
    if not tied:
        argv.append("--untie-embeddings-and-output-weights")
    for name, value in flags.items():
        argv += [f"--{name}", str(value)]
    return argv


def run_job(
    *,
    ranks: int,
    flags: Sequence[str],
    iterations: int,
    timeout: float,
    settings: dict[str, Any] | None = None,
    on_cpu: bool = True,
    script: Path = _SCRIPT,
    launched: bool = True,
) -> Measurement:
    """Train and return what was measured.

    Args:
        ranks: Processes, all on this machine.
        flags: The training script's, see `gpt_flags`.
        iterations: How many are measured.
        timeout: Seconds until the job is stopped.
        settings: Of the script's `Settings`, without `output`.
        on_cpu: CPU ranks; else one GPU a rank.
        script: What trains.
        launched: By the package's launcher; else the script is run as it stands.

    Raises:
        JobError: see there.
    """
    with tempfile.TemporaryDirectory(prefix="megatron-async-benchmark-") as folder:
        output, logs = Path(folder) / "output", Path(folder) / "logs"
        output.mkdir()
        command = [*torchrun(ranks), "--log-dir", str(logs), "--redirects", "3"]
        if launched:
            command += ["-m", "megatron_async", *(["--cpu"] if on_cpu else [])]
        command += [str(script), *flags]
        path = filter(None, [str(_REPOSITORY), str(_BENCHMARKS), os.environ.get("PYTHONPATH")])
        environment = {
            **rank_environment(),
            "PYTHONPATH": os.pathsep.join(path),
            "BENCHMARK_SETTINGS": json.dumps({**(settings or {}), "output": str(output)}),
        }
        if on_cpu:
            environment.setdefault("GLIBC_TUNABLES", _KEEP_FREED_MEMORY)
        elif "OMP_NUM_THREADS" not in os.environ:
            del environment["OMP_NUM_THREADS"]  # that of CPU ranks
        with subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        ) as process:
            try:
                printed, _ = process.communicate(timeout=timeout)
            except subprocess.TimeoutExpired:
                _stop(process)
                what = f"stopped after {timeout:.0f} s"
                raise JobError(_describe(what, command, logs, "")) from None
            except BaseException:
                _stop(process)
                raise
        if process.returncode:
            raise JobError(_describe(f"exit code {process.returncode}", command, logs, printed))
        found = [
            json.loads((output / f"rank{rank}.json").read_text(encoding="utf-8"))
            for rank in range(ranks)
        ]
    return Measurement(ranks=found, iterations=iterations)


def _stop(process: subprocess.Popen[str]) -> None:
    if process.poll() is None:
        end_family(process.pid)
    process.communicate()


def _describe(what: str, command: Sequence[str], logs: Path, printed: str) -> str:
    parts = [f"the job failed ({what}): {' '.join(command)}"]
    for file in sorted(logs.glob("*/attempt_*/*/std*.log")):
        lines = file.read_text(encoding="utf-8", errors="replace").splitlines()
        parts += [f"---- rank {file.parent.name} {file.stem} ----", *lines[-15:]]
    parts += ["---- torchrun ----", *printed.splitlines()[-15:]]
    return "\n".join(parts)
