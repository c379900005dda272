"""The launcher: ``torchrun ... -m megatron_async SCRIPT ARGS``.

It installs what the command line asks for and runs SCRIPT as ``__main__``. Without a flag of this
package on the command line nothing at all is replaced, and with ``--cpu`` alone only what runs
Megatron on CPU ranks.
"""

import runpy
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megatron_async.replay.recorder import Recorder

__all__ = ["main"]

_USAGE = """\
usage: torchrun [...] -m megatron_async [--cpu [--fused-cpu-kernels]] SCRIPT [ARGS]

Runs a Megatron training script (such as pretrain_gpt.py of a Megatron-LM checkout) with the flags
of megatron_async among its ARGS. --cpu and --fused-cpu-kernels may stand anywhere."""

_FUSED = "--fused-cpu-kernels"


def main(argv: list[str]) -> None:
    """Run a training script.

    Args:
        argv: the script's path and its arguments; ``--cpu`` and ``--fused-cpu-kernels`` may stand
            anywhere.

    Raises:
        SystemExit: no script was named, or it does not exist.
    """
    on_cpu, fused = "--cpu" in argv, _FUSED in argv
    argv = [argument for argument in argv if argument not in ("--cpu", _FUSED)]
    if fused and not on_cpu:
        raise SystemExit(f"megatron_async: {_FUSED} is for CPU ranks: add --cpu, or drop it")
    if not argv or argv[0] in ("-h", "--help"):
        raise SystemExit(_USAGE)
    script = Path(argv[0])
    if argv[0].startswith("-"):
        raise SystemExit(
            f"megatron_async: the script comes first, and {argv[0]} behind it\n\n{_USAGE}"
        )
    if not script.is_file():
        what = "is no script but a folder" if script.is_dir() else "does not exist"
        raise SystemExit(f"megatron_async: {script} {what}\n\n{_USAGE}")
    # As `python SCRIPT` has it: the script's folder comes first, not the current one. So a script
    # in a checkout of Megatron-LM runs with the Megatron of that checkout.
    sys.path.insert(0, str(script.resolve().parent))
    recorder: Recorder | None = None
    if on_cpu:
        from megatron_async import cpu_backend

        try:
            argv[1:] = cpu_backend.apply_argument_defaults(argv[1:])
        except ValueError as error:
            raise SystemExit(f"megatron_async: {error}") from None
        cpu_backend.install()
        if fused:
            cpu_backend.install_fused_kernels()
        recorder = _record(argv[1:])
    from megatron_async.config.startup import check_command_line, flags_in

    if flags_in(argv[1:]):
        check_command_line(argv[1:])
        from megatron_async import hooks

        hooks.install()
        if recorder is not None:
            from megatron_async.replay import record

            record.mark_actions(recorder)
        if on_cpu:
            # Megatron's parser knows the flags now, and prints them among the arguments.
            argv.append("--cpu")
            argv += [_FUSED] if fused else []
    sys.argv = argv
    runpy.run_path(str(script), run_name="__main__")


def _record(argv: list[str]) -> "Recorder | None":
    """Begin to record what is enqueued, if the command line asks for it."""
    from megatron_async.replay import record

    directory = record.directory_in(argv)
    return None if directory is None else record.install(Path(directory))


if __name__ == "__main__":
    main(sys.argv[1:])
