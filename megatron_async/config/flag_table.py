"""The table that sorts every flag of Megatron, and the page made of it.

``docs/flags.csv`` has one row for each flag: Megatron's own group, the flag with its other
spellings, a status and a reason. The reason of a rejected flag stands in its rule
(:mod:`megatron_async.config.validation`) and is left empty unless another flag's rule catches it.
The page is made by ``python -m megatron_async.config.flag_table docs/flags.csv > docs/flags.md``.
"""

import argparse
import csv
import sys
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Final, Literal, get_args

from megatron_async.config.validation import Rule, rules
from megatron_async.megatron import releases

__all__ = ["OPTIONAL_GROUPS", "FlagRow", "Status", "compare", "load", "main", "render"]

Status = Literal["works", "rejected", "irrelevant"]

OPTIONAL_GROUPS: Final = frozenset({"kitchen", "new in 0.20"})
"""Groups of flags that the installed Megatron need not have: those of another package or
release."""


_HEAD: Final = """\
<!-- Made by: python -m megatron_async.config.flag_table docs/flags.csv > docs/flags.md -->
# Megatron's flags under an asynchronous schedule

All {count} flags of Megatron {release}, those that 0.20 adds included, sorted by what becomes of
them with `--pipeline-schedule fresh-2bw` or `pipedream-2bw`, and with `paci` and `pipedream` where
nothing else is said. With the default schedule none is rejected.

- **works** ({works}): has to do with the schedule, the update or checkpoints, and is accepted.
  Sorted by reading Megatron's code; *not tested* says that no test runs with it.
- **rejected** ({rejected}): ends the run before training, with this reason.
- **irrelevant** ({irrelevant}): cannot influence the schedule, or belongs to something that is
  rejected."""


@dataclass(frozen=True, kw_only=True)
class FlagRow:
    """One flag."""

    group: str
    flags: tuple[str, ...]
    """All spellings, the usual one first."""
    status: Status
    reason: str


def load(path: Path) -> list[FlagRow]:
    """Read the table.

    Raises:
        ValueError: a row is malformed, or a flag stands there twice.
    """
    rows: list[FlagRow] = []
    seen: set[str] = set()
    with path.open(newline="") as file:
        for number, record in enumerate(csv.DictReader(file), start=2):
            flags = tuple(record["flags"].split())
            status = record["status"]
            if not flags or status not in get_args(Status) or None in record.values():
                raise ValueError(f"{path}, line {number}: malformed row {record}")
            if doubles := seen & set(flags):
                raise ValueError(f"{path}, line {number}: {doubles} stand there twice")
            seen |= set(flags)
            rows.append(
                FlagRow(
                    group=record["group"],
                    flags=flags,
                    status=status,  # type: ignore[arg-type]
                    reason=record["reason"],
                )
            )
    return rows


def compare(
    rows: Iterable[FlagRow], parser: argparse.ArgumentParser
) -> tuple[list[str], list[str]]:
    """Flags of ``parser`` that the table lacks, and flags of the table that ``parser`` lacks."""
    rows = list(rows)
    table = {flag for row in rows for flag in row.flags}
    optional = {flag for row in rows if row.group in OPTIONAL_GROUPS for flag in row.flags}
    known = set(parser._option_string_actions) - {"-h", "--help"}
    return sorted(known - table), sorted(table - optional - known)


def render(rows: Sequence[FlagRow], reasons: Collection[Rule] | None = None) -> str:
    """The page, in Markdown.

    Args:
        rows: the table, flags of a group one after the other.
        reasons: where the reasons of rejected flags stand; by default all rules.
    """
    why = {
        rule.flag: f"{rule.reason}. {rule.remedy}"
        for rule in (rules() if reasons is None else reasons)
        if not rule.warning and isinstance(rule.reason, str)
    }
    counts = {status: sum(row.status == status for row in rows) for status in get_args(Status)}
    lines = [_HEAD.format(count=len(rows), release=releases.TABLE_OF_FLAGS, **counts)]
    for group, members in groupby(rows, key=lambda row: row.group):
        part = list(members)
        lines += ["", f"## {group}", ""]
        listed = [row for row in part if row.status != "irrelevant"]
        if listed:
            lines += ["| flag | status | why |", "| --- | --- | --- |"]
            for row in listed:
                reason = row.reason or (why[row.flags[0]] if row.status == "rejected" else "")
                reason = reason.replace("|", "\\|")
                lines.append(f"| {_names(row)} | {row.status} | {reason} |")
            lines.append("")
        irrelevant = sorted(
            (row for row in part if row.status == "irrelevant"), key=lambda row: row.reason
        )
        for reason, same in groupby(irrelevant, key=lambda row: row.reason):
            because = f" ({reason})" if reason else ""
            lines += [f"Irrelevant{because}: {', '.join(_names(row) for row in same)}.", ""]
        if not lines[-1]:
            lines.pop()
    return "\n".join(lines) + "\n"


def _names(row: FlagRow) -> str:
    return " / ".join(f"`{flag}`" for flag in row.flags)


def main(argv: Sequence[str] | None = None) -> None:
    """Print the page."""
    parser = argparse.ArgumentParser(
        prog="python -m megatron_async.config.flag_table", description=main.__doc__
    )
    parser.add_argument("table", type=Path, help="docs/flags.csv")
    sys.stdout.write(render(load(parser.parse_args(argv).table)))


if __name__ == "__main__":
    main()
