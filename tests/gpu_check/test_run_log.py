"""What is read of a run's log, and what is missed aloud."""

import pytest

from megatron_async.gpu_check.run_log import MeasurementError, RunLog
from tests.gpu_check.logs import LOSSES, MIB, log_of, memory_line


def test_the_steady_state_leaves_out_the_first_iterations_and_the_last() -> None:
    log = log_of(ms=100, bubble=12.5)
    assert log.losses() == pytest.approx(LOSSES)
    assert log.seconds() == [0.1] * 9
    assert log.bubbles() == [pytest.approx(0.125)] * 9


def test_memory_is_that_of_the_last_report_before_the_end() -> None:
    log = RunLog("run")
    for number in range(1, 9):
        log.feed(f" iteration {number}/ 8 | elapsed time per iteration (ms): 1.0 | lm loss: 1.0 |")
        # Two ranks may write into one line.
        log.feed(memory_line(0, number, number, 2) + memory_line(1, number, 10 * number, 20))
    found = log.memory(ranks=2)
    assert (found[0].held, found[0].peak) == (7 * MIB, 2 * MIB)
    assert (found[1].held, found[1].peak) == (70 * MIB, 20 * MIB)


def test_a_race_is_counted() -> None:
    assert log_of().races == 0
    assert log_of(races=2).races == 2


@pytest.mark.parametrize(
    ("log", "read", "message"),
    [
        (RunLog("empty"), "losses", "empty logged no iteration"),
        (RunLog("empty"), "seconds", "empty logged 0 iterations, too few"),
        (log_of(), "bubbles", "logged no bubble"),
    ],
)
def test_what_is_missing_is_an_error(log: RunLog, read: str, message: str) -> None:
    with pytest.raises(MeasurementError, match=message):
        getattr(log, read)()


def test_a_loss_that_is_not_a_number_is_an_error() -> None:
    log = log_of()
    # As Megatron skips an iteration: the field is left out.
    log.feed(" iteration 15/ 15 | elapsed time per iteration (ms): 1.0 | grad norm: nan |")
    with pytest.raises(MeasurementError, match="no loss in iteration 15"):
        log.losses()


def test_a_rank_without_a_report_of_memory_is_an_error() -> None:
    with pytest.raises(MeasurementError, match=r"memory of ranks \[0\], not of all 2"):
        log_of(memory={0: (1.0, 2.0)}).memory(ranks=2)
    with pytest.raises(MeasurementError, match=r"memory of ranks \[\], not of all 1"):
        log_of().memory(ranks=1)
