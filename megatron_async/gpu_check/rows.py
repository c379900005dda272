"""The table of a check: what was expected, what was measured, and whether that passes."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

__all__ = ["Result", "Row", "not_checked", "table"]


class Result(StrEnum):
    """How a row ends."""

    PASSED = "passed"
    FAILED = "FAILED"
    NOT_CHECKED = "not checked"


@dataclass(frozen=True, kw_only=True)
class Row:
    """One check.

    Attributes:
        expected: what should be.
        measured: what is.
        limit: what is let through.
        result: the verdict.
        why: why it was not checked.
        name: of the check.
    """

    expected: str
    measured: str
    limit: str
    result: Result
    why: str = ""
    name: str = ""

    @property
    def verdict(self) -> str:
        """For people."""
        return self.why or str(self.result)

    @classmethod
    def judged(cls, *, expected: str, measured: str, limit: str, passes: bool) -> "Row":
        """One that passes or fails."""
        result = Result.PASSED if passes else Result.FAILED
        return cls(expected=expected, measured=measured, limit=limit, result=result)

    @classmethod
    def failed(cls, reason: str) -> "Row":
        """One that could not be measured, which counts as a failure."""
        return cls.judged(expected="", measured=reason, limit="", passes=False)


def not_checked(why: str, row: Row | None = None) -> Row:
    """A row without a verdict.

    Args:
        why: the reason, for the last column.
        row: what was measured, to be shown without being judged.
    """
    if row is None:
        row = Row(expected="", measured="", limit="", result=Result.NOT_CHECKED)
    return replace(row, result=Result.NOT_CHECKED, why=why)


def table(rows: Sequence[Row]) -> str:
    """The rows as aligned text."""
    head = ("check", "expected", "measured", "limit", "result")
    cells = [head] + [
        (row.name, row.expected or "-", row.measured or "-", row.limit or "-", row.verdict)
        for row in rows
    ]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in cells
    ]
    return "\n".join([lines[0], "  ".join("-" * width for width in widths), *lines[1:]])
