"""The order of actions: what the lists say, and what the validator refuses."""

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from megatron_async.schedules.actions import (
    Action,
    Kind,
    Transfer,
    interleaved_call,
    one_f_one_b_call,
    pipedream_2bw_call,
    pipedream_2bw_lists,
    synchronous_lists,
)
from megatron_async.schedules.validator import ScheduleError, validate


def short(actions: list[Action]) -> str:
    """F, B and the updates only: `F1.0v0` is the forward of batch 1's microbatch 0 on version 0."""
    names = {
        Kind.FORWARD: "F",
        Kind.BACKWARD: "B",
        Kind.LAUNCH_UPDATE: "L",
        Kind.COMPLETE_UPDATE: "C",
        Kind.UPDATE: "U",
    }
    words = []
    for action in actions:
        if action.kind in names:
            place = f".{action.microbatch}" if action.microbatch >= 0 else ""
            words.append(f"{names[action.kind]}{action.batch}{place}v{action.version}")
    return " ".join(words)


def call(**options: Any) -> list[Action]:
    defaults: dict[str, Any] = {
        "stages": 4,
        "stage": 0,
        "batch": 1,
        "microbatches": 4,
        "first": False,
    }
    return pipedream_2bw_call(**{**defaults, "last": False, "deferred": True, **options})


def test_first_call_warms_up_and_prefetches_on_the_newest_version() -> None:
    assert short(call(stage=1, batch=0, first=True)) == (
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


def test_misplaced_completion_stands_after_that_communication() -> None:
    right, wrong = call(stage=2), call(stage=2, complete_after_receive=True)
    at = next(i for i, action in enumerate(right) if action.kind is Kind.COMPLETE_UPDATE)
    assert [*wrong[:at], wrong[at + 1], wrong[at], *wrong[at + 2 :]] == right


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
    assert call(stage=1, microbatches=3, gather_ahead=True) == call(stage=1, microbatches=3)


def test_late_reduction_launches_after_the_next_batchs_first_backward() -> None:
    assert short(call(stages=2, batch=2, microbatches=3, reduce_late=True)) == (
        "F2.1v1 B2.0v1 L1v2 F2.2v1 B2.1v1 C1v2 F3.0v2 B2.2v1"
    )
    # With m = p, both stand behind the same backward on stage 0.
    assert short(call(stages=2, batch=2, microbatches=2, reduce_late=True)) == (
        "F2.1v1 B2.0v1 L1v2 C1v2 F3.0v2 B2.1v1"
    )
    assert short(call(stages=2, batch=2, microbatches=2, reduce_late=True, last=True)).endswith(
        "B2.1v1 L2v3 C2v3"
    )


def test_update_without_deferral_stands_at_the_end() -> None:
    assert short(call(stage=2, batch=2, deferred=False)).endswith("B2.3v1 U2v3")
    assert "C" not in short(call(stage=2, batch=2, deferred=False))


def test_last_call_drains() -> None:
    actions = call(stage=1, batch=2, last=True)
    assert short(actions) == "F2.2v1 B2.0v1 F2.3v1 B2.1v1 C1v2 B2.2v1 B2.3v1 L2v3 C2v3"
    tail = [action.kind for action in actions[-9:]]
    assert (
        tail
        == [
            Kind.COMPLETE_UPDATE,
            Kind.SEND_BACKWARD,
            *(Kind.RECV_BACKWARD, Kind.BACKWARD, Kind.SEND_BACKWARD) * 2,
            Kind.LAUNCH_UPDATE,
            Kind.COMPLETE_UPDATE,
        ][-9:]
    )


def test_resumed_run_warms_up_on_the_previous_version_with_no_update_pending() -> None:
    assert short(call(stage=2, batch=7, first=True)) == (
        "F7.0v6 F7.1v6 B7.0v6 F7.2v6 B7.1v6 F7.3v6 B7.2v6 F8.0v7 B7.3v6 L7v8"
    )


def test_single_stage_has_the_same_delay() -> None:
    lists = pipedream_2bw_lists(stages=1, microbatches=[2, 2, 2], deferred=True)
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
        ({"microbatches": 3, "reduce_late": True}, "needs at least 4 microbatches with 4 pipeline"),
        ({"stage": 4}, "stage 4 does not exist in a pipeline of 4 stages"),
        ({"batch": 0}, "must be the first"),
        ({"batch": -1}, "must not be negative"),
    ],
)
def test_impossible_calls_are_refused(options: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call(**options)


def test_last_call_ignores_the_next_batch() -> None:
    assert call(last=True, next_microbatches=0) == call(last=True)


def test_megatron_1f1b() -> None:
    actions = one_f_one_b_call(stages=4, stage=2, batch=5, microbatches=3)
    assert [action.kind for action in actions] == [
        *(Kind.RECV_FORWARD, Kind.FORWARD, Kind.SEND_FORWARD, Kind.RECV_FORWARD),
        *(Kind.FORWARD, Kind.SEND_FORWARD_RECV_BACKWARD),
        *(Kind.BACKWARD, Kind.SEND_BACKWARD_RECV_FORWARD),
        *(Kind.FORWARD, Kind.SEND_FORWARD_RECV_BACKWARD, Kind.BACKWARD, Kind.SEND_BACKWARD),
        *(Kind.RECV_BACKWARD, Kind.BACKWARD, Kind.SEND_BACKWARD),
        Kind.UPDATE,
    ]
    assert short(actions) == "F5.0v5 F5.1v5 B5.0v5 F5.2v5 B5.1v5 B5.2v5 U5v6"


def test_megatron_1f1b_with_fewer_microbatches_than_warm_up() -> None:
    actions = one_f_one_b_call(stages=4, stage=0, batch=0, microbatches=2)
    assert short(actions) == "F0.0v0 F0.1v0 B0.0v0 B0.1v0 U0v1"


def test_megatron_interleaved() -> None:
    # p = 2, v = 2, m = 2, last stage: 2 warm-up forwards, then chunk 1 first backward.
    actions = interleaved_call(stages=2, stage=1, batch=0, microbatches=2, chunks=2)
    order = [
        f"{a.kind.value[0]}{a.microbatch}.{a.chunk}"
        for a in actions
        if a.kind in (Kind.FORWARD, Kind.BACKWARD)
    ]
    assert order == ["f0.0", "f1.0", "f0.1", "b0.1", "f1.1", "b1.1", "b0.0", "b1.0"]
    with pytest.raises(ValueError, match="multiple of 2 microbatches"):
        interleaved_call(stages=2, stage=1, batch=0, microbatches=3, chunks=2)
    with pytest.raises(ValueError, match="at least 2 stages and 2 model chunks"):
        interleaved_call(stages=2, stage=1, batch=0, microbatches=2, chunks=1)


@pytest.mark.parametrize("stages", range(1, 9))
@pytest.mark.parametrize(
    "options",
    [
        {"deferred": False},
        {"deferred": True},
        {"deferred": True, "gather_ahead": True},
        {"deferred": True, "reduce_late": True},
        {"deferred": True, "gather_ahead": True, "reduce_late": True},
    ],
    ids=lambda options: "-".join(name for name, value in options.items() if value) or "undeferred",
)
def test_every_layout_is_valid(stages: int, options: dict[str, bool]) -> None:
    rng = random.Random(stages)
    fewest = stages if options.get("reduce_late") else max(stages - 1, 1)
    for drain in (True, False):
        for first_batch in (0, 6):
            for counts in (
                [fewest] * 4,
                [2 * stages + 1] * 2,
                [stages + 2],
                sorted(rng.randint(fewest, 11) for _ in range(5)),
                [rng.randint(fewest, 11) for _ in range(5)],
            ):
                lists = pipedream_2bw_lists(
                    stages=stages,
                    microbatches=counts,
                    first_batch=first_batch,
                    drain=drain,
                    **options,
                )
                validate(lists)


@pytest.mark.parametrize("stages", range(1, 7))
def test_synchronous_layouts_are_valid_and_have_no_delay(stages: int) -> None:
    for count in (1, 2, stages, 2 * stages + 1):
        validate(synchronous_lists(stages=stages, microbatches=[count] * 3), delay=0)
    if stages > 1:
        for chunks in (2, 3):
            counts = [stages, 3 * stages]
            validate(synchronous_lists(stages=stages, microbatches=counts, chunks=chunks), delay=0)
        with pytest.raises(ScheduleError, match="must run on version 0"):
            validate(synchronous_lists(stages=stages, microbatches=[stages] * 3), delay=1)


def find(actions: list[Action], kind: Kind, **fields: int) -> int:
    return next(
        i
        for i, action in enumerate(actions)
        if action.kind is kind and all(getattr(action, k) == v for k, v in fields.items())
    )


def drop(kind: Kind, stage: int = 1, **fields: int) -> Callable[[list[list[Action]]], None]:
    def change(lists: list[list[Action]]) -> None:
        del lists[stage][find(lists[stage], kind, **fields)]

    return change


def edit(
    kind: Kind, changes: dict[str, Any], stage: int = 1, **fields: int
) -> Callable[[list[list[Action]]], None]:
    def change(lists: list[list[Action]]) -> None:
        at = find(lists[stage], kind, **fields)
        lists[stage][at] = replace(lists[stage][at], **changes)

    return change


def move(
    kind: Kind, by: int, stage: int = 1, **fields: int
) -> Callable[[list[list[Action]]], None]:
    def change(lists: list[list[Action]]) -> None:
        at = find(lists[stage], kind, **fields)
        lists[stage].insert(at + by, lists[stage].pop(at))

    return change


def extra_forward(lists: list[list[Action]]) -> None:
    at = find(lists[0], Kind.BACKWARD)
    ahead = find(lists[0], Kind.FORWARD, batch=1, microbatch=1)
    lists[0].insert(at, lists[0].pop(ahead))


@pytest.mark.parametrize(
    ("change", "stage", "reason"),
    [
        (edit(Kind.FORWARD, {"version": 0}, batch=2, microbatch=0), 1, "must run on version 1"),
        (edit(Kind.BACKWARD, {"version": 1}, batch=1, microbatch=0), 1, "forward ran on version 0"),
        (drop(Kind.COMPLETE_UPDATE, batch=0), 1, "version 1 does not exist here now, only \\[0\\]"),
        (move(Kind.COMPLETE_UPDATE, 2, batch=0), 1, "version 1 does not exist here now"),
        (move(Kind.COMPLETE_UPDATE, -9, batch=1), 1, "was not launched"),
        (move(Kind.LAUNCH_UPDATE, -3, batch=0), 1, "1 of the batch's backwards are still to come"),
        (drop(Kind.LAUNCH_UPDATE, batch=0), 1, "was not launched"),
        (edit(Kind.LAUNCH_UPDATE, {"version": 2}, batch=0), 1, "batch 0 makes version 1"),
        (edit(Kind.FORWARD, {"microbatch": 1}, batch=2, microbatch=2), 1, "a second time"),
        (edit(Kind.BACKWARD, {"microbatch": 0}, batch=1, microbatch=1), 1, "ran before"),
        (edit(Kind.BACKWARD, {"microbatch": 5}, batch=1, microbatch=1), 1, "not forwarded before"),
        (drop(Kind.RECV_FORWARD), 1, "its input was not received before"),
        (
            edit(Kind.SEND_FORWARD_RECV_BACKWARD, {"recv_microbatch": 3}, recv_batch=1),
            1,
            "output gradient was not received",
        ),
        (move(Kind.SEND_FORWARD, -1), 1, "was not computed before"),
        (extra_forward, 0, "5 microbatches are in flight, at most 4 may"),
        (drop(Kind.SEND_FORWARD, stage=0, microbatch=2), 0, "expects something else at that place"),
        (drop(Kind.SEND_BACKWARD, stage=2, microbatch=3), 1, "stage 2 never sends"),
        (edit(Kind.BACKWARD, {"stage": 0}), 1, "belongs to stage 0"),
        (edit(Kind.COMPLETE_UPDATE, {"kind": Kind.UPDATE}, batch=0), 1, "next update is that of"),
    ],
)
def test_faults_are_found(
    change: Callable[[list[list[Action]]], None], stage: int, reason: str
) -> None:
    lists = pipedream_2bw_lists(stages=4, microbatches=[4] * 4, deferred=True)
    validate(lists)
    change(lists)
    with pytest.raises(ScheduleError, match=reason) as caught:
        validate(lists)
    assert caught.value.stage == stage
    assert f"stage {stage}, action {caught.value.position}: " in str(caught.value)
    assert str(caught.value.action) in str(caught.value)


def test_overwriting_a_version_in_use_is_found() -> None:
    lists = pipedream_2bw_lists(stages=2, microbatches=[3] * 4, deferred=False)
    move(Kind.UPDATE, -3, stage=0, batch=1)(lists)
    with pytest.raises(ScheduleError, match="version 0 is overwritten while 1 microbatches"):
        validate(lists)
    lists = pipedream_2bw_lists(stages=2, microbatches=[3] * 4, deferred=True)
    move(Kind.LAUNCH_UPDATE, -3, stage=0, batch=1)(lists)
    with pytest.raises(ScheduleError, match="1 of the batch's backwards are still to come"):
        validate(lists)


def test_second_launch_needs_the_first_completed() -> None:
    lists = pipedream_2bw_lists(stages=2, microbatches=[3] * 4, deferred=True)
    # The last stage needs version 2 only after the launch of batch 2: there the order alone is
    # wrong, since a launch overwrites the copied gradients.
    last = lists[1]
    complete = find(last, Kind.COMPLETE_UPDATE, batch=1)
    assert last[complete + 2].kind is Kind.LAUNCH_UPDATE
    last.insert(complete + 2, last.pop(complete))
    with pytest.raises(ScheduleError, match="update of batch 1 was launched and is not completed"):
        validate(lists)


def test_early_completion_is_valid() -> None:
    lists = pipedream_2bw_lists(stages=2, microbatches=[2] * 4, deferred=True)
    launch = find(lists[0], Kind.LAUNCH_UPDATE, batch=1)
    complete = find(lists[0], Kind.COMPLETE_UPDATE, batch=1)
    lists[0].insert(launch + 1, lists[0].pop(complete))
    validate(lists)


def test_unfinished_ends_are_found() -> None:
    lists = pipedream_2bw_lists(stages=2, microbatches=[2, 2], deferred=True)
    assert lists[1].pop().kind is Kind.COMPLETE_UPDATE
    with pytest.raises(ScheduleError, match="the update of batch 1 incomplete") as caught:
        validate(lists)
    assert (caught.value.stage, caught.value.action) == (1, None)
    mixed = [
        pipedream_2bw_lists(stages=2, microbatches=[2, 2], deferred=True, drain=drain)[stage]
        for stage, drain in ((0, False), (1, True))
    ]
    with pytest.raises(ScheduleError):
        validate(mixed)
    with pytest.raises(ValueError, match="at least one stage"):
        validate([])
