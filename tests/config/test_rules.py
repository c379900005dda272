"""Every rule on the arguments: its message, and what it leaves alone."""

import argparse
import re

import pytest

from megatron_async.config.validation import Facts, Rule, check, rules
from megatron_async.config.validation.rule import Scope
from megatron_async.schedules import SCHEDULES
from megatron_async.schedules.interleaved import INTERLEAVED
from megatron_async.schedules.one_f_one_b import ONE_F_ONE_B
from megatron_async.schedules.schedule import Pipeline, Schedule, action_lists
from megatron_async.schedules.simulator import Costs, simulate
from tests.config.cases import ASYNC, CASES, DEFAULTS, FACTS, PLAIN, parse, problems

pytestmark = pytest.mark.usefixtures("adaptive_muon_runs")

RULES = rules()


def case(parser: argparse.ArgumentParser, rule: Rule) -> argparse.Namespace:
    argv, attributes = CASES[rule.name]
    size = 8 if rule.name == "cpu_context_parallel" else 4  # two ranks share a sequence
    args = parse(parser, [*PLAIN, *ASYNC, *argv], world_size=size)
    vars(args).update(attributes)
    return args


def facts_of(rule: Rule) -> Facts:
    return Facts(megatron_version="0.21.0") if rule.name == "megatron_version" else FACTS


def test_every_rule_has_a_case_and_a_name_of_its_own() -> None:
    names = [rule.name for rule in RULES]
    assert len(set(names)) == len(names)
    assert set(names) == set(CASES)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_rule_is_the_only_one_to_fire_and_says_which_flag_why_and_what_instead(
    parser: argparse.ArgumentParser, rule: Rule, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    errors, warnings = problems(case(parser, rule), facts_of(rule))
    messages = warnings if rule.warning else errors
    assert len(messages) == 1, messages
    assert messages[0].startswith(f"{rule.flag}: ")
    reason, _, remedy = messages[0].removeprefix(f"{rule.flag}: ").rpartition(". ")
    assert len(reason) > 10
    assert remedy.endswith(".")
    assert "\n" not in messages[0]


RECIPES = {
    "fp8": ("delayed", "tensorwise", "mxfp8", "blockwise", "custom"),
    "fp4": ("nvfp4", "custom"),
}


def test_megatron_has_no_other_recipes() -> None:
    from megatron.core.enums import Fp4Recipe, Fp8Recipe

    assert {recipe.value for recipe in Fp8Recipe} == set(RECIPES["fp8"])
    assert {recipe.value for recipe in Fp4Recipe} == set(RECIPES["fp4"])


@pytest.mark.parametrize("parameters", [False, True])
@pytest.mark.parametrize("kind", RECIPES)
def test_quantized_weights_are_refused_with_the_reason_of_their_recipe(
    parser: argparse.ArgumentParser, kind: str, parameters: bool
) -> None:
    found = set()
    for recipe in RECIPES[kind]:
        argv = [f"--{kind}-param-gather"] if parameters else []
        args = parse(parser, [*PLAIN, *ASYNC, *argv])
        vars(args)[f"{kind}_recipe"] = recipe
        vars(args)[kind] = None if parameters else "e4m3"
        ((message,), _) = problems(args)
        assert f": with the recipe {recipe}, " in message
        found.add(message.replace(recipe, ""))
    # Two scale tensors as a whole, and their parameters are alike.
    assert len(found) == len(RECIPES[kind]) - (kind == "fp8" and parameters)


@pytest.mark.parametrize(
    "rule",
    [rule for rule in RULES if rule.scope is Scope.ASYNCHRONOUS],
    ids=lambda rule: rule.name,
)
def test_rule_on_the_asynchronous_schedule_leaves_the_default_one_alone(
    parser: argparse.ArgumentParser, rule: Rule
) -> None:
    argv, attributes = CASES[rule.name]
    args = parse(parser, [*PLAIN, *ASYNC, *argv])
    vars(args).update(DEFAULTS | attributes | {"log_pipeline_bubble": True})
    assert check(args, FACTS) == []


@pytest.mark.parametrize("name", ["fresh-2bw", "pipedream-2bw"])
def test_interleaving_is_refused_with_the_simulators_numbers(
    parser: argparse.ArgumentParser, name: str
) -> None:
    stages, microbatches, chunks = 4, 16, 2
    flag = "--num-virtual-stages-per-pipeline-rank"
    sizes = ["--global-batch-size", str(microbatches), flag, str(chunks)]
    args = parse(parser, [*PLAIN, "--pipeline-schedule", name, *sizes])
    args.virtual_pipeline_model_parallel_size = chunks
    (message,) = problems(args, FACTS)[0]

    def slots_and_bubble(schedule: Schedule, chunks: int = 1) -> tuple[float, float]:
        pipeline = Pipeline(stages=stages, deferred=schedule.asynchronous, chunks=chunks)
        lists = action_lists(schedule, pipeline, [microbatches] * 8)
        run = simulate(lists, Costs(forward=0.5, backward=0.5))
        return run.iteration_time, 100 * (1 - microbatches / run.iteration_time)

    of = re.findall(r"([\d.]+)(?: slots)? \((?:a bubble of )?([\d.]+)%\)", message)
    wanted = [
        slots_and_bubble(ONE_F_ONE_B),
        slots_and_bubble(INTERLEAVED, chunks),
        slots_and_bubble(SCHEDULES[name]),
    ]
    for (slots, bubble), (simulated, left) in zip(of, wanted, strict=True):
        assert float(slots) == pytest.approx(simulated)
        assert float(bubble) == pytest.approx(left, abs=0.05)
    late = {"fresh-2bw": (stages - 1) / microbatches, "pipedream-2bw": 1.0}[name]
    assert f"{late:.3g} updates late" in message


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_nothing_is_checked_without_a_flag_of_this_package(
    parser: argparse.ArgumentParser, rule: Rule
) -> None:
    args = case(parser, rule)
    vars(args).update(DEFAULTS)
    assert check(args, facts_of(rule)) == []
