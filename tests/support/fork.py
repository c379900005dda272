"""Forks: processes that are ranks, and need not import anything again."""

import gc
import os
import sys
from collections.abc import Callable
from pathlib import Path

__all__ = ["fork", "import_once"]


def import_once() -> None:
    """Import what a job imports, which takes longer than what it does; starts no thread."""
    import importlib

    from megatron_async import cpu_backend

    cpu_backend.install()
    for module in (
        "torch._dynamo",
        "megatron.training.training",
        "megatron.core.datasets.helpers_cpp",
        "megatron.core.models.mimo",
        "megatron.core.tokenizers.text.text_tokenizer",
        "megatron_async.checkpoint.session",
        "megatron_async.hooks",
        "megatron_async.scripts.pretrain_gpt",
        "megatron_async.config.startup",
    ):
        importlib.import_module(module)
    # The end of a fork would else visit, and so copy, every page that it shares with this process.
    gc.collect()
    gc.freeze()


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
