"""The log lines of a mixture of experts, and its scalars."""

from argparse import Namespace
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from megatron.core.transformer.moe import moe_logging

from megatron_async.hooks import moe as hooks
from megatron_async.runtime.counters.moe_metrics import MoEMetrics
from megatron_async.runtime.run import run
from tests.support.gpt import gpt_args
from tests.support.shared_jobs import MODELS
from tests.support.torchrun import run_torchrun

EXPERTS = {
    **MODELS["moe"],
    "pipeline_model_parallel_size": 2,
    "num_layers": 2,
    "train_iters": 5,
    "moe_z_loss_coeff": 0.001,
    "pipeline_schedule": "pipedream-2bw",
    "hidden_dropout": 0,
    "attention_dropout": 0,
}


class Writer:
    """Of TensorBoard and of W&B."""

    def __init__(self) -> None:
        self.scalars: list[tuple[str, float, int]] = []
        self.logged: list[tuple[dict[str, Any], int]] = []

    def add_scalar(self, name: str, value: Any, iteration: int) -> None:
        self.scalars.append((name, float(value), iteration))

    def log(self, values: dict[str, Any], iteration: int) -> None:
        self.logged.append(({name: float(value) for name, value in values.items()}, iteration))


@pytest.fixture
def metrics(monkeypatch: pytest.MonkeyPatch) -> Iterator[MoEMetrics]:
    """Those of a run with a deferred update, two layers and one of multi-token prediction."""
    monkeypatch.setattr(moe_logging, "_MOE_METRICS_TRACKER", None)
    args = Namespace(
        num_layers=2,
        mtp_num_layers=1,
        moe_router_load_balancing_type=["global_aux_loss"],
        moe_z_loss_coeff=None,
    )
    found = MoEMetrics(args)
    monkeypatch.setattr(run, "engine", SimpleNamespace(moe=found, deferring=True))
    yield found
    run.reset()


def test_scalars_stand_at_the_iteration_that_they_are_of(metrics: MoEMetrics) -> None:
    tracker = moe_logging.MoEMetricsTracker
    report = hooks.reported(tracker.report)
    tracker_sync, tracker._sync_metrics = (
        tracker._sync_metrics,
        hooks.synced(tracker._sync_metrics),
    )
    tensorboard, wandb = Writer(), Writer()
    totals: dict[str, Any] = {}

    def log(iteration: int) -> None:
        report(
            moe_logging.get_moe_metrics_tracker(),
            loss_scale=0.25,
            iteration=iteration,
            writer=tensorboard,
            wandb_writer=wandb,
            track_names=metrics.names,
            num_layers=2,
            mtp_num_layers=1,
            total_loss_dict=totals,
        )

    name = "global_load_balancing_loss"
    try:
        assert metrics.names == [name]
        # As a run that goes on from iteration 3: its update's sums are known.
        metrics.resume([1.0, 2.0, 3.0], iteration=3)
        log(4)
        log(5)  # no update was completed in between
        metrics.set_totals([4.0, 5.0, 6.0], iteration=5)
        log(6)
        metrics.set_totals([7.0, 8.0, 9.0], iteration=7)
        log(7)
    finally:
        tracker._sync_metrics = tracker_sync
    assert tensorboard.scalars == [(name, 2.0, 3), (name, 5.0, 5), (name, 8.0, 7)]
    assert wandb.logged == [
        ({name: 2.0, f"{name} iteration": 3.0}, 4),
        ({name: 5.0, f"{name} iteration": 5.0}, 6),
        ({name: 8.0}, 7),
    ]
    # The log line has the last known sums in each iteration.
    assert float(totals[name]) == 2.0 + 2.0 + 5.0 + 8.0


def logged(**flags: Any) -> dict[str, list[float]]:
    lines = run_torchrun(2, gpt_args(**EXPERTS, **flags), launcher="plugin").iterations
    return {
        name: [float(line.fields[name]) for line in lines]
        for name in ("load_balancing_loss", "z_loss")
    }


@pytest.mark.slow
def test_metrics_are_the_same_with_a_second_gradient_buffer() -> None:
    plain = logged()
    late = logged(overlap_grad_reduce=True, second_grad_buffer=True)
    for name, values in plain.items():
        assert len(values) == 5
        assert min(values) > 0
        assert late[name] == pytest.approx(values, rel=1e-5)
