"""A progress bar for a terminal that falls back to a few plain lines in a log file."""

import sys
import time
from types import TracebackType
from typing import TextIO

__all__ = ["ProgressBar"]

_WIDTH = 28
_TERMINAL_INTERVAL_S = 0.1
_LOG_INTERVAL_S = 15.0


class ProgressBar:
    """Shows ``label [####----]  42%  text``.

    On a terminal the line is rewritten in place; elsewhere a line is written every 15 s, and the
    last one at the end.

    Args:
        label: what is being done.
        total: the amount of work, in any unit; 0 counts as done.
        stream: where to write; standard error by default.
    """

    def __init__(self, label: str, *, total: float, stream: TextIO | None = None) -> None:
        self._label = label
        self._total = total
        self._stream = sys.stderr if stream is None else stream
        self._on_terminal = self._stream.isatty()
        self._shown_at = float("-inf")
        self._length = 0
        self._line = ""
        self._shown = ""

    def __enter__(self) -> "ProgressBar":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def update(self, done: float, text: str = "") -> None:
        """Show that ``done`` of ``total`` is reached; calls that come too fast show nothing."""
        share = min(1.0, done / self._total) if self._total else 1.0
        filled = round(share * _WIDTH)
        bar = "#" * filled + "-" * (_WIDTH - filled)
        self._line = f"{self._label} [{bar}] {share:4.0%}  {text}".rstrip()
        interval = _TERMINAL_INTERVAL_S if self._on_terminal else _LOG_INTERVAL_S
        if time.monotonic() - self._shown_at >= interval:
            self._show()

    def close(self) -> None:
        """Show the last state and end the line."""
        if self._line != self._shown:
            self._show()
        if self._on_terminal:
            self._stream.write("\n")
            self._stream.flush()

    def _show(self) -> None:
        self._shown_at = time.monotonic()
        self._shown = self._line
        if self._on_terminal:
            self._stream.write("\r" + self._line.ljust(self._length))
            self._length = len(self._line)
        else:
            self._stream.write(self._line + "\n")
        self._stream.flush()
