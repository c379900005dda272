"""Every rule on the arguments: its message, and what it leaves alone."""

import argparse

import pytest

from megatron_async.config.validation import Facts, Rule, check, rules
from megatron_async.config.validation.rule import Scope
from tests.config.cases import ASYNC, CASES, DEFAULTS, FACTS, PLAIN, parse, problems

pytestmark = pytest.mark.usefixtures("adaptive_muon_runs")

RULES = rules()


def case(parser: argparse.ArgumentParser, rule: Rule) -> argparse.Namespace:
    argv, attributes = CASES[rule.name]
    size = 8 if rule.name == "cpu_context_parallel" else 4
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
    parser: argparse.ArgumentParser, rule: Rule
) -> None:
    errors, warnings = problems(case(parser, rule), facts_of(rule))
    messages = warnings if rule.warning else errors
    assert len(messages) == 1, messages
    assert messages[0].startswith(f"{rule.flag}: ")
    reason, _, remedy = messages[0].removeprefix(f"{rule.flag}: ").rpartition(". ")
    assert len(reason) > 10
    assert remedy.endswith(".")
    assert "\n" not in messages[0]


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


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_nothing_is_checked_without_a_flag_of_this_package(
    parser: argparse.ArgumentParser, rule: Rule
) -> None:
    args = case(parser, rule)
    vars(args).update(DEFAULTS)
    assert check(args, facts_of(rule)) == []
