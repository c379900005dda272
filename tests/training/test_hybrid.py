"""Hybrid models of attention, MLP and MoE layers: as GPTs, whatever the number of stages."""

from typing import Any

import pytest

from tests.support.gpt import ASYNC, Value
from tests.support.shared_jobs import Results, job
from tests.support.steps import Outcome, Step, assert_continues, loads, run_steps, saves
from tests.training.cases import Case, check_close, parameters

pytestmark = [pytest.mark.core, pytest.mark.timeout(1200)]

DELAYED: dict[str, Any] = dict(ASYNC)
STAGES: dict[str, Any] = {
    "pipeline_model_parallel_size": 2,
    "hybrid_layer_pattern": "*-|*E",
}
"""The model's pattern, split into stages."""
# On one stage: with its MoE layers on one of two stages alone, synchronous training hangs at the
# first log line, where Megatron sums their metrics over the stages that have any.
SYNCHRONOUS = job(model="hybrid")
ONE_STAGE = job(model="hybrid", **DELAYED)
FRESH: dict[str, Any] = {"pipeline_schedule": "fresh-2bw", "delayed_microbatches": 1}
CASES = (
    Case("2bw", job(2, model="hybrid", **DELAYED, **STAGES), ONE_STAGE),
    Case(
        "2bw-even-split",
        job(2, model="hybrid", **DELAYED, pipeline_model_parallel_size=2),
        ONE_STAGE,
    ),
    Case("fresh", job(2, model="hybrid", **FRESH, **STAGES), job(model="hybrid", **FRESH)),
)


@pytest.mark.parametrize("case", parameters(CASES))
def test_losses_and_norms_agree(results: Results, case: Case) -> None:
    found, wanted = results[case.job], results[case.like]
    check_close("losses", dict(enumerate(found.losses)), dict(enumerate(wanted.losses)), case.rtol)
    check_close("norms", found.norms, wanted.norms, case.norm_rtol)


class _Both:
    """Names the jobs that the test takes."""

    jobs = (ONE_STAGE, SYNCHRONOUS)


@pytest.mark.parametrize("_", [_Both])
def test_the_delay_changes_what_is_trained(results: Results, _: type) -> None:
    assert results[ONE_STAGE].losses[0] == results[SYNCHRONOUS].losses[0]
    assert results[ONE_STAGE].losses[3:] != results[SYNCHRONOUS].losses[3:]


SCHEDULES = ("pipedream-2bw", "fresh-2bw")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Outcome]:
    steps = []
    for schedule in SCHEDULES:
        flags: dict[str, Value] = {
            "pipeline_schedule": schedule,
            "delay_correction": "error-feedback",
            "num_experts": 4,
            "moe_router_load_balancing_type": "aux_loss",
            "moe_aux_loss_coeff": 0.1,
            "disable_bias_linear": True,
            "ckpt_format": "torch_dist",
            **STAGES,
        }
        steps += [
            Step(f"{schedule} uninterrupted", {**flags, **saves(schedule)}),
            Step(f"{schedule} resumed", {**flags, **loads(schedule, 3)}),
        ]
    return run_steps(2, steps, tmp_path_factory.mktemp("hybrid"))


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_run_goes_on_where_it_was_saved(saved: dict[str, Outcome], schedule: str) -> None:
    assert_continues(saved[f"{schedule} resumed"], saved[f"{schedule} uninterrupted"], done=3)
