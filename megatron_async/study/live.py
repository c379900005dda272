"""What a running study shows: a table that is redrawn on a terminal, plain lines elsewhere."""

import shutil
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TextIO

__all__ = ["LiveTable", "Row", "duration"]

_TERMINAL_INTERVAL_S = 0.5
_LOG_INTERVAL_S = 60.0
_WIDTH = 20


@dataclass(frozen=True, kw_only=True)
class Row:
    """A running cell.

    Attributes:
        label: of the cell.
        iteration, iterations: reached, and in all.
        loss: the last training loss, if there is one.
    """

    label: str
    iteration: int
    iterations: int
    loss: float | None

    @property
    def text(self) -> str:
        """Without the label."""
        loss = "" if self.loss is None else f"  loss {self.loss:.3f}"
        return f"{self.iteration:>6}/{self.iterations}{loss}"


class LiveTable:
    """Shows what runs and what has ended.

    On a terminal there is one line in all and one for each running cell, redrawn in place, and
    messages scroll by above them. Elsewhere messages are lines, and the rest is a line a minute.

    Args:
        stream: where to write; standard error by default.
    """

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = sys.stderr if stream is None else stream
        self._on_terminal = self._stream.isatty()
        self._drawn = 0
        self._shown_at = float("-inf")

    def say(self, message: str) -> None:
        """Show a line that stays."""
        self._erase()
        self._stream.write(message + "\n")
        self._stream.flush()
        if self._on_terminal:
            self._shown_at = float("-inf")  # draw the table again with the next update

    def update(
        self, *, done: int, total: int, rows: Sequence[Row], seconds_left: float | None
    ) -> None:
        """Show the state; calls that come too fast show nothing."""
        now = time.monotonic()
        if now - self._shown_at < (_TERMINAL_INTERVAL_S if self._on_terminal else _LOG_INTERVAL_S):
            return
        first = self._shown_at == float("-inf")
        self._shown_at = now
        left = "" if seconds_left is None else f", about {duration(seconds_left)} left"
        head = f"{done} of {total} cells done{left}"
        if not self._on_terminal:
            if not first:  # at the start there is nothing to tell
                cells = "; ".join(f"{row.label} {row.text.strip()}" for row in rows)
                self.say(f"{head}: {cells}")
            return
        columns = shutil.get_terminal_size().columns - 1
        label = max((len(row.label) for row in rows), default=0)
        lines = [head]
        for row in rows:
            share = min(1.0, row.iteration / max(1, row.iterations))
            bar = "#" * round(share * _WIDTH)
            lines.append(f"  {row.label:{label}} [{bar:-<{_WIDTH}}] {row.text}")
        self._erase()
        self._stream.write("".join(f"{line[:columns]}\n" for line in lines))
        self._stream.flush()
        self._drawn = len(lines)

    def close(self) -> None:
        """Remove what was redrawn; the messages stay."""
        self._erase()
        self._stream.flush()

    def _erase(self) -> None:
        if self._drawn:
            # Up to the first line of the table, and clear from there to the end of the screen.
            self._stream.write(f"\x1b[{self._drawn}F\x1b[J")
            self._drawn = 0


def duration(seconds: float) -> str:
    """As people say it: 40 s, 12 min, 3 h 05 min."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    if minutes < 90:
        return f"{minutes} min"
    return f"{minutes // 60} h {minutes % 60:02d} min"
