"""What the validator refuses: each kind of fault in a plain list, and at its place."""

import dataclasses
from typing import Any

import pytest

from megatron_async.schedules.actions import Action, Kind
from megatron_async.schedules.one_f_one_b import ONE_F_ONE_B
from megatron_async.schedules.pipedream_2bw import PIPEDREAM_2BW
from megatron_async.schedules.schedule import Pipeline
from megatron_async.schedules.validator import ScheduleError, validate
from tests.schedules.lists import (
    Change,
    Lists,
    drop,
    edit,
    find,
    insert,
    move,
    one_f_one_b,
    two_version,
)


def check(lists: Lists, microbatches: list[int], *, start: int = 0, **options: Any) -> None:
    validate(
        lists,
        schedule=PIPEDREAM_2BW,
        pipeline=Pipeline(stages=len(lists), **options),
        microbatches=microbatches,
        start=start,
    )


def broken(change: Change, stages: int, microbatches: list[int], **options: Any) -> ScheduleError:
    """Return what is said of lists that are right but for a change."""
    lists = two_version(stages, microbatches, **options)
    check(lists, microbatches, **options)
    change(lists)
    with pytest.raises(ScheduleError) as caught:
        check(lists, microbatches, **options)
    return caught.value


def extra_forward(lists: Lists) -> None:
    at = find(lists[0], Kind.BACKWARD)
    ahead = find(lists[0], Kind.FORWARD, batch=1, microbatch=1)
    lists[0].insert(at, lists[0].pop(ahead))


def received_twice(lists: Lists) -> None:
    lists[1].insert(0, lists[1][find(lists[1], Kind.RECV_FORWARD)])


def sent_twice(lists: Lists) -> None:
    at = find(lists[1], Kind.SEND_FORWARD)
    lists[1].insert(at, lists[1][at])


def update(kind: Kind, batch: int) -> Action:
    return Action(stage=1, kind=kind, batch=batch, version=batch + 1)


def reduction(kind: Kind, batch: int) -> Action:
    return Action(stage=1, kind=kind, batch=batch)


@pytest.mark.parametrize(
    ("change", "stage", "reason"),
    [
        (
            edit(Kind.FORWARD, {"version": 0}, batch=2, microbatch=0),
            1,
            "run forward on version 1",
        ),
        (
            edit(Kind.BACKWARD, {"version": 1}, batch=1, microbatch=0),
            1,
            "run backward on version 0",
        ),
        (drop(Kind.COMPLETE_UPDATE, batch=0), 1, "version 1 does not exist here now, only \\[0\\]"),
        (move(Kind.COMPLETE_UPDATE, 2, batch=0), 1, "version 1 does not exist here now"),
        (move(Kind.COMPLETE_UPDATE, -9, batch=1), 1, "was not launched"),
        (move(Kind.LAUNCH_UPDATE, -3, batch=0), 1, "the gradients of batch 0 are not reduced"),
        (drop(Kind.LAUNCH_UPDATE, batch=0), 1, "gradients of batch 0 are in the buffer that it"),
        (drop(Kind.LAUNCH_UPDATE, batch=3), 1, "was not launched"),
        (edit(Kind.LAUNCH_UPDATE, {"version": 2}, batch=0), 1, "batch 0 makes version 1"),
        (edit(Kind.COMPLETE_UPDATE, {"version": 2}, batch=0), 1, "batch 0 makes version 1"),
        (
            insert(update(Kind.LAUNCH_UPDATE, 0), Kind.BACKWARD, batch=1, microbatch=0),
            1,
            "the next update is that of batch 1",
        ),
        (edit(Kind.FORWARD, {"microbatch": 1}, batch=2, microbatch=2), 1, "a second time"),
        (edit(Kind.FORWARD, {"microbatch": 4}, batch=0, microbatch=2), 1, "no such microbatch"),
        (edit(Kind.BACKWARD, {"microbatch": 0}, batch=1, microbatch=1), 1, "ran before"),
        (edit(Kind.BACKWARD, {"microbatch": 5}, batch=1, microbatch=1), 1, "not forwarded before"),
        (drop(Kind.RECV_FORWARD), 1, "its input was not received before"),
        (
            edit(Kind.SEND_FORWARD_RECV_BACKWARD, {"recv_microbatch": 3}, recv_batch=1),
            1,
            "output gradient was not received",
        ),
        (move(Kind.SEND_FORWARD, -1), 1, "was not computed before"),
        (sent_twice, 1, "it is sent a second time"),
        (received_twice, 1, "it is received a second time"),
        (extra_forward, 0, "5 microbatches are in flight, at most 4 may"),
        (drop(Kind.SEND_FORWARD, stage=0, microbatch=2), 0, "expects something else at that place"),
        (drop(Kind.SEND_BACKWARD, stage=2, microbatch=3), 1, "stage 2 never sends"),
        (
            drop(Kind.SEND_BACKWARD, stage=2, microbatch=2),
            2,
            "expects something else at that place",
        ),
        (drop(Kind.RECV_BACKWARD, stage=2, microbatch=3), 2, "gradient was not received before"),
        (edit(Kind.BACKWARD, {"stage": 0}), 1, "belongs to stage 0"),
        (edit(Kind.FORWARD, {"chunk": -1}), 1, "there is no such model chunk"),
        (edit(Kind.COMPLETE_UPDATE, {"kind": Kind.UPDATE}, batch=0), 1, "next update is that of"),
    ],
)
def test_faults_are_found(change: Change, stage: int, reason: str) -> None:
    error = broken(change, 4, [4] * 4)
    assert error.stage == stage
    with pytest.raises(ScheduleError, match=reason):
        raise error
    assert f"stage {stage}, action {error.position}: " in str(error)
    assert str(error.action) in str(error)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (drop(Kind.START_REDUCTION, batch=1), "reduction of batch 1 was not started before its la"),
        (
            move(Kind.START_REDUCTION, 1, batch=1),
            "the reduction of batch 1 was not started before its last backward",
        ),
        (
            move(Kind.START_REDUCTION, -4, batch=1),
            "2 of the batch's backwards are still to come, not the last",
        ),
        (
            insert(reduction(Kind.START_REDUCTION, 2), Kind.BACKWARD, batch=1, microbatch=3),
            "the reduction of batch 1 is not finished",
        ),
        (drop(Kind.FINISH_REDUCTION, batch=1), "the gradients of batch 1 are not reduced"),
        (
            move(Kind.FINISH_REDUCTION, -3, batch=1),
            "1 of the batch's backwards are still to come",
        ),
        (
            edit(Kind.FINISH_REDUCTION, {"batch": 0}, batch=1),
            "the next reduction is that of batch 1",
        ),
        (
            insert(reduction(Kind.FINISH_REDUCTION, 1), Kind.LAUNCH_UPDATE, batch=1),
            "the next reduction is that of batch 2",
        ),
    ],
)
def test_faults_in_reductions_are_found(change: Change, reason: str) -> None:
    error = broken(change, 2, [4] * 4)
    assert (error.stage, error.action is None) == (1, False)
    with pytest.raises(ScheduleError, match=reason):
        raise error


def test_a_batch_adds_to_a_buffer_that_is_its_own() -> None:
    """Unless there is a second one, the update before has taken its gradients."""
    counts = [4] * 4
    lists = two_version(2, counts)
    # The launch of batch 1 behind the first backward of batch 2, with and without its reduction.
    backward = find(lists[0], Kind.BACKWARD, batch=2, microbatch=0)
    for kind in (Kind.FINISH_REDUCTION, Kind.LAUNCH_UPDATE):
        at = find(lists[0], kind, batch=1)
        lists[0].insert(backward, lists[0].pop(at))
    with pytest.raises(ScheduleError, match="the gradients of batch 1 are in the buffer that it"):
        check(lists, counts)
    check(lists, counts, reduce_late=True)


GATHERING: dict[str, Any] = {"gather_ahead": True}


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (drop(Kind.START_GATHER, version=2), "the gather of version 2 was not started"),
        (drop(Kind.FINISH_GATHER, version=2), "the gather of version 2 is not finished"),
        (
            # Behind the forward that needs it.
            move(Kind.FINISH_GATHER, 1, version=2),
            "the gather of version 2 is not finished",
        ),
        (move(Kind.START_GATHER, -1, version=2), "version 2 was not made"),
        (edit(Kind.START_GATHER, {"version": 5}, version=2), "version 5 was not made"),
        (
            insert(
                Action(stage=0, kind=Kind.START_GATHER, batch=1, version=2),
                Kind.FINISH_GATHER,
                stage=0,
                version=2,
            ),
            "it is gathered a second time",
        ),
    ],
)
def test_faults_in_gathers_are_found(change: Change, reason: str) -> None:
    def on_the_first_stage(lists: Lists) -> None:
        lists.reverse()  # Changes are made on the second list by default.
        change(lists)
        lists.reverse()

    error = broken(
        change if "second time" in reason else on_the_first_stage, 2, [6] * 5, **GATHERING
    )
    assert error.stage == 0
    with pytest.raises(ScheduleError, match=reason):
        raise error


def test_a_version_is_gathered_before_the_next_one_is_made() -> None:
    """Even if nothing is computed on it in between, as in the last call."""
    error = broken(drop(Kind.FINISH_GATHER, version=3), 2, [6] * 4, **GATHERING)
    assert error.action is not None
    assert error.action.kind is Kind.COMPLETE_UPDATE
    assert error.reason == "the gather of version 3 is not finished"


def test_overwriting_a_version_in_use_is_found() -> None:
    counts = [3] * 4
    lists = two_version(2, counts, deferred=False)
    # Of a batch whose gradients are there; the microbatch of the next one is on the oldest version.
    at = find(lists[0], Kind.UPDATE, batch=1)
    backward = find(lists[0], Kind.BACKWARD, batch=1, microbatch=2)
    lists[0].insert(backward, lists[0].pop(at))
    with pytest.raises(ScheduleError, match="version 0 is overwritten while 1 microbatches"):
        check(lists, counts, deferred=False)
    lists = two_version(2, counts)
    move(Kind.LAUNCH_UPDATE, -4, stage=0, batch=1)(lists)
    with pytest.raises(ScheduleError, match="the gradients of batch 1 are not reduced"):
        check(lists, counts)


def test_second_launch_needs_the_first_completed() -> None:
    lists = two_version(2, [3] * 4)
    # The last stage needs version 2 only after the launch of batch 2: there the order alone is
    # wrong, since a launch overwrites the copied gradients.
    last = lists[1]
    complete = find(last, Kind.COMPLETE_UPDATE, batch=1)
    launch = find(last, Kind.LAUNCH_UPDATE, batch=2)
    assert not any(a.kind is Kind.FORWARD for a in last[complete:launch])
    last.insert(launch, last.pop(complete))
    with pytest.raises(ScheduleError, match="update of batch 1 was launched and is not completed"):
        check(lists, [3] * 4)


def test_early_completion_is_valid() -> None:
    lists = two_version(2, [2] * 4)
    launch = find(lists[0], Kind.LAUNCH_UPDATE, batch=1)
    complete = find(lists[0], Kind.COMPLETE_UPDATE, batch=1)
    lists[0].insert(launch + 1, lists[0].pop(complete))
    check(lists, [2] * 4)


def test_unfinished_ends_are_found() -> None:
    lists = two_version(2, [2, 2])
    assert lists[1].pop().kind is Kind.COMPLETE_UPDATE
    with pytest.raises(ScheduleError, match="the update of batch 1 incomplete") as caught:
        check(lists, [2, 2])
    assert (caught.value.stage, caught.value.action) == (1, None)
    mixed = [two_version(2, [2, 2], drain=drain)[stage] for stage, drain in ((0, False), (1, True))]
    with pytest.raises(ScheduleError, match="stage 1 never receives what it sends"):
        check(mixed, [2, 2])
    uneven = two_version(2, [2, 2])
    for kind in (Kind.LAUNCH_UPDATE, Kind.COMPLETE_UPDATE):
        del uneven[1][find(uneven[1], kind, batch=1)]
    with pytest.raises(
        ScheduleError, match="its last update is that of batch 0, stage 0's is that of batch 1"
    ):
        check(uneven, [2, 2])
    undrained = two_version(2, [2, 2], drain=False)
    check(undrained, [2, 2])
    undrained[0].append(Action(stage=0, kind=Kind.FORWARD, batch=2, microbatch=1, version=1))
    with pytest.raises(ScheduleError, match="end with 2 microbatches in flight here, not 1"):
        check(undrained, [2, 2])
    with pytest.raises(ValueError, match="there are 0 stages and 0 lists"):
        check([], [])


def test_every_schedule_has_its_own_delay() -> None:
    """The lists of one are those of no other."""
    counts = [4] * 4
    for lists, other in (
        (two_version(2, counts, deferred=False), ONE_F_ONE_B),
        (one_f_one_b(2, counts), PIPEDREAM_2BW),
        (
            two_version(2, counts, deferred=False),
            dataclasses.replace(PIPEDREAM_2BW, rule=ONE_F_ONE_B.rule),
        ),
    ):
        with pytest.raises(ScheduleError, match="must run forward on version"):
            validate(
                lists,
                schedule=other,
                pipeline=Pipeline(stages=2, deferred=False),
                microbatches=counts,
            )
