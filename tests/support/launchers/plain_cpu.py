"""Runs SCRIPT with ARGS on CPU ranks: Megatron alone, none of the package's other hooks.

torchrun ... -m tests.support.launchers.plain_cpu SCRIPT ARGS
"""

import runpy
import sys
from pathlib import Path

from megatron_async import cpu_backend


def main() -> None:
    script = sys.argv[1]
    # As `python SCRIPT` would. It comes first so that a checkout of Megatron wins over a wheel.
    sys.path[0] = str(Path(script).resolve().parent)
    sys.argv = [script, *cpu_backend.apply_argument_defaults(sys.argv[2:])]
    cpu_backend.install()
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main()
