"""Each check passes on the log that it wants, and fails on one that it must not let through."""

from collections.abc import Sequence

import pytest

from megatron_async.gpu_check import checks
from megatron_async.gpu_check.rows import Result, Row, not_checked, table
from megatron_async.gpu_check.run_log import MeasurementError
from tests.gpu_check.logs import LOSSES, MIB, log_of

# bf16 rounds to 8 bits: numbers up to 2^-8 of their size away are the same to it.
INSIDE, OUTSIDE = 1 + 0.9 * 2**-8, 1 + 1.1 * 2**-8


def changed(factor: float, number: int) -> list[float]:
    return [loss * (factor if k == number else 1) for k, loss in enumerate(LOSSES, start=1)]


@pytest.mark.parametrize("number", [1, 2, 7, 14])
@pytest.mark.parametrize(
    ("factor", "result"),
    [(1.0, "passed"), (INSIDE, "passed"), (OUTSIDE, "FAILED"), (2 - OUTSIDE, "FAILED")],
)
def test_losses_are_the_same_to_bf16_in_every_iteration(
    number: int, factor: float, result: str
) -> None:
    row = checks.same_losses(log_of(changed(factor, number)), log_of())
    assert row.result == result


def test_losses_of_runs_of_other_lengths_are_not_compared() -> None:
    with pytest.raises(MeasurementError, match="late logged 13 iterations, run 14"):
        checks.same_losses(log_of(LOSSES[:13], name="late"), log_of())


@pytest.mark.parametrize(
    ("losses", "result"),
    [
        ([LOSSES[0], LOSSES[0], *LOSSES[1:-1]], Result.PASSED),
        (LOSSES, Result.FAILED),  # the flags had no effect
        (changed(INSIDE, 5), Result.FAILED),  # too small to be seen
        (changed(OUTSIDE, 1), Result.FAILED),  # not the same weights or data
    ],
)
def test_a_delay_has_to_show_and_not_in_the_first_iteration(
    losses: Sequence[float], result: Result
) -> None:
    assert checks.delay_shows(log_of(losses), log_of()).result is result


# 1F1B of p = 2 and m = 4 waits for a fifth of the time, and an iteration takes 5/4 of the ideal.


@pytest.mark.parametrize(("percent", "result"), [(1, "passed"), (9, "passed"), (11, "FAILED")])
def test_bubble(percent: float, result: str) -> None:
    row = checks.bubble(log_of(bubble=percent), log_of(bubble=20), stages=2, microbatches=4)
    assert row.result == result
    assert "20%" in row.expected


@pytest.mark.parametrize(("ms", "result"), [(100, "passed"), (110, "passed"), (113, "FAILED")])
def test_speed(ms: float, result: str) -> None:
    row = checks.speed(log_of(ms=ms), log_of(ms=125), stages=2, microbatches=4)
    assert row.result == result
    assert row.expected == "1.25"


@pytest.mark.parametrize(("ms", "result"), [(98, "passed"), (104, "passed"), (106, "FAILED")])
def test_overhead(ms: float, result: str) -> None:
    assert checks.overhead(log_of(ms=ms), log_of(ms=100)).result == result


# Two stages; in MiB: 6000 of state that 1F1B has as well, 4000 added, 2000 of activations.
PARTS = {
    "weights": 2000 * MIB,
    "optimizer_state": 4000 * MIB,
    "second_version": 800 * MIB,
    "gradient_copy": 1600 * MIB,
    "correction": 1600 * MIB,
    "second_grad_buffer": 0.0,
    "activations": 2000 * MIB,
    "total": 12000 * MIB,
}
PLAN = [PARTS | {"activations": 4000 * MIB, "total": 14000 * MIB}, PARTS]


def of_stages(held: float, peak: float, *, first: float = 14000) -> dict[int, tuple[float, float]]:
    return {0: (11000, first), 1: (held, peak)}


@pytest.mark.parametrize(
    ("added", "result"),
    [
        (4000, "passed"),
        (4150, "passed"),
        (5600, "FAILED"),  # the correction's buffer twice
        (3200, "FAILED"),  # no second version
    ],
)
def test_added_memory(added: float, result: str) -> None:
    ours = log_of(memory=of_stages(6000 + added, 12000))
    row = checks.added_memory(ours, log_of(memory=of_stages(6000, 8000)), PLAN)
    assert row.result == result
    assert row.expected == "4000 MiB"


@pytest.mark.parametrize(
    ("held", "result"), [(10000, "passed"), (10500, "passed"), (10700, "FAILED"), (9300, "FAILED")]
)
def test_held_memory(held: float, result: str) -> None:
    row = checks.held_memory(log_of(memory=of_stages(held, 12000)), PLAN)
    assert row.result == result
    assert row.expected == "10000 MiB"


@pytest.mark.parametrize(
    ("first", "last", "result"),
    [
        (14000, 12000, "passed"),
        (15000, 14500, "passed"),
        (18000, 12000, "FAILED"),
        (14000, 15200, "FAILED"),
        (9000, 12000, "FAILED"),
    ],
)
def test_peak_memory_of_the_stage_that_is_farthest(first: float, last: float, result: str) -> None:
    log = log_of(memory=of_stages(10000, last, first=first))
    assert checks.peak_memory(log, PLAN).result == result


@pytest.mark.parametrize(
    ("races", "planted", "result"),
    [(0, 1, Result.PASSED), (1, 1, Result.FAILED), (0, 0, Result.FAILED), (1, 0, Result.FAILED)],
)
def test_no_race_counts_only_if_a_planted_one_is_found(
    races: int, planted: int, result: Result
) -> None:
    assert checks.no_race(log_of(races=races), log_of(races=planted)).result is result


def test_a_race_that_plain_megatron_has_as_well_is_said_so() -> None:
    row = checks.no_race(log_of(races=1), log_of(races=1), log_of(races=1))
    assert row.result is Result.FAILED
    assert "in plain Megatron 1" in row.measured


def test_table() -> None:
    rows = [
        Row(name="a", expected="1", measured="2", limit="3", result=Result.PASSED),
        Row(name="long name", expected="1", measured="2", limit="3", result=Result.FAILED),
        not_checked("not on CPU ranks"),
    ]
    head, rule, *lines = table(rows).splitlines()
    assert head.split() == ["check", "expected", "measured", "limit", "result"]
    assert set(rule) == {"-", " "}
    assert lines[0].split() == ["a", "1", "2", "3", "passed"]
    assert lines[1].endswith("FAILED")
    assert lines[2].endswith("not on CPU ranks")
    assert "passed" not in lines[2]


def test_what_is_not_judged_is_never_passed() -> None:
    good = checks.overhead(log_of(), log_of())
    shown = not_checked("not on CPU ranks", good)
    assert shown.result is Result.NOT_CHECKED
    assert shown.verdict == "not on CPU ranks"
    assert shown.measured == good.measured
