"""Checks of the arguments, before any training.

The checks are pure functions of Megatron's validated namespace. What is checked stands in tables of
rules: :mod:`.own_flags`, :mod:`.schedule`, :mod:`.quantized`, :mod:`.emulation`, :mod:`.training`,
what is only warned of in :mod:`.unwise`, and what Megatron says nothing clear of in
:mod:`.assertions`. The reasons come from reading Megatron 0.19.2; docs/flags.md sorts every flag of
that release, and a test keeps the two consistent.

Without a flag of this package nothing is checked, and with the default schedule only what concerns
the flags given.
"""

import argparse
import sys
import time
from collections.abc import Sequence
from typing import Final, TextIO

from megatron_async.config.arguments import used
from megatron_async.config.settings import AsyncConfig
from megatron_async.config.validation import (
    assertions,
    emulation,
    own_flags,
    quantized,
    schedule,
    training,
    unwise,
)
from megatron_async.config.validation.rule import Facts, Rule, Scope, Subject

__all__ = ["ArgumentError", "Facts", "Rule", "check", "enforce", "notes", "rules"]

_EXIT_CODE: Final = 2  # argparse's own


def rules() -> tuple[Rule, ...]:
    """Return all rules, those on registered schedules, corrections and optimizers included."""
    return (
        *own_flags.RULES,
        *own_flags.registry_rules(),
        *schedule.RULES,
        *quantized.RULES,
        *emulation.RULES,
        *training.RULES,
        *unwise.RULES,
    )


class ArgumentError(ValueError):
    """Arguments that cannot be run; the message lists every problem.

    Attributes:
        problems: one message for each, naming the flag, the reason and what to do instead.
    """

    def __init__(self, problems: Sequence[str]) -> None:
        self.problems = tuple(problems)
        count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
        lines = "".join(f"\n  {number}. {text}" for number, text in enumerate(problems, start=1))
        super().__init__(f"megatron_async: {count} with the arguments:{lines}")


def check(
    args: argparse.Namespace,
    facts: Facts | None = None,
    *,
    configs: Sequence[object] = (),
    parsed_only: bool = False,
) -> list[str]:
    """Check the arguments, and what a script made of them.

    Args:
        args: Megatron's namespace after ``validate_args``.
        facts: what the checks need and the namespace does not hold; by default
            :meth:`Facts.current`.
        configs: Megatron's configuration objects, once they exist (``TransformerConfig``,
            ``OptimizerConfig``). A script may set there what no flag can; their attributes take
            precedence over those of the same name in ``args``.
        parsed_only: Megatron has not checked the arguments yet; only what it would end at with a
            bare assertion is checked (:mod:`.assertions`).

    Returns:
        Warnings: what runs but is unwise.

    Raises:
        ArgumentError: at least one thing cannot be run; all of them are listed.
    """
    if not (used(args) or (facts is not None and facts.flags_given)):
        return []
    subject = Subject(
        args=args,
        config=AsyncConfig.from_args(args),
        facts=Facts.current() if facts is None else facts,
        overlays=tuple(configs),
    )
    tables = assertions.RULES if parsed_only else rules()
    broken = [rule for rule in tables if _in_scope(rule, subject) and rule.applies(subject)]
    problems = [rule.message(subject) for rule in broken if not rule.warning]
    if not problems and not parsed_only:  # else the numbers that it goes by may make no sense
        problems = schedule.own_problems(subject)
    if problems:
        raise ArgumentError(problems)
    return [rule.message(subject) for rule in broken]


def _in_scope(rule: Rule, subject: Subject) -> bool:
    return rule.scope is Scope.ALWAYS or subject.config.asynchronous


def notes(args: argparse.Namespace, facts: Facts | None = None) -> list[str]:
    """Return what a run is to be told of the schedule's choices, a sentence each.

    Args:
        args: Megatron's namespace, checked.
        facts: as for :func:`check`.
    """
    subject = Subject(
        args=args,
        config=AsyncConfig.from_args(args),
        facts=Facts.current() if facts is None else facts,
    )
    return schedule.own_notes(subject)


def enforce(
    args: argparse.Namespace,
    facts: Facts | None = None,
    *,
    configs: Sequence[object] = (),
    parsed_only: bool = False,
    rank: int,
    warn: bool = True,
    stream: TextIO | None = None,
    grace: float = 20.0,
) -> None:
    """:func:`check` as a job runs it: rank 0 prints, and every rank ends if there is a problem.

    The other ranks wait before they end: a launcher that sees one of them fail first would stop
    rank 0 before it has printed. It stops them as soon as rank 0 has ended.

    Args:
        args: as for :func:`check`.
        facts: as for :func:`check`.
        configs: as for :func:`check`.
        parsed_only: as for :func:`check`.
        rank: global rank of this process.
        warn: whether what is only unwise is printed.
        stream: where rank 0 prints; standard error by default.
        grace: seconds that the other ranks wait.

    Raises:
        SystemExit: with code 2, after a problem.
    """
    stream = sys.stderr if stream is None else stream
    try:
        warnings = check(args, facts, configs=configs, parsed_only=parsed_only)
    except ArgumentError as error:
        if rank == 0:
            print(error, file=stream, flush=True)
        else:
            time.sleep(grace)
        raise SystemExit(_EXIT_CODE) from None
    if rank == 0 and warn:
        for text in warnings:
            print(f"WARNING: megatron_async: {text}", file=stream, flush=True)
