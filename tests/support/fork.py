"""Forks: processes that are ranks, and need not import anything again (``import_once`` of
megatron_async/study/fork_host.py)."""

import os
import sys
from collections.abc import Callable
from pathlib import Path

__all__ = ["fork"]


def fork(work: Callable[[], None], *, log: Path) -> int:
    """Do something in a process of its own, which ends as a rank's own would.

    The interpreter of that process ends where nobody catches its SystemExit, so the caller must not
    catch it.

    Args:
        work: what to do; the process's exit code is 0 unless it raises.
        log: gets what the process prints.

    Returns:
        The process's id.
    """
    pid = os.fork()
    if pid:
        return pid
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(file, 1)
    os.dup2(file, 2)
    try:
        work()
    except Exception:
        # torch's own hook puts the rank in front of every line.
        sys.excepthook = sys.__excepthook__
        raise
    sys.exit(0)
