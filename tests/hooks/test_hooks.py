"""What the package replaces in torch and Megatron: nothing that it was not asked for."""

import functools
import json
import subprocess
import sys

import pytest

from tests.hooks import probes
from tests.support.gpt import gpt_args
from tests.support.output import RunResult
from tests.support.torchrun import environment, run_torchrun

pytestmark = [pytest.mark.core, pytest.mark.timeout(1200)]


@pytest.fixture(scope="module")
def probed() -> dict[str, str]:
    done = subprocess.run(
        [sys.executable, "-m", "tests.hooks.probes"],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=900,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("FOUND ")]
    assert len(lines) == 1, done.stderr
    found: dict[str, str] = json.loads(lines[0].removeprefix("FOUND "))
    return found


@pytest.mark.parametrize("probe", [probe.__name__ for probe in (probes.cpu_alone, *probes.PROBES)])
def test_probe(probed: dict[str, str], probe: str) -> None:
    """See ``tests/hooks/probes.py``."""
    assert probed[probe] == ""


@functools.cache
def _synchronous(launcher: str, *flags: str) -> RunResult:
    # Dropout is on: the generators count, too.
    argv = gpt_args(pipeline_model_parallel_size=2, train_iters=4, eval_interval=3, eval_iters=1)
    return run_torchrun(2, [*argv, *flags], launcher=launcher)


@pytest.mark.parametrize(
    "flags",
    [
        pytest.param((), id="none"),
        pytest.param(("--pipeline-schedule", "default"), id="default", marks=pytest.mark.slow),
    ],
)
def test_synchronous_training_is_megatrons_own(flags: tuple[str, ...]) -> None:
    """With --cpu alone, and with hooks that have nothing to do: the same in every digit."""
    found, wanted = _synchronous("plugin", *flags), _synchronous("plain")
    assert len(wanted.losses) == 4
    assert found.losses == wanted.losses
    assert found.grad_norms == wanted.grad_norms
    assert found.learning_rates == wanted.learning_rates
    assert len(wanted.validation_losses) > 1
    assert found.validation_losses == wanted.validation_losses
