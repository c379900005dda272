"""The runs' command lines: the same on GPUs and CPU ranks, and accepted by Megatron for both."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from megatron_async.gpu_check.runs import Machine, MachineError, Run, examine, runs_on
from tests.support.parsed_flags import parse

SCRIPT = Path("pretrain_gpt.py")


def machine(gpus: int = 0, **facts: Any) -> Machine:
    values: dict[str, Any] = {
        "cpu": gpus == 0,
        "gpus": ("H100",) * gpus,
        "torch": "2.6",
        "transformer_engine": False,
        "fused_accumulation": False,
        "megatron": True,
    }
    return Machine(**values | facts)


def flags_of(run: Run) -> list[str]:
    return list(run.arguments[run.arguments.index(str(SCRIPT)) + 1 :])


@pytest.mark.parametrize(
    ("gpus", "stages"), [(0, 2), (1, 1), (2, 2), (3, 2), (4, 4), (7, 4), (8, 4), (16, 4)]
)
def test_stages(gpus: int, stages: int) -> None:
    assert machine(gpus).stages == stages


def test_the_device_is_all_that_sets_cpu_ranks_apart() -> None:
    on_gpus, on_cpu = runs_on(machine(2), SCRIPT), runs_on(machine(), SCRIPT)
    assert on_gpus.keys() == on_cpu.keys()
    for name in ("small-1f1b", "small-2bw", "small-2bw-undeferred"):
        gpu, cpu = on_gpus[name], on_cpu[name]
        assert "--cpu" not in gpu.arguments
        assert [part for part in cpu.arguments if part != "--cpu"] == list(gpu.arguments)
        assert (gpu.ranks, gpu.environment) == (cpu.ranks, cpu.environment)
    assert on_gpus["small-2bw-cpu-ranks"] == on_cpu["small-2bw"]
    # On CPU ranks the timed runs are small ones, which are there already.
    assert on_cpu["2bw"] == on_cpu["small-2bw"]
    assert on_cpu["1f1b"] == on_cpu["small-1f1b"]


def test_plain_megatron_has_no_flag_of_this_package() -> None:
    from megatron_async.config.startup import flags_in

    runs = runs_on(machine(1), SCRIPT)
    for name in ("one-stage-megatron", "sanitizer-1f1b"):
        assert not flags_in(flags_of(runs[name]))
    assert flags_in(flags_of(runs["one-stage-2bw"]))


def test_the_sanitizer_is_on_in_its_runs_alone() -> None:
    for name, run in runs_on(machine(2), SCRIPT).items():
        assert (("TORCH_CUDA_SANITIZER", "1") in run.environment) == name.startswith("sanitizer")


@pytest.mark.parametrize("fused", [False, True])
def test_fused_accumulation_only_where_its_kernel_is(fused: bool) -> None:
    run = runs_on(machine(2, transformer_engine=True, fused_accumulation=fused), SCRIPT)["2bw"]
    assert "transformer_engine" in run.arguments
    assert ("--no-gradient-accumulation-fusion" in run.arguments) != fused


def test_megatron_takes_the_flags_of_every_run() -> None:
    jobs = []
    for gpus in (1, 2, 4):
        for installed in (False, True):
            for run in runs_on(machine(gpus, transformer_engine=installed), SCRIPT).values():
                if str(SCRIPT) in run.arguments and "--cpu" not in run.arguments:
                    jobs.append((flags_of(run), run.ranks))
    for args in parse(jobs):
        assert args["data_parallel_size"] == 1
        assert args["bf16"]


class Found:
    """What the process that looks at the machine prints."""

    def __init__(self, stdout: str) -> None:
        self.stdout = stdout


def test_a_machine_without_gpus_is_one_message(monkeypatch: pytest.MonkeyPatch) -> None:
    facts = {"torch": "2.6", "gpus": [], "transformer_engine": False}
    facts |= {"fused_accumulation": False, "megatron": True}
    output = "a warning\n" + json.dumps(facts) + "\n"
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: Found(output))
    with pytest.raises(MachineError, match=r"sees no GPU\. On CPU ranks, add --cpu"):
        examine(cpu=False)
    assert examine(cpu=True).stages == 2


def test_a_broken_torch_is_one_message(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(MachineError, match="PyTorch does not start"):
        examine(cpu=False)
