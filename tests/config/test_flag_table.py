"""Every flag of the installed Megatron is sorted, and what is rejected has its rule."""

import argparse
from pathlib import Path

import pytest

from megatron_async.config.arguments import flags
from megatron_async.config.flag_table import FlagRow, compare, load, main, render
from megatron_async.config.validation import rules
from megatron_async.optimizers import OPTIMIZERS
from tests.support.gpt import REPOSITORY

DOCS = REPOSITORY / "docs"
RULES = rules()
OWN = {flag.name for flag in (*flags().values(), *OPTIMIZERS.flags.values())}
"""Flags of this package, not of Megatron."""


@pytest.fixture(scope="module")
def parser() -> argparse.ArgumentParser:
    from megatron.training.arguments import add_megatron_arguments

    return add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))


@pytest.fixture(scope="module")
def rows() -> list[FlagRow]:
    return load(DOCS / "flags.csv")


def test_every_flag_of_the_installed_megatron_is_sorted(
    rows: list[FlagRow], parser: argparse.ArgumentParser
) -> None:
    unsorted, gone = compare(rows, parser)
    assert unsorted == [], "sort these into docs/flags.csv, and make the page again"
    assert gone == [], "remove these from docs/flags.csv, and make the page again"


def test_a_new_and_a_removed_flag_are_noticed(
    rows: list[FlagRow], parser: argparse.ArgumentParser
) -> None:
    fewer = [row for row in rows if row.flags[0] not in ("--fp16", "--seed")]
    assert compare(fewer, parser) == (["--fp16", "--seed"], [])
    more = FlagRow(group="training", flags=("--gone", "--lost"), status="works", reason="")
    assert compare([*rows, more], parser) == ([], ["--gone", "--lost"])
    kitchen = FlagRow(group="kitchen", flags=("--kitchen-sink",), status="rejected", reason="")
    assert compare([*rows, kitchen], parser) == ([], [])


def test_page_is_up_to_date(rows: list[FlagRow], capsys: pytest.CaptureFixture[str]) -> None:
    page = (DOCS / "flags.md").read_text()
    assert page == render(rows), (
        "python -m megatron_async.config.flag_table docs/flags.csv > docs/flags.md"
    )
    main([str(DOCS / "flags.csv")])
    assert capsys.readouterr().out == page


def test_every_rejected_flag_has_a_rule(rows: list[FlagRow]) -> None:
    ruled = {rule.flag for rule in RULES if not rule.warning}
    for row in rows:
        if row.status == "rejected" and not set(row.flags) & ruled:
            assert row.reason.startswith("as --"), row
            assert row.reason.split()[1].rstrip(",") in ruled, row


def test_every_rule_on_a_flag_of_megatron_shows_in_the_table(rows: list[FlagRow]) -> None:
    table = {flag: row for row in rows for flag in row.flags}
    for rule in RULES:
        if rule.flag in OWN or not rule.flag.startswith("--"):
            continue
        row = table[rule.flag]
        if rule.warning:
            assert "warned of" in row.reason, row
        else:
            assert row.status == "rejected" or "rejected" in row.reason, row


def test_what_works_only_for_some_values_is_ruled(rows: list[FlagRow]) -> None:
    # One rule warns of the momentum of all optimizers.
    momenta = {record.momentum_flag for record in OPTIMIZERS if record.momentum_flag}
    ruled = {rule.flag for rule in RULES} | momenta
    for row in rows:
        says = "rejected" in row.reason or "warned of" in row.reason
        if row.status == "works" and says and "rejected as --" not in row.reason:
            assert set(row.flags) & ruled or "--second-grad-buffer" in row.reason, row


def test_irrelevant_flags_that_lean_on_a_rejected_one_name_a_rejected_one(
    rows: list[FlagRow],
) -> None:
    table = {flag: row for row in rows for flag in row.flags}
    for row in rows:
        if row.status == "irrelevant" and row.reason.startswith("only with --"):
            parent = table[row.reason.split()[2].rstrip(",")]
            assert parent.status == "rejected", (row, parent)


def test_page_gives_the_rules_reason() -> None:
    row = FlagRow(group="g", flags=("--fp16",), status="rejected", reason="")
    (reason,) = [rule.reason for rule in RULES if rule.flag == "--fp16"]
    assert isinstance(reason, str)
    assert f"| `--fp16` | rejected | {reason}. Use --bf16. |" in render([row])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("training,--fp16,maybe,\n", "malformed"),
        ("training,--fp16,works\n", "malformed"),
        ("training,,works,\n", "malformed"),
        ("training,--fp16,works,\ntraining,--bf16 --fp16,works,\n", "line 3.*twice"),
    ],
)
def test_a_broken_table_is_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "flags.csv"
    path.write_text(f"group,flags,status,reason\n{text}")
    with pytest.raises(ValueError, match=message):
        load(path)
