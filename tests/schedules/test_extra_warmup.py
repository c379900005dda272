"""More microbatches in flight than 1F1B has: messages that nobody waits for."""

from typing import Any

import pytest

from megatron_async.schedules.actions import COMMUNICATION, Action, Kind, Transfer
from megatron_async.schedules.pipedream_2bw import PIPEDREAM_2BW
from megatron_async.schedules.schedule import Pipeline, action_lists, extra_ahead
from megatron_async.schedules.simulator import Costs, simulate
from megatron_async.schedules.validator import ScheduleError, validate
from tests.schedules.lists import Change, call_of, drop, edit, find, insert, move, two_version


@pytest.mark.parametrize(
    ("stages", "extra", "ahead"),
    [
        (4, 0, [0, 0, 0, 0]),
        (4, 3, [3, 2, 1, 0]),
        # Two nodes of two stages each: one link to make up for.
        (4, 1, [1, 1, 0, 0]),
        (8, 3, [3, 3, 2, 2, 1, 1, 0, 0]),
        (1, 0, [0]),
    ],
)
def test_extra_microbatches_are_spread_over_the_links(
    stages: int, extra: int, ahead: list[int]
) -> None:
    pipeline = Pipeline(stages=stages, extra_warmup=extra)
    assert [extra_ahead(pipeline, stage) for stage in range(stages)] == ahead


def test_the_communication_is_posted_and_not_waited_for() -> None:
    actions = call_of(PIPEDREAM_2BW, stages=3, stage=1, batch=2, microbatches=5, extra_warmup=2)
    kinds = {action.kind for action in actions if action.kind in COMMUNICATION}
    assert kinds == {
        *(Kind.START_RECV_FORWARD, Kind.FINISH_RECV_FORWARD, Kind.START_SEND_FORWARD),
        *(Kind.START_RECV_BACKWARD, Kind.FINISH_RECV_BACKWARD, Kind.START_SEND_BACKWARD),
    }
    # The receive of the next one is posted before the one that has come is worked on.
    at = find(actions, Kind.FINISH_RECV_FORWARD, batch=2, microbatch=3)
    following = actions[at + 1]
    assert (following.kind, following.microbatch) == (Kind.START_RECV_FORWARD, 4)
    assert actions[at + 2].kind is Kind.FORWARD
    assert following.posted(stages=3) == Transfer(True, 2, 4, border=0)
    assert following.received(stages=3) is None
    # The model begins at stage 0.
    first = Action(stage=0, kind=Kind.START_RECV_FORWARD, batch=2, microbatch=4)
    assert first.posted(stages=3) is None


LISTS: dict[str, Any] = {"extra_warmup": 2}


def broken(change: Change) -> ScheduleError:
    counts = [6] * 4
    lists = two_version(3, counts, **LISTS)
    options: Any = {
        "schedule": PIPEDREAM_2BW,
        "pipeline": Pipeline(stages=3, **LISTS),
        "microbatches": counts,
    }
    validate(lists, **options)
    change(lists)
    with pytest.raises(ScheduleError) as caught:
        validate(lists, **options)
    return caught.value


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (
            drop(Kind.START_RECV_FORWARD, batch=1, microbatch=2),
            "its receive was not posted",
        ),
        (
            drop(Kind.START_RECV_BACKWARD, batch=1, microbatch=2),
            "its receive was not posted",
        ),
        (
            edit(Kind.START_RECV_FORWARD, {"microbatch": 1}, batch=1, microbatch=2),
            "its receive is posted a second time",
        ),
        (
            insert(
                Action(stage=1, kind=Kind.START_RECV_BACKWARD, batch=1, microbatch=2),
                Kind.FINISH_RECV_BACKWARD,
                batch=1,
                microbatch=2,
            ),
            "its receive is posted a second time",
        ),
        (
            drop(Kind.FINISH_RECV_FORWARD, batch=1, microbatch=2),
            "its input was not received before",
        ),
        (
            move(Kind.START_SEND_FORWARD, -1, batch=1, microbatch=2),
            "what it sends was not computed before",
        ),
        (
            drop(Kind.START_SEND_FORWARD, stage=0, batch=1, microbatch=2),
            "expects something else at that place",
        ),
        (
            insert(
                Action(stage=1, kind=Kind.START_RECV_FORWARD, batch=9, microbatch=0),
                Kind.FINISH_RECV_FORWARD,
                batch=1,
                microbatch=2,
            ),
            "the lists end with a receive that is posted",
        ),
    ],
)
def test_faults_are_found(change: Change, reason: str) -> None:
    with pytest.raises(ScheduleError, match=reason):
        raise broken(change)


@pytest.mark.parametrize("stages", range(1, 6))
def test_every_layout_is_valid_and_does_not_deadlock(stages: int) -> None:
    variants: list[dict[str, Any]] = [
        {},
        {"gather_ahead": True},
        {"reduce_late": True},
        {"deferred": False},
    ]
    for extra in range(stages):
        for options in variants:
            pipeline = Pipeline(stages=stages, extra_warmup=extra, **options)
            fewest = max(stages - 1 + extra + (1 if "reduce_late" in options else 0), 1)
            for counts in ([fewest] * 3, [fewest, fewest + 3]):
                for drain in (True, False):
                    lists = action_lists(PIPEDREAM_2BW, pipeline, counts, drain=drain)
                    validate(lists, schedule=PIPEDREAM_2BW, pipeline=pipeline, microbatches=counts)
                    for rendezvous in (False, True):
                        simulate(lists, Costs(forward=1, backward=2), rendezvous=rendezvous)


@pytest.mark.parametrize("rendezvous", [False, True])
@pytest.mark.parametrize("stages", [2, 4])
def test_late_messages_are_hidden(stages: int, rendezvous: bool) -> None:
    """Up to half of a slot of a forward and a backward each, with all links made up for."""
    costs = Costs(forward=60, backward=120, optimizer=36, latency=60)
    counts = [4 * stages] * 12
    plain, extra = (
        simulate(two_version(stages, counts, extra_warmup=e), costs, rendezvous=rendezvous)
        for e in (0, stages - 1)
    )
    assert extra.iteration_time == pytest.approx(4 * stages * 180 + 36)
    # Without, stages wait for messages in every slot.
    assert plain.iteration_time > 1.2 * extra.iteration_time
