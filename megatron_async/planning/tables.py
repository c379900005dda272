"""Tables of text."""

import sys
from collections.abc import Sequence
from typing import TextIO

__all__ = ["print_table"]


def print_table(rows: Sequence[Sequence[str]], out: TextIO | None = None) -> None:
    """Print rows of cells, the first of them as a head; numbers to the right."""
    out = out or sys.stdout
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for index, row in enumerate(rows):
        first, *rest = (cell for cell in row)
        line = first.ljust(widths[0])
        line += "".join(f"  {cell:>{width}}" for cell, width in zip(rest, widths[1:], strict=True))
        print(line.rstrip(), file=out)
        if index == 0:
            print("-" * len(line), file=out)
