"""fresh-2bw's order of actions: which microbatches are delayed, and that the lists are valid."""

import random
from dataclasses import replace
from typing import Any

import pytest

from megatron_async.schedules.actions import Action
from megatron_async.schedules.fresh_2bw import FRESH_2BW, delayed_microbatches, delayed_notes
from megatron_async.schedules.pipedream_2bw import PIPEDREAM_2BW
from megatron_async.schedules.schedule import Pipeline, action_lists
from megatron_async.schedules.simulator import Costs, simulate
from megatron_async.schedules.unflushed import fewest_delayed
from megatron_async.schedules.validator import ScheduleError, validate
from tests.schedules.lists import call_of, short


def call(**options: Any) -> list[Action]:
    defaults: dict[str, Any] = {"stages": 4, "stage": 0, "batch": 2, "microbatches": 5}
    return call_of(FRESH_2BW, **{**defaults, **options})


def delayed(value: int | str) -> dict[str, Any]:
    return {"flags": {"delayed_microbatches": value}}


@pytest.mark.parametrize(
    ("stage", "order"),
    [
        (0, "F2.3v2 B2.0v1 F2.4v2 B2.1v1 F3.0v2 B2.2v1 F3.1v2 B2.3v2 F3.2v2 B2.4v2 L2v3 C2v3"),
        (1, "F2.2v1 B2.0v1 C1v2 F2.3v2 B2.1v1 F2.4v2 B2.2v1 F3.0v2 B2.3v2 F3.1v2 B2.4v2 L2v3"),
        (3, "F2.0v1 B2.0v1 F2.1v1 B2.1v1 F2.2v1 B2.2v1 C1v2 F2.3v2 B2.3v2 F2.4v2 B2.4v2 L2v3"),
    ],
)
def test_the_first_microbatches_run_on_the_version_before_the_newest(
    stage: int, order: str
) -> None:
    """c = 3 of 5, the fewest for four stages; the same ones forward and backward, on every
    stage."""
    assert short(call(stage=stage)) == order


def test_on_one_stage_nothing_is_delayed_and_the_update_is_complete_at_its_end() -> None:
    assert short(call(stages=1, microbatches=2)) == "F2.0v2 B2.0v2 F2.1v2 B2.1v2 L2v3 C2v3"
    assert short(call(stages=1, microbatches=2, **delayed(1))) == (
        "F2.0v1 B2.0v1 C1v2 F2.1v2 B2.1v2 L2v3"
    )


def test_with_all_delayed_it_is_pipedream_2bw() -> None:
    for stages in (1, 2, 4):
        for options in ({}, {"gather_ahead": True}, {"reduce_late": True}, {"deferred": False}):
            counts = [stages, stages + 3, stages + 1, 9]
            lists = [
                action_lists(schedule, Pipeline(stages=stages, **options), counts)
                for schedule, options in (
                    (FRESH_2BW, {**options, **delayed("all")}),
                    (PIPEDREAM_2BW, options),
                )
            ]
            assert lists[0] == lists[1]


@pytest.mark.parametrize(
    ("options", "fewest", "chosen"),
    [
        ({"stages": 4}, 3, 3),
        ({"stages": 1}, 0, 0),
        ({"stages": 4, "reduce_late": True}, 4, 4),
        ({"stages": 4, "extra_warmup": 2}, 5, 5),
        # A slot for the gather, if there is anything to gather.
        ({"stages": 4, "gather_ahead": True, "replicas": 2}, 3, 4),
        ({"stages": 4, "gather_ahead": True, "replicas": 1}, 3, 3),
        ({"stages": 4, "extra_warmup": 1, "reduce_late": True}, 5, 5),
    ],
)
def test_the_fewest_are_what_the_flags_need(
    options: dict[str, Any], fewest: int, chosen: int
) -> None:
    pipeline = Pipeline(**options)
    assert fewest_delayed(pipeline) == fewest
    assert delayed_microbatches(pipeline, 16) == chosen
    assert delayed_microbatches(replace(pipeline, **delayed("all")), 16) == 16
    assert delayed_microbatches(replace(pipeline, **delayed(7)), 16) == 7
    (note,) = delayed_notes(pipeline, 16)
    assert note.startswith(f"{chosen} of 16 microbatches")
    assert note.endswith(f"a mean delay of {chosen / 16:.3g} of an update")


def test_a_batch_without_a_slot_for_the_gather_does_not_speak_of_one() -> None:
    pipeline = Pipeline(stages=4, gather_ahead=True, replicas=2)
    assert delayed_microbatches(pipeline, 3) == 3
    (note,) = delayed_notes(pipeline, 3)
    assert note.startswith("3 of 3 ")
    assert "(3 for 4 pipeline stages)" in note


def test_the_mean_delay_is_the_delayed_share() -> None:
    pipeline = Pipeline(stages=4)
    rule = FRESH_2BW.rule(pipeline, 12)
    for stage in range(4):
        assert rule.mean_delay(0, 12, stage) == 0.0
        assert rule.mean_delay(5, 12, stage) == rule.staleness(stage) == 0.25
        assert rule.kept(stage) == 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"microbatches": 2}, "fresh-2bw with 4 pipeline stages needs at least 3 microbatches"),
        (delayed(2), "runs from 3 to 5 of them on the version before the newest, got 2"),
        (delayed(6), "runs from 3 to 5 of them on the version before the newest, got 6"),
        (
            {"extra_warmup": 1, **delayed(3)},
            "with 4 pipeline stages and 1 more in flight and 5 microbatches runs from 4 to 5",
        ),
        (
            {"extra_warmup": 3},
            "with 4 pipeline stages and 3 more in flight needs at least 6 microbatches",
        ),
    ],
)
def test_impossible_calls_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call(**options)


OPTIONS: list[dict[str, Any]] = [
    {"deferred": False},
    {},
    {"gather_ahead": True, "replicas": 2},
    {"reduce_late": True},
    {"gather_ahead": True, "replicas": 2, "reduce_late": True},
]


@pytest.mark.parametrize("stages", range(1, 6))
@pytest.mark.parametrize(
    "options", OPTIONS, ids=lambda options: "-".join(options) or "deferred-update"
)
def test_every_layout_is_valid(stages: int, options: dict[str, Any]) -> None:
    rng = random.Random(stages)
    for extra in {0, (stages - 1) // 2, stages - 1}:
        pipeline = Pipeline(stages=stages, extra_warmup=extra, **options)
        fewest = max(delayed_microbatches(pipeline, 100), 1)
        for value in ("fewest", "all", min(fewest + 1, fewest + 2)):
            for counts in (
                [fewest + 1] * 3,
                sorted(rng.randint(fewest + 1, fewest + 8) for _ in range(4)),
            ):
                for drain, start in ((True, 0), (False, 0), (True, 6)):
                    made_for = replace(pipeline, **delayed(value))
                    lists = action_lists(FRESH_2BW, made_for, counts, start=start, drain=drain)
                    validate(
                        lists,
                        schedule=FRESH_2BW,
                        pipeline=made_for,
                        microbatches=counts,
                        start=start,
                    )


@pytest.mark.parametrize(
    "options", OPTIONS, ids=lambda options: "-".join(options) or "deferred-update"
)
def test_batches_may_grow_from_the_least_there_can_be(options: dict[str, Any]) -> None:
    """Where the first has no slot left for the gather, and the second has."""
    for stages, extra in ((1, 0), (2, 0), (2, 1), (4, 0), (4, 3)):
        pipeline = Pipeline(stages=stages, extra_warmup=extra, **options)
        least = max(fewest_delayed(pipeline), 1)
        for counts in ([least, least + 1, least + 1, least + 3], [least, least, least + 2]):
            for value in ("fewest", "all"):
                made_for = replace(pipeline, **delayed(value))
                lists = action_lists(FRESH_2BW, made_for, counts)
                validate(lists, schedule=FRESH_2BW, pipeline=made_for, microbatches=counts)


@pytest.mark.parametrize(
    ("options", "least"),
    [
        ({"stages": 1}, 1),
        ({"stages": 4}, 3),
        ({"stages": 4, "extra_warmup": 1}, 4),
        ({"stages": 4, "extra_warmup": 3}, 6),
    ],
)
def test_a_batch_has_at_least_what_the_first_stage_runs_ahead(
    options: dict[str, Any], least: int
) -> None:
    pipeline = Pipeline(**options)
    for schedule in (FRESH_2BW, PIPEDREAM_2BW):
        assert schedule.least_microbatches(pipeline) == least
        action_lists(schedule, pipeline, [least] * 2)
        with pytest.raises(ValueError, match=f"at least {least} microbatches"):
            action_lists(schedule, pipeline, [least - 1] * 2)


def test_another_number_of_delayed_microbatches_is_another_schedule() -> None:
    counts = [8] * 4
    lists = action_lists(FRESH_2BW, Pipeline(stages=4), counts)
    with pytest.raises(ScheduleError, match="must run forward on version"):
        validate(
            lists,
            schedule=FRESH_2BW,
            pipeline=Pipeline(stages=4, **delayed(4)),
            microbatches=counts,
        )


@pytest.mark.parametrize("stages", [1, 2, 4, 8])
@pytest.mark.parametrize("rendezvous", [False, True])
def test_it_leaves_no_idle_time(stages: int, rendezvous: bool) -> None:
    for microbatches in (stages, 2 * stages + 1):
        for forward, backward in ((60.0, 120.0), (80.0, 100.0)):
            costs = Costs(forward=forward, backward=backward, optimizer=36)
            pipeline = Pipeline(stages=stages)
            lists = action_lists(FRESH_2BW, pipeline, [microbatches] * 12)
            run = simulate(lists, costs, rendezvous=rendezvous)
            assert run.iteration_time == pytest.approx(microbatches * (forward + backward) + 36)
            assert run.ratio_to_ideal == pytest.approx(1.0)
