"""Losses of short runs on real text, as they were when their change was last meant.

A change that moves a digit shows here, whatever it does to the equality of layouts. If it is meant,
say so where it is committed, and write the losses anew::

    python -m tests.training.test_golden_losses
"""

import functools
import json
import tempfile
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.support.gpt import REPOSITORY, Value
from tests.support.steps import Step, run_steps

GOLDEN = Path(__file__).with_name("golden_losses.json")
RTOL = 1e-6  # six digits, one of them may round the other way

OPTIMIZERS: Mapping[str, Mapping[str, Value]] = {
    "adam": {"optimizer": "adam", "adam_beta2": 0.95, "lr": "3e-3"},
    "muon": {
        "optimizer": "muon",
        "muon_momentum": 0.95,
        "muon_nesterov": True,
        "muon_extra_scale_factor": 0.2,
        "lr": "5e-3",
    },
}
SCHEDULES: Mapping[str, Mapping[str, Value]] = {
    "default": {},
    "pipedream-2bw": {"pipeline_schedule": "pipedream-2bw"},
    "fresh-2bw": {
        "pipeline_schedule": "fresh-2bw",
        "delay_correction": "error-feedback",
    },
}
CASES = [f"{optimizer}, {schedule}" for optimizer in OPTIMIZERS for schedule in SCHEDULES]
_ITERATIONS = 30
_SHOWN = (1, 2, 3, 5, 10, 20, 30)


@functools.cache
def measured() -> dict[str, list[float]]:
    """Train all cases on two stages; return the losses of some iterations."""
    from megatron_async.tools import data

    with tempfile.TemporaryDirectory(prefix="megatron-async-golden-") as folder:
        corpus = Path(folder) / "corpus"
        assert data.main(["--input", str(REPOSITORY / "LICENSE"), "--output", str(corpus)]) == 0
        common: dict[str, Value] = {
            "mock_data": None,
            "data_path": corpus,
            "data_cache_path": Path(folder) / "cache",
            "split": "100,0,0",
            "vocab_size": 256,
            "pipeline_model_parallel_size": 2,
            "hidden_dropout": 0,
            "attention_dropout": 0,
            "clip_grad": 1.0,
            "train_iters": _ITERATIONS,
        }
        steps = [
            Step(f"{optimizer}, {schedule}", {**common, **by_optimizer, **by_schedule})
            for optimizer, by_optimizer in OPTIMIZERS.items()
            for schedule, by_schedule in SCHEDULES.items()
        ]
        outcomes = run_steps(2, steps, Path(folder))
    return {
        name: [outcome.losses[number - 1] for number in _SHOWN]
        for name, outcome in outcomes.items()
    }


@pytest.mark.parametrize("case", CASES)
def test_losses_are_those_that_were_committed(case: str) -> None:
    golden = json.loads(GOLDEN.read_text())
    assert golden["iterations"] == list(_SHOWN)
    assert measured()[case] == pytest.approx(golden["losses"][case], rel=RTOL, abs=0)


def test_the_cases_differ() -> None:
    """Else a flag that does nothing would not show."""
    losses = json.loads(GOLDEN.read_text())["losses"]
    assert list(losses) == CASES
    assert len({values[-1] for values in losses.values()}) == len(CASES)
    # It learns: a byte of random text costs ln 256 = 5.5 nats.
    assert all(values[-1] < 4 < 5 < values[0] < 6 for values in losses.values())


if __name__ == "__main__":
    rows = [
        f"    {json.dumps(name)}: {json.dumps([round(loss, 6) for loss in each])}"
        for name, each in measured().items()
    ]
    losses = "{\n" + ",\n".join(rows) + "\n  }"
    GOLDEN.write_text(f'{{\n  "iterations": {json.dumps(_SHOWN)},\n  "losses": {losses}\n}}\n')
