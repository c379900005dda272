"""Forks: processes that are ranks, and need not import anything again."""

import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

import psutil

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


def fork(work: Callable[[], None], *, log: Path) -> int:
    """Do something in a process of its own, which ends with it.

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
    code = 1
    try:
        work()
        code = 0
    except SystemExit as end:
        traceback.print_exc()
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        # Checkpoints leave a process behind, which a normal exit would end.
        for child in psutil.Process().children(recursive=True):
            child.kill()
        os._exit(code)
