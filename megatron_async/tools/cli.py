"""The command ``megatron-async``: the tools beside the training itself."""

import importlib
import os
import signal
import sys
from collections.abc import Sequence

import megatron_async

__all__ = ["COMMANDS", "main"]

COMMANDS = {
    "demo": ("megatron_async.tools.demo", "train a small GPT four ways on two CPU ranks"),
    "data": ("megatron_async.tools.data", "write text as Megatron's .bin/.idx files"),
    "study": ("megatron_async.study.command", "what a delay costs: a grid of trainings, a report"),
    "plan": ("megatron_async.planning.plan", "memory and time of a model and layout"),
    "timeline": ("megatron_async.planning.timeline", "draw a schedule's order of actions"),
    "replay": ("megatron_async.replay.command", "show what a run on CPU ranks would do on GPUs"),
    "compare": ("megatron_async.tools.compare", "name where two runs part"),
    "gpu-check": ("megatron_async.gpu_check.command", "try the GPUs of this machine: a table"),
    "doctor": ("megatron_async.tools.doctor", "check the installation and say what to fix"),
}
"""Name of a command: the module whose ``main(argv)`` runs it, and what it does."""


def _usage() -> str:
    width = max(map(len, COMMANDS))
    lines = [f"  {name:{width}}  {text}" for name, (_, text) in COMMANDS.items()]
    return "\n".join(
        [
            "usage: megatron-async COMMAND [ARGS]",
            "",
            *lines,
            "",
            "megatron-async COMMAND --help says more. To train, start a script with the launcher:",
            "  torchrun [...] -m megatron_async SCRIPT ARGS",
        ]
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit status: 2 for a wrong command line.

    Args:
        argv: the command and its arguments; those of the process by default.
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    if argv[:1] in (["-h"], ["--help"]):
        print(_usage())
        return 0
    if argv[:1] == ["--version"]:
        print(f"megatron-async {megatron_async.__version__}")
        return 0
    if not argv or argv[0] not in COMMANDS:
        problem = f"there is no command {argv[0]}" if argv else "a command is missing"
        print(f"megatron-async: {problem}\n\n{_usage()}", file=sys.stderr)
        return 2
    module, _ = COMMANDS[argv[0]]
    # As an exception, so that commands end the processes that they have started.
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    # Imported here: most commands do without torch or Megatron, which take seconds to import.
    try:
        status = int(importlib.import_module(module).main(argv[1:]))
        sys.stdout.flush()
        return status
    except BrokenPipeError:
        # As after `megatron-async plan | head`. The interpreter flushes once more when it ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    except OSError as error:
        if error.filename is None:
            raise
        print(f"megatron-async {argv[0]}: {error.filename}: {error.strerror}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"\nmegatron-async {argv[0]}: interrupted", file=sys.stderr)
        return 130
    finally:
        signal.signal(signal.SIGTERM, before)


if __name__ == "__main__":
    sys.exit(main())
