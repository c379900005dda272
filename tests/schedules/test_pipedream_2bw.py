"""PipeDream-2BW's order of actions: what the lists say, and what they take."""

import random
from typing import Any

import pytest

from megatron_async.schedules.actions import GATHERS, Action, Kind, Transfer
from megatron_async.schedules.pipedream_2bw import PIPEDREAM_2BW
from megatron_async.schedules.schedule import Pipeline
from megatron_async.schedules.validator import validate
from tests.schedules.lists import call_of, short, two_version


def call(**options: Any) -> list[Action]:
    defaults: dict[str, Any] = {"stages": 4, "stage": 0, "batch": 1, "microbatches": 4}
    return call_of(PIPEDREAM_2BW, **{**defaults, **options})


def test_first_call_warms_up_and_prefetches_on_the_newest_version() -> None:
    assert short(call(stage=1, batch=0)) == (
        "F0.0v0 F0.1v0 F0.2v0 B0.0v0 F0.3v0 B0.1v0 F1.0v0 B0.2v0 F1.1v0 B0.3v0 L0v1"
    )


def test_steady_call_completes_right_before_the_first_forward_of_the_new_version() -> None:
    # w = 2, m = 4: version 3 is needed at step 2 and made after backward 1.
    assert short(call(stage=1, batch=3)) == (
        "F3.2v2 B3.0v2 F3.3v2 B3.1v2 C2v3 F4.0v3 B3.2v2 F4.1v3 B3.3v2 L3v4"
    )


@pytest.mark.parametrize("stage", range(4))
def test_completion_stands_between_the_backward_and_the_communication_after_it(stage: int) -> None:
    actions = call(stage=stage)
    at = next(i for i, action in enumerate(actions) if action.kind is Kind.COMPLETE_UPDATE)
    before, after = actions[at - 1], actions[at + 1]
    assert (before.kind, before.microbatch) == (Kind.BACKWARD, 4 - (3 - stage) - 1)
    assert (after.kind, after.microbatch) == (Kind.SEND_BACKWARD_RECV_FORWARD, before.microbatch)


def test_with_fewest_microbatches_stage_0_completes_at_the_end_of_the_call() -> None:
    assert short(call(microbatches=3, batch=2)) == (
        "F3.0v2 B2.0v1 F3.1v2 B2.1v1 F3.2v2 B2.2v1 L2v3 C2v3"
    )
    assert "C1v2" in short(call(microbatches=3, batch=2, stage=1))


def test_gathering_ahead_completes_half_of_the_room_earlier() -> None:
    # p = 2, m = 6: stage 0's total is out at its launch, five slots before the new version is
    # needed on stage 0. Of these, three are for the gathering of parameters.
    actions = call(stages=2, batch=2, microbatches=6, gather_ahead=True)
    assert short(actions) == (
        "F2.1v1 B2.0v1 F2.2v1 B2.1v1 C1v2 F2.3v1 B2.2v1 F2.4v1 B2.3v1 F2.5v1 B2.4v1 "
        "F3.0v2 B2.5v1 L2v3"
    )
    # Where there is no room, nothing is moved.
    crowded = call(stage=1, microbatches=3, gather_ahead=True)
    assert [a for a in crowded if a.kind not in GATHERS] == call(stage=1, microbatches=3)


def test_late_reduction_launches_after_the_next_batchs_first_backward() -> None:
    assert short(call(stages=2, batch=2, microbatches=3, reduce_late=True)) == (
        "F2.1v1 B2.0v1 L1v2 F2.2v1 B2.1v1 C1v2 F3.0v2 B2.2v1"
    )
    # With m = p, both stand behind the same backward on stage 0.
    assert short(call(stages=2, batch=2, microbatches=2, reduce_late=True)) == (
        "F2.1v1 B2.0v1 L1v2 C1v2 F3.0v2 B2.1v1"
    )
    assert short(
        call(stages=2, batch=2, microbatches=2, reduce_late=True, batches_left=1)
    ).endswith("B2.1v1 L2v3 C2v3")


def test_update_without_deferral_stands_at_the_end() -> None:
    assert short(call(stage=2, batch=2, deferred=False)).endswith("B2.3v1 U2v3")
    assert "C" not in short(call(stage=2, batch=2, deferred=False))


def test_last_call_drains() -> None:
    actions = call(stage=1, batch=2, batches_left=1)
    assert short(actions) == "F2.2v1 B2.0v1 F2.3v1 B2.1v1 C1v2 B2.2v1 B2.3v1 L2v3 C2v3"
    assert [action.kind for action in actions[-12:]] == [
        *(Kind.COMPLETE_UPDATE, Kind.SEND_BACKWARD),
        *(Kind.RECV_BACKWARD, Kind.BACKWARD, Kind.SEND_BACKWARD),
        *(Kind.RECV_BACKWARD, Kind.START_REDUCTION, Kind.BACKWARD, Kind.SEND_BACKWARD),
        *(Kind.FINISH_REDUCTION, Kind.LAUNCH_UPDATE, Kind.COMPLETE_UPDATE),
    ]


def test_resumed_run_warms_up_on_the_previous_version_with_no_update_pending() -> None:
    assert short(call(stage=2, batch=7, start=7)) == (
        "F7.0v6 F7.1v6 B7.0v6 F7.2v6 B7.1v6 F7.3v6 B7.2v6 F8.0v7 B7.3v6 L7v8"
    )


def test_single_stage_has_the_same_delay() -> None:
    lists = two_version(1, [2, 2, 2])
    assert short(lists[0]) == (
        "F0.0v0 B0.0v0 F0.1v0 B0.1v0 L0v1 "
        "F1.0v0 B1.0v0 F1.1v0 B1.1v0 C0v1 L1v2 "
        "F2.0v1 B2.0v1 F2.1v1 B2.1v1 C1v2 L2v3 C2v3"
    )


def test_combined_communication_says_what_it_sends_and_receives() -> None:
    actions = call(stage=1, batch=1)
    exchange = [a for a in actions if a.kind is Kind.SEND_FORWARD_RECV_BACKWARD][2]
    assert exchange.sent(stages=4) == Transfer(True, 2, 0, border=1)
    assert exchange.received(stages=4) == Transfer(False, 1, 2, border=1)
    back = [a for a in actions if a.kind is Kind.SEND_BACKWARD_RECV_FORWARD][-1]
    assert back.sent(stages=4) == Transfer(False, 1, 3, border=0)
    assert back.received(stages=4) == Transfer(True, 2, 2, border=0)


def test_growing_batch_is_counted_in_its_own_microbatches() -> None:
    actions = call(stage=0, batch=4, microbatches=3, next_microbatches=6)
    assert short(actions) == "F5.0v4 B4.0v3 F5.1v4 B4.1v3 F5.2v4 B4.2v3 L4v5"
    last = [a for a in actions if a.kind is Kind.SEND_BACKWARD_RECV_FORWARD][-1]
    assert (last.recv_batch, last.recv_microbatch) == (5, 3)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"microbatches": 2}, "needs at least 3 microbatches in every batch, got 2"),
        ({"next_microbatches": 2}, "needs at least 3 microbatches in every batch, got 2"),
        ({"stages": 1, "microbatches": 0}, "needs at least 1 microbatches"),
        (
            {"microbatches": 3, "reduce_late": True},
            "needs at least 4 microbatches on the version before the newest with 4 pipeline stages",
        ),
        ({"stage": 4}, "stage 4 does not exist in a pipeline of 4 stages"),
        ({"start": 2}, "batch 1 is not in a segment that starts at 2"),
        ({"batch": -1}, "batch -1 is not in a segment that starts at 0"),
        ({"start": -1}, "in a segment that starts at -1"),
    ],
)
def test_impossible_calls_are_refused(options: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call(**options)


def test_last_call_ignores_the_next_batch() -> None:
    assert call(batches_left=1, next_microbatches=0) == call(batches_left=1)


@pytest.mark.parametrize("stages", range(1, 9))
@pytest.mark.parametrize(
    "options",
    [
        {"deferred": False},
        {"deferred": True},
        {"deferred": False, "gather_ahead": True},
        {"deferred": True, "gather_ahead": True},
        {"deferred": True, "reduce_late": True},
        {"deferred": True, "gather_ahead": True, "reduce_late": True},
    ],
    ids=lambda options: "-".join(name for name, value in options.items() if value) or "undeferred",
)
def test_every_layout_is_valid(stages: int, options: dict[str, Any]) -> None:
    rng = random.Random(stages)
    fewest = stages if options.get("reduce_late") else max(stages - 1, 1)
    for drain in (True, False):
        for start in (0, 6):
            for counts in (
                [fewest] * 4,
                [2 * stages + 1] * 2,
                [stages + 2],
                sorted(rng.randint(fewest, 11) for _ in range(5)),
                [rng.randint(fewest, 11) for _ in range(5)],
            ):
                validate(
                    two_version(stages, counts, start=start, drain=drain, **options),
                    schedule=PIPEDREAM_2BW,
                    pipeline=Pipeline(stages=stages, **options),
                    microbatches=counts,
                    start=start,
                )


def test_a_batchs_gradients_are_reduced_in_its_last_backward() -> None:
    assert short(call(stage=1, batch=3), collectives=True).endswith("F4.1v3 R3 B3.3v2 r3 L3v4")
    late = short(call(stages=2, batch=2, microbatches=3, reduce_late=True), collectives=True)
    assert late == "F2.1v1 B2.0v1 r1 L1v2 F2.2v1 B2.1v1 C1v2 F3.0v2 R2 B2.2v1"
    undeferred = short(call(stage=2, batch=2, deferred=False), collectives=True)
    assert undeferred.endswith("R2 B2.3v1 r2 U2v3")


def test_a_version_is_gathered_between_its_update_and_its_first_use() -> None:
    options: dict[str, Any] = {"stages": 2, "microbatches": 6, "gather_ahead": True}
    assert short(call(batch=2, **options), collectives=True) == (
        "F2.1v1 B2.0v1 F2.2v1 B2.1v1 C1v2 G2 F2.3v1 B2.2v1 F2.4v1 B2.3v1 F2.5v1 B2.4v1 "
        "g2 F3.0v2 R2 B2.5v1 r2 L2v3"
    )
    # The last stage needs it in the next call's first forward; nothing is computed in between.
    assert short(call(batch=2, stage=1, **options), collectives=True).endswith(
        "R2 B2.5v1 r2 L2v3 g2"
    )
    # What is made last is complete before anyone looks at it.
    assert short(call(batch=2, batches_left=1, **options), collectives=True).endswith("C2v3 G3 g3")
    # The initial weights are whole, and so are those that a resumed run begins with.
    assert "g" not in short(call(batch=0, **options), collectives=True)
    assert "g" not in short(call(batch=7, start=7, **options), collectives=True)
