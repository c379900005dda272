"""From a command line to a run: which hooks it needs, and the checks on its flags."""

import argparse
import os
import sys

from megatron_async import validation
from megatron_async.arguments import AsyncConfig, add_arguments, set_defaults

__all__ = ["check_arguments", "flags_in"]


def flags_in(argv: list[str]) -> bool:
    """Whether a flag of this package stands on the command line, whatever its value."""
    parser = add_arguments(argparse.ArgumentParser(add_help=False, allow_abbrev=False))
    ours = {option for action in parser._actions for option in action.option_strings}
    return any(argument.partition("=")[0] in ours - {"--cpu"} for argument in argv)


def check_arguments(args: argparse.Namespace) -> None:
    """Adjust and check Megatron's arguments, right after its own ``validate_args``.

    Raises:
        SystemExit: the flags cannot be combined; rank 0 prints why, once.
    """
    rank = int(os.environ.get("RANK", "0"))
    notices = set_defaults(args)
    validation.enforce(args, rank=rank)
    if rank == 0:
        for notice in notices:
            print(f"megatron_async: {notice}", file=sys.stderr, flush=True)
    if AsyncConfig.from_args(args).log_bubble:
        from megatron_async import bubble

        bubble.enable()
