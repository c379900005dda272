"""PACI's order of actions: one copy of the weights, and which microbatches drift."""

import random
from dataclasses import replace
from typing import Any

import pytest

from megatron_async.schedules.actions import Kind
from megatron_async.schedules.fresh_2bw import FRESH_2BW, delayed_microbatches
from megatron_async.schedules.paci import PACI
from megatron_async.schedules.schedule import Pipeline, action_lists
from megatron_async.schedules.validator import validate
from tests.schedules.lists import call_of, short


@pytest.mark.parametrize(
    ("stage", "order"),
    [
        (0, "F2.3v2 B2.0v2 F2.4v2 B2.1v2 F3.0v2 B2.2v2 F3.1v2 B2.3v2 F3.2v2 B2.4v2 L2v3 C2v3"),
        (1, "F2.2v1 B2.0v1 C1v2 F2.3v2 B2.1v2 F2.4v2 B2.2v2 F3.0v2 B2.3v2 F3.1v2 B2.4v2 L2v3"),
        (3, "F2.0v1 B2.0v1 F2.1v1 B2.1v1 F2.2v1 B2.2v1 C1v2 F2.3v2 B2.3v2 F2.4v2 B2.4v2 L2v3"),
    ],
)
def test_all_runs_on_the_newest_weights_of_the_stage(stage: int, order: str) -> None:
    """Of batch 2, microbatches 0 to 2 are forwarded on version 1; those that are in flight when
    version 2 is made run backward on it."""
    assert short(call_of(PACI, stages=4, stage=stage, batch=2, microbatches=5)) == order


def test_the_order_is_that_of_fresh_2bw() -> None:
    for options in ({}, {"extra_warmup": 2}, {"reduce_late": True}):
        ours, theirs = (
            [
                [replace(action, version=-1) for action in actions]
                for actions in action_lists(schedule, Pipeline(stages=4, **options), [9, 9, 12, 8])
            ]
            for schedule in (PACI, FRESH_2BW)
        )
        assert ours == theirs


def test_the_version_of_an_action_is_the_last_one_made_on_its_stage() -> None:
    """Which needs no second copy: followed along the lists."""
    for actions in action_lists(PACI, Pipeline(stages=4), [7] * 6):
        newest = 0
        for action in actions:
            if action.kind is Kind.COMPLETE_UPDATE:
                newest = action.version
            elif action.kind in (Kind.FORWARD, Kind.BACKWARD):
                assert action.version == newest


def test_delay_and_copies() -> None:
    pipeline = Pipeline(stages=4)
    rule = PACI.rule(pipeline, 12)
    assert [rule.kept(stage) for stage in range(4)] == [1, 1, 1, 1]
    # Of 12 microbatches 3 are forwarded on old weights; 0, 1, 2, 3 of them run backward there.
    for stage, backward in enumerate((0, 1, 2, 3)):
        assert rule.mean_delay(5, 12, stage) == pytest.approx((3 + backward) / 24)
        assert rule.staleness(stage) == pytest.approx((3 + backward) / 24)
    # (3 + 4 + 5 + 6) / 24, over four stages.
    (note,) = PACI.notes(pipeline, 12)
    assert note.endswith("a mean delay of 0.188 of an update")


@pytest.mark.parametrize("stages", range(1, 8))
@pytest.mark.parametrize("options", [{}, {"reduce_late": True}], ids=["plain", "reduce_late"])
def test_every_layout_is_valid(stages: int, options: dict[str, Any]) -> None:
    rng = random.Random(stages)
    for extra in {0, (stages - 1) // 2, stages - 1}:
        pipeline = Pipeline(stages=stages, extra_warmup=extra, **options)
        fewest = max(delayed_microbatches(pipeline, 100), 1)
        for value in ("fewest", "all", fewest + 1):
            made_for = replace(pipeline, flags={"delayed_microbatches": value})
            counts = [fewest + 1, *sorted(rng.randint(fewest + 1, fewest + 6) for _ in range(4))]
            for drain in (True, False):
                lists = action_lists(PACI, made_for, counts, drain=drain)
                validate(lists, schedule=PACI, pipeline=made_for, microbatches=counts)


def test_emulated_on_one_stage_the_update_is_complete_where_the_first_backward_needs_it() -> None:
    """Of four stages the first runs three microbatches ahead: with c = 3 it runs all backwards of
    batch 2 on version 2, with c = 5 those from microbatch 2 on."""
    for c, update, counts in ((3, "", []), (5, "C1v2 ", [0, 1])):
        flags = {"emulate_pipeline_stages": 4, "delayed_microbatches": c}
        call = call_of(PACI, stages=1, stage=0, batch=2, microbatches=7, flags=flags)
        old = [f"F2.{i}v1 B2.{i}v1" for i in range(c)]
        new = [f"F2.{i}v2 B2.{i}v2" for i in range(c, 7)]
        if counts:
            old.insert(len(counts), update.strip())
        end = "L2v3 C2v3" if not counts else "L2v3"
        assert short(call) == " ".join([*old, *new, end])


def test_emulated_stages_have_the_delays_of_real_ones() -> None:
    for value in ("fewest", 5):
        flags = {"emulate_pipeline_stages": 4, "delayed_microbatches": value}
        real = Pipeline(stages=4, flags={"delayed_microbatches": value})
        emulating = Pipeline(stages=1, flags=flags)
        assert PACI.least_microbatches(emulating) == PACI.least_microbatches(real) == 3
        assert PACI.notes(emulating, 7) == PACI.notes(real, 7)
        seen = PACI.rule(replace(emulating, stages=4), 7)
        for stage in range(4):
            assert seen.staleness(stage) == PACI.rule(real, 7).staleness(stage)
        for counts in ([7] * 4, [7, 7, 9, 9]):
            lists = action_lists(PACI, emulating, counts)
            validate(lists, schedule=PACI, pipeline=emulating, microbatches=counts)
