"""Imports torch and Megatron once, and forks a process for every run; see :mod:`.launch`.

    python -m megatron_async.study.fork_host

Standard input brings a JSON object a line for each run: ``number``, ``arguments`` of the package's
launcher, ``log`` and ``environment``. Standard output tells ``{"number": N, "pid": P}`` when it has
begun and ``{"number": N, "code": C}`` when it has ended. At the end of its input, or when its
parent ends, the process ends and takes its runs with it.
"""

import gc
import importlib
import json
import os
import select
import signal
import sys
import traceback
from typing import Any

import psutil

from megatron_async.study.launch import die_with_parent
from megatron_async.tools.job import end_family

__all__ = ["import_once", "main"]

_INTERVAL_S = 0.05
# What a run imports takes longer than all else in its launch. Nothing here may start a thread:
# only the thread that forks lives on in the fork.
_MODULES = (
    "torch._dynamo",
    "megatron.training.training",
    "megatron.core.datasets.helpers_cpp",
    "megatron.core.models.mimo",
    "megatron.core.tokenizers.text.text_tokenizer",
    "megatron_async.checkpoint.session",
    "megatron_async.hooks",
    "megatron_async.scripts.pretrain_gpt",
    "megatron_async.config.startup",
)


def import_once() -> None:
    """Import what a run on CPU ranks imports, for the forks of this process; starts no thread."""
    from megatron_async import cpu_backend

    cpu_backend.install()
    for module in _MODULES:
        importlib.import_module(module)
    # Collections in a fork would write to, and so copy, every page that is shared with this one.
    gc.collect()
    gc.freeze()


def main() -> None:
    """Serve until the input ends."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    import_once()
    running: dict[int, int] = {}
    try:
        _serve(running)
    finally:
        end_family(*running)


def _serve(running: dict[int, int]) -> None:
    """Start what the input asks for and report what has ended.

    Args:
        running: process ids and their numbers; kept up to date.
    """
    buffer = b""
    while True:
        if select.select([0], [], [], _INTERVAL_S)[0]:
            chunk = os.read(0, 65536)
            if not chunk:
                return
            *lines, buffer = (buffer + chunk).split(b"\n")
            for line in lines:
                order = json.loads(line)
                pid = os.fork()
                if pid == 0:
                    _run(order)
                running[pid] = order["number"]
                _report(number=order["number"], pid=pid)
        while running:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                break
            number = running.pop(pid, None)
            if number is not None:
                _report(number=number, code=os.waitstatus_to_exitcode(status))


def _report(**values: int) -> None:
    # Not by sys.stdout, whose buffer a fork would inherit.
    os.write(1, json.dumps(values).encode() + b"\n")


def _run(order: dict[str, Any]) -> None:
    """Be the run: never returns."""
    code = 1
    try:
        die_with_parent(signal.SIGKILL)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        log = os.open(order["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.environ.update(order["environment"])
        code = _exit_code(order["arguments"])
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        # What a run leaves behind, a normal exit would end.
        for child in psutil.Process().children(recursive=True):
            child.kill()
        os._exit(code)


def _exit_code(arguments: list[str]) -> int:
    from megatron_async.__main__ import main as launch

    try:
        launch(arguments)
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return end.code or 0
        print(end.code, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    main()
