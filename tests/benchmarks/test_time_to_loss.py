"""Time to loss: the curves that are trained, and where a curve comes down to a loss."""

import argparse

import numpy
import pytest
import time_to_loss
from support.loss_curves import Pair, Training, modes_of
from support.pace import Pace
from support.smoothing import Curve, reached, smooth, without_batches

from megatron_async.study.cells import plan

TRAINING = Training(
    stages=4,
    microbatches=(4, 6, 12, 24),
    iterations=30,
    batch=24,
    layers=4,
    hidden_size=64,
    sequence=64,
    warmup=5,
    optimizer="muon",
    learning_rates=(1e-2,),
    seeds=(1, 2),
    dataset="stdlib",
)


def test_batches_are_the_same_and_the_delayed_microbatches_those_of_the_stages() -> None:
    found: dict[tuple[str, int], set[int]] = {}
    for cell in plan(TRAINING.study([1e-2]), {}, identity=()):
        assert cell.flags["global-batch-size"] == ("24",)
        assert cell.flags["min-lr"] == cell.flags["lr"]
        for name, m in modes_of(cell, TRAINING.microbatches):
            found.setdefault((name, m), set()).add(cell.seed)
            if name.startswith(("fresh", "paci")):
                assert cell.flags["micro-batch-size"] == (str(24 // m),)
                assert cell.flags["delayed-microbatches"] == ("3",)
            assert cell.flags.get("emulate-pipeline-stages") == (("4",) if name == "paci" else None)
    modes = ("1f1b", "2bw", "2bw-corrected", "fresh-2bw", "fresh-2bw-corrected", "paci")
    assert found == {(name, m): {1, 2} for name in modes for m in (4, 6, 12, 24)}


@pytest.mark.parametrize("slower", [1.0, 1.02, 1.2])
def test_hard_batches_do_not_hide_how_much_longer_a_run_takes(slower: float) -> None:
    """A run that needs so many times the iterations, seen through losses whose noise is as large as
    what training brings in 400 iterations, and the same for both runs."""
    n = numpy.arange(1, 3001)
    batches = numpy.random.default_rng(1).normal(scale=0.07, size=3000)

    def losses(factor: float) -> Curve:
        return numpy.asarray(1.2 + 6 * (n / factor + 20) ** -0.4 + batches)

    reference = without_batches(losses(1.0), losses(1.0))
    found = reached(without_batches(losses(slower), losses(1.0)), reference[2000 - 1])
    assert found == pytest.approx(2000 * slower, rel=0.01)


def test_a_smooth_curve_follows_what_is_smooth() -> None:
    n = numpy.arange(1, 2001)
    falling = 3 - 0.25 * numpy.log(n)
    assert smooth(falling) == pytest.approx(falling, abs=1e-6)


def test_a_loss_that_is_not_reached() -> None:
    curve = numpy.array([3.0, 2.0, 1.0])
    assert reached(curve, 0.5) is None
    assert reached(curve, 1.5) == pytest.approx(2.5)
    assert reached(curve, 3.5) == 1


def test_time_to_loss_is_iterations_times_seconds_and_diverged_runs_never_get_there() -> None:
    args = argparse.Namespace(train_iters=2000, optimizer="muon")
    pace = Pace(stages=4, microbatches=4, forward_ms=100, backward_ms=200, optimizer_ms=60)
    curve = 3 - 0.25 * numpy.log(numpy.arange(1, 3001))
    reference = Pair(losses=curve, reference=curve)
    slower = Pair(losses=curve + 0.25 * numpy.log(1.1), reference=curve)
    diverged = Pair(losses=numpy.full(3000, numpy.inf), reference=curve)

    def row(name: str, seconds: float, *pairs: Pair) -> dict[str, object]:
        smooth = [time_to_loss._smooth(pair) for pair in pairs]
        return time_to_loss._row(name, pace, [seconds], smooth, args)

    rows = [
        row("1f1b", 2.16, reference),
        row("2bw", 1.26, slower),
        row("paci", 1.26, reference, diverged),
    ]
    time_to_loss._compare(rows)
    assert rows[0]["iterations_to_loss"] == pytest.approx(2000, rel=1e-3)
    assert rows[1]["iterations_to_loss"] == pytest.approx(2200, rel=1e-3)
    assert rows[1]["share_of_bubble_free"] == pytest.approx(1.1, rel=1e-3)
    assert rows[1]["gain"] == pytest.approx(2.16 / 1.26 / 1.1, rel=1e-3)
    assert rows[2]["iterations_to_loss"] is None
    assert "gain" not in rows[2]
