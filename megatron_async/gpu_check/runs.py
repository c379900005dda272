"""The runs of a check, by name: the same flags on GPUs and on CPU ranks, but for ``--cpu``."""

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from megatron_async.gpu_check.training import (
    ASYNCHRONOUS,
    LARGE,
    LOCAL,
    PIPELINE,
    SMALL,
    TRANSFORMER_ENGINE,
    Model,
)

__all__ = ["Machine", "MachineError", "Run", "examine", "runs_on"]

_BUBBLE = "--log-pipeline-bubble"
_SANITIZER = (("TORCH_CUDA_SANITIZER", "1"),)
_PROBE_S = 120.0

# In a process of its own: this one shall not hold a context on a GPU.
_PROBE = """
import importlib.util, json
import torch

def importable(name):
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        return False

gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
print(json.dumps({
    "torch": torch.__version__,
    "gpus": gpus,
    "transformer_engine": importable("transformer_engine"),
    "fused_accumulation": importable("fused_weight_gradient_mlp_cuda"),
    "megatron": importable("megatron.training"),
}))
"""


class MachineError(Exception):
    """Nothing can be checked here; the message says what to do."""


@dataclass(frozen=True, kw_only=True)
class Machine:
    """What the runs have.

    Attributes:
        cpu: they are on CPU ranks.
        gpus: names of the GPUs that PyTorch sees.
        torch: its version.
        transformer_engine: it is installed.
        fused_accumulation: Apex's kernel for fused gradient accumulation is installed.
        megatron: ``megatron.training`` can be imported.
    """

    cpu: bool
    gpus: tuple[str, ...]
    torch: str
    transformer_engine: bool
    fused_accumulation: bool
    megatron: bool

    @property
    def stages(self) -> int:
        """Pipeline stages of most runs."""
        return 2 if self.cpu else max(n for n in (1, 2, 4) if n <= len(self.gpus))

    @property
    def microbatches(self) -> int:
        """Of the same runs."""
        return 2 * self.stages

    @property
    def layer_flags(self) -> tuple[str, ...]:
        """Of the runs whose time and memory count: what a user of this machine would take."""
        if self.cpu or not self.transformer_engine:
            return LOCAL
        fusion = () if self.fused_accumulation else ("--no-gradient-accumulation-fusion",)
        return (*TRANSFORMER_ENGINE, *fusion)

    @property
    def title(self) -> str:
        """For people."""
        if self.cpu:
            return f"{self.stages} CPU ranks, PyTorch {self.torch}"
        names = ", ".join(sorted(set(self.gpus)))
        layers = "Transformer Engine" if self.transformer_engine else "no Transformer Engine"
        return f"{self.stages} of {len(self.gpus)} GPUs ({names}), PyTorch {self.torch}, {layers}"


def examine(*, cpu: bool) -> Machine:
    """Look at this machine.

    Args:
        cpu: the runs are to be on CPU ranks.

    Raises:
        MachineError: PyTorch cannot be imported, or there is no GPU.
    """
    try:
        found = subprocess.run(
            [sys.executable, "-c", _PROBE],
            capture_output=True,
            text=True,
            check=True,
            timeout=_PROBE_S,
        )
    except subprocess.CalledProcessError as error:
        last = error.stderr.strip().splitlines()[-1:]
        raise MachineError(
            f"PyTorch does not start: {''.join(last)}. `megatron-async doctor` says more."
        ) from None
    except subprocess.TimeoutExpired:
        raise MachineError(f"PyTorch did not start within {_PROBE_S:.0f} s.") from None
    facts = json.loads(found.stdout.splitlines()[-1])
    if not cpu and not facts["gpus"]:
        raise MachineError(
            f"PyTorch {facts['torch']} sees no GPU. On CPU ranks, add --cpu; it checks what can "
            "be checked there."
        )
    return Machine(cpu=cpu, **facts | {"gpus": tuple(facts["gpus"])})


@dataclass(frozen=True, kw_only=True)
class Run:
    """What torchrun is to run.

    Attributes:
        arguments: behind its own.
        ranks: how many.
        environment: variables to add.
    """

    arguments: tuple[str, ...]
    ranks: int
    environment: tuple[tuple[str, str], ...] = ()


def runs_on(machine: Machine, script: Path) -> dict[str, Run]:
    """All runs by name. Names of the same run stand for one run of it.

    Args:
        machine: where.
        script: the training script.
    """

    def training(
        model: Model,
        flags: Sequence[str],
        *,
        stages: int = machine.stages,
        microbatches: int = machine.microbatches,
        cpu: bool = machine.cpu,
        environment: tuple[tuple[str, str], ...] = (),
    ) -> Run:
        launcher = ("-m", "megatron_async", *(("--cpu",) if cpu else ()), str(script))
        common = model.flags(stages=stages, microbatches=microbatches)
        return Run(arguments=(*launcher, *common, *flags), ranks=stages, environment=environment)

    short = replace(SMALL, iterations=4)
    large, pipeline = (SMALL, SMALL) if machine.cpu else (LARGE, PIPELINE)
    layers = machine.layer_flags
    return {
        "small-1f1b": training(SMALL, (*LOCAL, _BUBBLE)),
        "small-2bw": training(SMALL, (*LOCAL, *ASYNCHRONOUS, _BUBBLE)),
        "small-2bw-undeferred": training(SMALL, (*LOCAL, *ASYNCHRONOUS, "--no-deferred-update")),
        "small-2bw-cpu-ranks": training(SMALL, (*LOCAL, *ASYNCHRONOUS, _BUBBLE), cpu=True),
        "small-2bw-te": training(SMALL, (*layers, *ASYNCHRONOUS)),
        "sanitizer-planted-race": Run(
            arguments=("-m", "megatron_async.gpu_check.planted_race"),
            ranks=1,
            environment=_SANITIZER,
        ),
        "sanitizer-2bw": training(short, (*LOCAL, *ASYNCHRONOUS), environment=_SANITIZER),
        "sanitizer-1f1b": training(short, LOCAL, environment=_SANITIZER),
        "1f1b": training(pipeline, (*layers, _BUBBLE)),
        "2bw": training(pipeline, (*layers, *ASYNCHRONOUS, _BUBBLE)),
        "one-stage-megatron": training(large, layers, stages=1, microbatches=8),
        "one-stage-2bw": training(large, (*layers, *ASYNCHRONOUS), stages=1, microbatches=8),
    }
