"""Reading what Megatron logs."""

import pytest

from megatron_async.tools.training_log import TrainingLog


def line(number: int, loss: str | None, *, ms: float = 100.0, bubble: str = "") -> str:
    """A line as Megatron writes it, with our bubble at its end."""
    field = "" if loss is None else f" lm loss: {loss} |"
    return (
        f" [2026-01-02 03:04:05.678901] iteration {number:8d}/      80 | consumed samples: "
        f"{32 * number:12d} | elapsed time per iteration (ms): {ms:.1f} | learning rate: "
        f"5.000000E-03 | global batch size:    32 |{field} loss scale: 1.0 | grad norm: 5.276 | "
        f"number of skipped iterations:   0 | number of nan iterations:   0 |{bubble}"
    )


def test_log_lines() -> None:
    log = TrainingLog()
    assert log.feed(line(1, "5.550000E+00", ms=1234.5))
    assert log.feed(line(2, "5.500000E+00"))
    assert log.feed(line(3, None, bubble=" bubble: 18.1% |"))
    assert not log.feed("> building train, validation, and test datasets for GPT ...")
    # Megatron prints the mean of the first two losses in the second line: the loss was 5.45.
    assert [one.loss for one in log.iterations] == [5.55, pytest.approx(5.45), None]
    assert [one.number for one in log.iterations] == [1, 2, 3]
    assert [one.seconds for one in log.iterations] == [1.2345, 0.1, 0.1]
    assert [one.bubble for one in log.iterations] == [None, None, pytest.approx(0.181)]


def test_final_validation_loss_is_the_one_at_the_end() -> None:
    log = TrainingLog()
    assert log.final_validation_loss is None
    log.feed(" validation loss at iteration 4 | lm loss value: 5.0E+00 | lm loss PPL: 1.6E+02 | ")
    assert log.final_validation_loss is None
    for name, loss in (("validation", "4.5E+00"), ("test", "9.0E+00")):
        log.feed(f" validation loss at iteration 8 on {name} set | lm loss value: {loss} | ")
    assert log.final_validation_loss == 4.5
