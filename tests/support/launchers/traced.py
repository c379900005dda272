"""Runs the launcher and writes down every collective and P2P call of one rank, and every wait.

Run by torchrun in place of ``-m megatron_async``; the variable TRACE_DIR names the folder that gets
``rank<R>.json``. What is recorded are the methods of torch's process groups and works themselves,
so that it does not matter through which function, or which name bound early, a call is made. With
TRACE_COLLECTIVE_IN_STEP set, every update waits for all ranks, to see that it is noticed.
"""

import functools
import json
import os
import re
import sys
import traceback
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

# By their names, which change from one version of torch to the next.
COMMUNICATION = re.compile(r"gather|scatter|reduce|all_?to_?all|barrier|broadcast|send|recv")

events: list[dict[str, Any]] = []
works: list[tuple[Any, dict[str, Any]]] = []  # keeps them alive, so that identities stay unique


def iteration() -> int:
    """The iteration that Megatron runs (0 is the first), -1 before training."""
    variables = sys.modules.get("megatron.training.global_vars")
    args = getattr(variables, "_GLOBAL_ARGS", None)
    return getattr(args, "curr_iteration", -1)


def callers() -> list[str]:
    """Functions on the stack, innermost first."""
    return [
        f"{Path(frame.f_code.co_filename).name}:{frame.f_code.co_qualname}"
        for frame, _ in traceback.walk_stack(sys._getframe(2))
    ]


def trace_call(name: str) -> None:
    original = getattr(dist.ProcessGroup, name)

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        event = {
            "call": name,
            "iteration": iteration(),
            "ranks": dist.get_process_group_ranks(self),
            "callers": callers(),
            "waits": [],
        }
        events.append(event)
        work = original(self, *args, **kwargs)
        works.append((work, event))
        return work

    setattr(dist.ProcessGroup, name, call)


def trace_waits() -> None:
    for name in ("wait", "synchronize"):
        original = getattr(dist.Work, name)

        def wait(self: Any, *args: Any, _original: Any = original, **kwargs: Any) -> Any:
            for work, event in reversed(works):
                if work is self:
                    event["waits"].append(callers())
                    break
            return _original(self, *args, **kwargs)

        setattr(dist.Work, name, wait)


def add_collective_to_step() -> None:
    from megatron_async import hooks

    install = hooks.install

    def install_and_add() -> None:
        install()
        from megatron_async.update.deferred import DeferredUpdate

        original = DeferredUpdate._step

        @functools.wraps(original)
        def _step(*args: Any) -> bool:
            dist.all_reduce(torch.zeros(1))
            return original(*args)

        DeferredUpdate._step = _step  # type: ignore[method-assign, assignment]

    hooks.install = install_and_add


def main() -> None:
    if os.environ.get("TRACE_COLLECTIVE_IN_STEP"):
        add_collective_to_step()
    for name in dir(dist.ProcessGroup):
        if COMMUNICATION.search(name) and not name.startswith("__"):
            trace_call(name)
    trace_waits()
    from megatron_async.__main__ import main as launch

    try:
        launch(sys.argv[1:])
    finally:
        path = Path(os.environ["TRACE_DIR"]) / f"rank{os.environ['RANK']}.json"
        path.write_text(json.dumps(events))


main()
