"""PipeDream's order of actions: what the lists say, that they are valid, and what they take."""

from dataclasses import replace
from typing import Any

import pytest

from megatron_async.schedules.actions import Action, Kind, Transfer
from megatron_async.schedules.pipedream import PIPEDREAM
from megatron_async.schedules.pipedream_2bw import PIPEDREAM_2BW
from megatron_async.schedules.schedule import Pipeline
from megatron_async.schedules.simulator import Costs, DeadlockError, simulate
from megatron_async.schedules.validator import ScheduleError, validate
from tests.schedules.lists import Lists, call_of, drop, edit, find, pipedream, short


def call(**options: Any) -> list[Action]:
    defaults: dict[str, Any] = {"stages": 3, "stage": 0, "batch": 4, "microbatches": 2}
    return call_of(PIPEDREAM, **{**defaults, **options})


def check(lists: Lists, microbatches: int, batches: int, **options: Any) -> None:
    validate(
        lists,
        schedule=PIPEDREAM,
        pipeline=Pipeline(stages=len(lists), deferred=False, **options),
        microbatches=[microbatches] * batches,
    )


@pytest.mark.parametrize(
    ("stage", "order"),
    [
        (0, "F6.0v4 B4.0v2 F6.1v4 B4.1v2 U4v5"),
        (1, "F5.0v4 B4.0v3 F5.1v4 B4.1v3 U4v5"),
        (2, "F4.0v4 B4.0v4 F4.1v4 B4.1v4 U4v5"),
    ],
)
def test_each_stage_forwards_on_its_newest_version_and_is_as_late_as_it_is_far_from_the_last(
    stage: int, order: str
) -> None:
    assert short(call(stage=stage)) == order


@pytest.mark.parametrize(
    ("stage", "order"),
    [
        (0, "F0.0v0 F0.1v0 F1.0v0 F1.1v0 F2.0v0 B0.0v0 F2.1v0 B0.1v0 U0v1"),
        (1, "F0.0v0 F0.1v0 F1.0v0 B0.0v0 F1.1v0 B0.1v0 U0v1"),
        (2, "F0.0v0 B0.0v0 F0.1v0 B0.1v0 U0v1"),
    ],
)
def test_first_call_warms_up_with_whole_batches_on_the_initial_weights(
    stage: int, order: str
) -> None:
    assert short(call(stage=stage, batch=0)) == order


def test_delay_grows_with_the_first_batches() -> None:
    lists = pipedream(4, 1, 6)
    versions = [
        [action.version for action in actions if action.kind is Kind.BACKWARD] for actions in lists
    ]
    assert versions == [
        [0, 0, 0, 0, 1, 2],
        [0, 0, 0, 1, 2, 3],
        [0, 0, 1, 2, 3, 4],
        [0, 1, 2, 3, 4, 5],
    ]


def test_batches_that_never_come_are_left_out() -> None:
    # Batches 4 and 5 are the last ones: stage 0 has forwarded both, stage 1 forwards batch 5.
    assert short(call(stage=0, batches_left=2)) == "B4.0v2 B4.1v2 U4v5"
    assert short(call(stage=1, batches_left=2)) == "F5.0v4 B4.0v3 F5.1v4 B4.1v3 U4v5"
    assert call(stage=1, batches_left=3) == call(stage=1)
    kinds = [action.kind for action in call(stage=1, batches_left=2)]
    assert Kind.SEND_BACKWARD in kinds
    assert Kind.SEND_BACKWARD_RECV_FORWARD not in kinds
    assert short(call(stage=0, batch=0, batches_left=1)) == "F0.0v0 F0.1v0 B0.0v0 B0.1v0 U0v1"


def test_transfers_are_in_the_order_of_1f1b() -> None:
    actions = call(stage=1)
    exchange = [a for a in actions if a.kind is Kind.SEND_FORWARD_RECV_BACKWARD][1]
    assert exchange.sent(stages=3) == Transfer(True, 5, 1, border=1)
    assert exchange.received(stages=3) == Transfer(False, 4, 1, border=1)
    back = next(a for a in actions if a.kind is Kind.SEND_BACKWARD_RECV_FORWARD)
    assert back.sent(stages=3) == Transfer(False, 4, 0, border=0)
    # The batch that is forwarded in the next call.
    assert back.received(stages=3) == Transfer(True, 6, 0, border=0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"microbatches": 0}, "at least one microbatch, got 0"),
        ({"stage": 3}, "stage 3 does not exist in a pipeline of 3 stages"),
        ({"batch": -1}, "starts at batch 0, got batch -1"),
        ({"start": 4}, "starts at batch 0, got batch 4 of a segment from 4"),
        ({"batches_left": 0}, "batch 4 is no batch of the segment"),
        ({"deferred": True}, "--deferred-update: pipedream's last stage has no delay"),
        (
            {"next_microbatches": 3},
            "same number of microbatches in every batch, and aft.*2 come 3",
        ),
    ],
)
def test_impossible_calls_are_refused(options: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call(**options)


def test_batches_may_differ_on_one_stage() -> None:
    assert short(call(stages=1, next_microbatches=3)) == short(call(stages=1))


@pytest.mark.parametrize("stages", range(1, 9))
@pytest.mark.parametrize("microbatches", [1, 2, 5])
@pytest.mark.parametrize("gather_ahead", [False, True])
def test_every_layout_is_valid_and_does_not_deadlock(
    stages: int, microbatches: int, gather_ahead: bool
) -> None:
    costs = Costs(forward=1, backward=2, optimizer=1)
    for batches in (1, 2, stages, 2 * stages + 1):
        for drain in (True, False):
            lists = pipedream(stages, microbatches, batches, drain=drain, gather_ahead=gather_ahead)
            check(lists, microbatches, batches, gather_ahead=gather_ahead)
            for rendezvous in (False, True):
                simulate(lists, costs, rendezvous=rendezvous)


def test_an_update_is_made_of_reduced_gradients_and_gathered_before_the_next_call() -> None:
    assert short(call(stage=1), collectives=True) == "F5.0v4 B4.0v3 F5.1v4 R4 B4.1v3 r4 U4v5"
    gathering = short(call(stage=1, gather_ahead=True), collectives=True)
    # The next call's first forward needs it; nothing is computed in between.
    assert gathering == "F5.0v4 B4.0v3 F5.1v4 R4 B4.1v3 r4 U4v5 G5 g5"
    last = short(call(stage=1, gather_ahead=True, batches_left=1), collectives=True)
    assert last == "B4.0v3 R4 B4.1v3 r4 U4v5 G5 g5"


def test_lists_have_no_other_delays() -> None:
    lists = pipedream(3, 2, 5)
    options: Any = {"pipeline": Pipeline(stages=3, deferred=False), "microbatches": [2] * 5}
    one_step = replace(PIPEDREAM, rule=PIPEDREAM_2BW.rule)
    with pytest.raises(ScheduleError, match="batch 2 must run forward on version 1"):
        validate(lists, schedule=one_step, **options)
    by_warmup = replace(PIPEDREAM, ahead=PIPEDREAM_2BW.ahead)
    with pytest.raises(ScheduleError, match="in flight, at most 3 may"):
        validate(lists, schedule=by_warmup, **options)
    with pytest.raises(ValueError, match="there are 3 stages and 2 lists"):
        validate(lists[:2], schedule=PIPEDREAM, **options)


def test_faults_are_found() -> None:
    def broken(stage: int, kind: Kind, changes: dict[str, int], **fields: int) -> Lists:
        lists = pipedream(3, 2, 6)
        edit(kind, changes, stage, **fields)(lists)
        return lists

    with pytest.raises(ScheduleError, match="batch 3 must run backward on version 1"):
        check(broken(0, Kind.BACKWARD, {"version": 2}, batch=3, microbatch=0), 2, 6)
    with pytest.raises(ScheduleError, match="must run forward on version 2"):
        check(broken(1, Kind.FORWARD, {"version": 3}, batch=3, microbatch=0), 2, 6)
    exchange = Kind.SEND_FORWARD_RECV_BACKWARD
    with pytest.raises(ScheduleError, match="output gradient was not received"):
        check(broken(1, exchange, {"recv_microbatch": 1}, recv_batch=2, recv_microbatch=0), 2, 6)
    early = pipedream(3, 2, 6)
    update = find(early[0], Kind.UPDATE, batch=2)
    backward = find(early[0], Kind.BACKWARD, batch=2, microbatch=1)
    early[0].insert(backward, early[0].pop(update))
    with pytest.raises(ScheduleError, match="version 0 is overwritten while 1 microbatches"):
        check(early, 2, 6)
    stuck = pipedream(3, 2, 6)
    drop(Kind.SEND_FORWARD, 0, batch=1, microbatch=1)(stuck)
    with pytest.raises(DeadlockError, match="stage 1 in"):
        simulate(stuck, Costs(forward=1, backward=2))


@pytest.mark.parametrize(("stages", "microbatches"), [(1, 1), (2, 1), (4, 4), (8, 3)])
@pytest.mark.parametrize("rendezvous", [False, True])
def test_an_iteration_closes_the_pipeline_by_p_minus_1_backwards(
    stages: int, microbatches: int, rendezvous: bool
) -> None:
    lists = pipedream(stages, microbatches, 3 * stages + 4)
    run = simulate(lists, Costs(forward=60, backward=120, optimizer=36), rendezvous=rendezvous)
    time = microbatches * 180 + (stages - 1) * 120 + 36
    assert run.iteration_time == pytest.approx(time)
    assert run.ideal_time == pytest.approx(microbatches * 180 + 36)


def test_a_steady_state_needs_iterations_that_do_not_drain() -> None:
    lists = pipedream(4, 2, 5)
    with pytest.raises(ValueError, match="at least 6 iterations, got 5"):
        simulate(lists, Costs(forward=1, backward=1)).iteration_time  # noqa: B018
