"""Whoever reads the weights sees a complete version of them, however slow their gather is.

Megatron's loop reads them in evaluations, in saves and for the parameters' norm: these find the
version that the last iteration made, as in synchronous training. It also compares weight hashes
between two iterations, and a training script may look at the model there: all stages have the same
version then. Hooks on modules and gradients find what is computed on.
"""

import dataclasses
import re
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path

import pytest
from _pytest.mark import ParameterSet

from megatron_async.schedules import SCHEDULES
from megatron_async.schedules.actions import COMPUTE, Kind
from megatron_async.schedules.schedule import (
    Call,
    Pipeline,
    Schedule,
    action_lists,
    made_by_all_stages,
)
from tests.support.gpt import ASYNC, Value
from tests.support.late_gathers import Seen, prelude, read
from tests.support.steps import Outcome, Step, run_steps

pytestmark = pytest.mark.timeout(1200)

SHARDED: Mapping[str, Value] = {"use_distributed_optimizer": True, "overlap_grad_reduce": True}
GATHERED: Mapping[str, Value] = {"overlap_param_gather": True}
STAGES_2: Mapping[str, Value] = {"pipeline_model_parallel_size": 2}
STAGES_4: Mapping[str, Value] = {"pipeline_model_parallel_size": 4, "global_batch_size": 16}
NORM: Mapping[str, Value] = {"log_params_norm": True}
UNDEFERRED: Mapping[str, Value] = {**ASYNC, **NORM, "no_deferred_update": True}
FRESH: Mapping[str, Value] = {"pipeline_schedule": "fresh-2bw", "global_batch_size": 16}
PACI: Mapping[str, Value] = {"pipeline_schedule": "paci"}
PIPEDREAM: Mapping[str, Value] = {"pipeline_schedule": "pipedream"}
BF16: Mapping[str, Value] = {"bf16": True}

ITERATIONS = 7
EVALUATED, SAVED, HASHED = (3, 6), 4, 5
COMMON: Mapping[str, Value] = {
    "train_iters": ITERATIONS,
    "eval_interval": 3,
    "eval_iters": 1,
    # Already the first update is to change the weights.
    "lr_warmup_iters": 0,
}
HASHES = "check_weight_hash_across_dp_replicas_interval"


@dataclasses.dataclass(frozen=True)
class Run:
    """A layout with two data-parallel replicas.

    Attributes:
        name: of the run.
        ranks: number of ranks.
        flags: of all of its jobs.
        microbatches: of a batch, if updates are deferred.
        behind: by how many updates the weights between two iterations are behind the newest.
        format: of the checkpoint.
        resumed: whether its checkpoint is resumed from.
    """

    name: str
    ranks: int
    flags: Mapping[str, Value]
    microbatches: int | None = None
    behind: int = 1
    format: str = "torch"
    resumed: bool = True

    def steps(self, directory: Path) -> list[Step]:
        """The run without overlapped gathers, where each version is looked at; with gathers that
        are as late as can be; and resumed from what that one saved."""
        flags: dict[str, Value] = {**SHARDED, **COMMON, **self.flags, "ckpt_format": self.format}
        late = {**flags, **GATHERED}
        save: dict[str, Value] = {"save": f"{{dir}}/{self.name}", "save_interval": SAVED}
        load: dict[str, Value] = {"load": f"{{dir}}/{self.name}", "ckpt_step": SAVED}
        plain_name, late_name = f"{self.name} plain", f"{self.name} late"
        steps = [
            Step(plain_name, flags, prelude(directory, plain_name, late=False)),
            Step(
                late_name,
                {**late, **save, HASHES: HASHED},
                prelude(directory, late_name, late=True),
            ),
        ]
        if self.resumed:
            steps.append(Step(f"{self.name} resumed", {**late, **load}))
        return steps


RUNS = [
    Run("2bw", 4, {**ASYNC, **STAGES_2}, microbatches=2, format="torch_dist"),
    Run(
        "fewest microbatches",
        4,
        {**ASYNC, **STAGES_2, "global_batch_size": 4},
        microbatches=1,
        resumed=False,
    ),
    Run("undeferred", 2, {**UNDEFERRED, **BF16}),
    Run("emulated", 2, {**PIPEDREAM, "emulate_pipeline_stages": 4}, behind=0, resumed=False),
]
SLOW_RUNS = [
    Run("one stage", 2, {**ASYNC, **BF16}, microbatches=2),
    Run("second buffer", 4, {**ASYNC, **STAGES_2, "second_grad_buffer": True}, microbatches=2),
    Run("undeferred 2bw", 4, {**UNDEFERRED, **STAGES_2}, format="torch_dist"),
    Run("fresh", 4, {**FRESH, **STAGES_2, "delayed_microbatches": 2}, microbatches=4),
    Run(
        "more in flight",
        4,
        {**FRESH, **STAGES_2, "delayed_microbatches": 3, "pipeline_extra_warmup": 1},
        microbatches=4,
    ),
    Run("pipedream", 4, {**PIPEDREAM, **STAGES_2}, behind=0, resumed=False),
    Run("four stages", 8, {**ASYNC, **STAGES_4}, microbatches=4),
    Run("four stages bf16", 8, {**ASYNC, **STAGES_4, **BF16}, microbatches=4, format="torch_dist"),
]


def parameters(select: Callable[[Run], bool] = lambda run: True) -> list[ParameterSet]:
    """Return the runs as parameters of a test."""
    return [
        pytest.param(
            run, id=run.name, marks=pytest.mark.slow if run in SLOW_RUNS else pytest.mark.core
        )
        for run in (*RUNS, *SLOW_RUNS)
        if select(run)
    ]


@dataclasses.dataclass(frozen=True)
class Found:
    """What became of a run's jobs, and what each rank saw in the first two."""

    plain: Outcome
    late: Outcome
    resumed: Outcome | None
    versions: list[Seen]
    seen: list[Seen]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Run], Found]:
    @cache
    def launch(ranks: int, slow: bool) -> tuple[Path, dict[str, Outcome]]:
        directory = tmp_path_factory.mktemp("readers")
        runs = [run for run in (SLOW_RUNS if slow else RUNS) if run.ranks == ranks]
        steps = [step for run in runs for step in run.steps(directory)]
        return directory, run_steps(ranks, steps, directory)

    def of(run: Run) -> Found:
        directory, outcomes = launch(run.ranks, run not in RUNS)
        return Found(
            outcomes[f"{run.name} plain"],
            outcomes[f"{run.name} late"],
            outcomes.get(f"{run.name} resumed"),
            read(directory, f"{run.name} plain", ranks=run.ranks),
            read(directory, f"{run.name} late", ranks=run.ranks),
        )

    return of


def has_norm(run: Run) -> bool:
    return "log_params_norm" in run.flags


@pytest.mark.parametrize("run", parameters())
def test_nobody_sees_an_incomplete_version(found: Callable[[Run], Found], run: Run) -> None:
    places = {"forward hook", "backward hook", "finalization"}
    places |= {"settled", "after the step", "log", "callbacks", "end of training"}
    places |= {
        "evaluation",
        "non-loss data",
        "save",
        "hashes",
        *(["norm"] if has_norm(run) else []),
    }
    for rank, seen in enumerate(found(run).seen):
        # Each version was gathered late, and each place was looked at.
        assert set(seen.hidden) == set(range(1, ITERATIONS + 1))
        assert set(seen.complete) == places
        for place, complete in seen.complete.items():
            assert all(complete.values()), (rank, place, complete)


@pytest.mark.parametrize("run", parameters())
def test_everyone_sees_the_version_that_is_meant(found: Callable[[Run], Found], run: Run) -> None:
    everywhere = set(range(1, ITERATIONS + 1))

    def between(settled: set[int]) -> dict[int, int]:
        """Iteration -> version, the newest where it was read before, and at the end."""
        newest = {*settled, ITERATIONS}
        return {i: i if i in newest else i - run.behind for i in everywhere}

    expected = {
        "hashes": {0: 0, HASHED: HASHED if has_norm(run) else HASHED - run.behind},
        "save": {SAVED: SAVED, ITERATIONS: ITERATIONS},
        "non-loss data": {i: i for i in (*EVALUATED, ITERATIONS)},
        "end of training": {ITERATIONS: ITERATIONS},
        "after the step": between(set()),
        "log": between(everywhere if has_norm(run) else set()),
        "callbacks": between(everywhere if has_norm(run) else {*EVALUATED}),
    }
    if has_norm(run):
        expected["norm"] = between(everywhere)
    of = found(run)
    for rank, (plain, seen) in enumerate(zip(of.versions, of.seen, strict=True)):
        # Version v is what there is after v iterations.
        versions = {weights: version for version, weights in plain.weights["settled"].items()}
        assert sorted(versions.values()) == list(range(ITERATIONS + 1)), rank
        for place, wanted in expected.items():
            assert {i: versions.get(w) for i, w in seen.weights[place].items()} == wanted, (
                rank,
                place,
            )


@pytest.mark.parametrize("run", parameters())
def test_late_gathers_and_readers_change_nothing(found: Callable[[Run], Found], run: Run) -> None:
    of = found(run)
    assert len(of.plain.losses) == ITERATIONS
    assert of.late.losses == of.plain.losses
    assert of.late.norms == of.plain.norms
    assert of.late.validation == of.plain.validation
    assert {done for done, _ in of.late.validation} == {*EVALUATED, ITERATIONS}
    norms = re.findall(r"params norm: (\S+)", of.late.log)
    assert norms == re.findall(r"params norm: (\S+)", of.plain.log)
    assert len(norms) == (ITERATIONS if has_norm(run) else 0)
    if of.resumed is not None:
        assert of.resumed.first == SAVED + 1
        assert of.resumed.losses == of.plain.losses[SAVED:]
        assert of.resumed.validation == [
            (done - SAVED, loss) for done, loss in of.plain.validation if done > SAVED
        ]


@pytest.mark.parametrize("run", parameters(lambda run: run.microbatches is not None))
def test_gathers_run_under_computation(found: Callable[[Run], Found], run: Run) -> None:
    """Where nobody reads, a gather is waited for when a microbatch needs what it brings."""
    stages = int(str(run.flags.get("pipeline_model_parallel_size", 1)))
    pipeline = Pipeline(
        stages=stages,
        gather_ahead=True,
        reduce_late="second_grad_buffer" in run.flags,
        extra_warmup=int(str(run.flags.get("pipeline_extra_warmup", 0))),
        flags=run.flags,
    )
    schedule = SCHEDULES[str(run.flags["pipeline_schedule"])]
    lists = action_lists(schedule, pipeline, [run.microbatches or 0] * ITERATIONS)
    undisturbed = set(range(1, ITERATIONS)) - {*EVALUATED, SAVED}
    for rank, seen in enumerate(found(run).seen):
        actions = lists[rank * stages // run.ranks]
        room = {}
        for i, action in enumerate(actions):
            if action.kind is Kind.COMPLETE_UPDATE:
                versions = [a.version for a in actions[i:] if a.kind in COMPUTE]
                room[action.version] = [*versions, action.version].index(action.version)
        assert {v: seen.hidden[v] for v in undisturbed} == {v: room[v] for v in undisturbed}, rank


def check_between(schedule: Schedule, pipeline: Pipeline, *, microbatches: int) -> None:
    """Check that what the model is to be between two iterations is complete on every stage."""
    batches = 6
    kept = schedule.rule(pipeline, microbatches).kept
    versions = []
    for stage in range(pipeline.stages):
        newest, under_way = 0, set[int]()
        for batch in range(batches):
            call = Call(
                pipeline=pipeline,
                stage=stage,
                batch=batch,
                microbatches=microbatches,
                next_microbatches=microbatches,
                batches_left=batches - batch,
            )
            for action in schedule.call(call):
                if action.kind in (Kind.COMPLETE_UPDATE, Kind.UPDATE):
                    newest = action.version
                elif action.kind is Kind.START_GATHER:
                    under_way.add(action.version)
                elif action.kind is Kind.FINISH_GATHER:
                    under_way.remove(action.version)
            version = batch + 1 if made_by_all_stages(schedule, call) else batch
            versions.append(version)
            if kept(stage) == 1 < pipeline.stages and pipeline.deferred:
                version = newest  # PACI
            assert newest - kept(stage) < version <= newest
            assert version not in under_way
    assert versions == versions[:batches] * pipeline.stages
    assert versions[-1] == batches


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("stages", [1, 2, 4])
def test_the_version_between_two_iterations_is_there(stages: int, ahead: bool) -> None:
    """No stage has to finish a gather for it that the lists do not have finished."""
    for schedule in (schedule for schedule in SCHEDULES if schedule.asynchronous):
        for deferred in {False, schedule.deferrable}:
            pipeline = Pipeline(stages=stages, deferred=deferred, gather_ahead=ahead)
            least = schedule.least_microbatches(pipeline)
            for microbatches in (least, least + 1, 4 * stages):
                if schedule.problems(pipeline, microbatches):
                    continue
                check_between(schedule, pipeline, microbatches=microbatches)


@pytest.mark.core
def test_a_single_copy_can_be_read_while_microbatches_are_in_flight(tmp_path: Path) -> None:
    """An update that is completed early leaves no version that their backwards are meant for."""
    common: dict[str, Value] = {**COMMON, **STAGES_2, "ckpt_format": "torch"}
    flags: dict[str, Value] = {**common, **PACI}
    load: dict[str, Value] = {"load": "{dir}/paci", "ckpt_step": SAVED}
    outcomes = run_steps(
        2,
        [
            Step("unread", {**flags, "eval_interval": 100}),
            Step("read", {**flags, "save": "{dir}/paci", "save_interval": SAVED, HASHES: 2}),
            Step("resumed", {**flags, **load}),
            Step("synchronous", {**common, **load}),
        ],
        tmp_path,
    )
    unread, read_in = outcomes["unread"].losses, outcomes["read"].losses
    assert len(read_in) == ITERATIONS
    assert read_in[: EVALUATED[0]] == unread[: EVALUATED[0]]
    # The microbatches in flight have seen newer weights, and nothing else.
    assert 0 < max(abs(a - b) / b for a, b in zip(read_in, unread, strict=True)) < 1e-2
    # Resumed, the first batch runs on the saved weights alone, as without a delay; then it drifts.
    resumed, synchronous = outcomes["resumed"], outcomes["synchronous"]
    assert any("starts afresh at iteration 5" in notice for notice in resumed.notices)
    assert list(resumed.by_iteration) == [5, 6, 7]
    assert resumed.losses[0] == synchronous.losses[0]
    assert resumed.losses[2] != synchronous.losses[2]
