"""From a command line to a run: which hooks it needs, and the checks on its flags."""

import argparse
import os
import sys
from dataclasses import replace

from megatron_async.config import validation
from megatron_async.config.arguments import add_arguments, used
from megatron_async.config.settings import set_defaults
from megatron_async.megatron.training import parsed_arguments
from megatron_async.optimizers import own_names, requested

__all__ = [
    "check_arguments",
    "check_command_line",
    "check_configs",
    "check_parsed",
    "flags_are_used",
    "flags_in",
    "flags_used",
]


def flags_in(argv: list[str]) -> bool:
    """Whether a flag (or an optimizer) of this package stands on the command line.

    Its value does not matter: Megatron's parser alone would not know the flag. ``--cpu`` and
    ``--fused-cpu-kernels`` do not count; the launcher reads them. ``--help`` does.
    """
    parser = add_arguments(argparse.ArgumentParser(add_help=False, allow_abbrev=False))
    ours = {option for action in parser._actions for option in action.option_strings}
    # Whoever asks for help wants to see them.
    counted = ours - {"--cpu", "--fused-cpu-kernels"} | {"--help", "-h"}
    return requested(argv) or any(argument.partition("=")[0] in counted for argument in argv)


def flags_used(args: argparse.Namespace) -> bool:
    """Whether parsed arguments differ from the defaults in a flag, or name an optimizer, of this
    package."""
    return used(args) or getattr(args, "optimizer", None) in own_names()


def flags_are_used() -> bool:
    """:func:`flags_used` for the arguments that Megatron has parsed in this process, if any."""
    args = parsed_arguments()
    return args is not None and flags_used(args)


def check_command_line(argv: list[str]) -> None:
    """Refuse what never gets to :func:`check_arguments`.

    Raises:
        SystemExit: ``--yaml-cfg``, whose settings Megatron checks in a way of its own.
    """
    if any(argument.partition("=")[0] == "--yaml-cfg" for argument in argv):
        validation.enforce(
            argparse.Namespace(yaml_cfg=True),
            replace(validation.Facts.current(), flags_given=True),
            rank=_rank(),
        )


def check_arguments(args: argparse.Namespace) -> None:
    """Adjust and check Megatron's arguments, right after its own ``validate_args``.

    Raises:
        SystemExit: the flags cannot be combined; rank 0 prints why, once.
    """
    notices = set_defaults(args)
    validation.enforce(args, rank=_rank())
    if _rank() == 0:
        for notice in [*notices, *validation.notes(args)]:
            print(f"megatron_async: {notice}", file=sys.stderr, flush=True)


def check_parsed(args: argparse.Namespace) -> None:
    """Check Megatron's arguments as they were parsed, right before its own ``validate_args``.

    Raises:
        SystemExit: as :func:`check_arguments`.
    """
    validation.enforce(args, parsed_only=True, rank=_rank(), warn=False)


def check_configs(args: argparse.Namespace, *configs: object) -> None:
    """Check what the script made of the arguments: the model's and the optimizer's configuration.

    Raises:
        SystemExit: as :func:`check_arguments`.
    """
    validation.enforce(args, configs=configs, rank=_rank(), warn=False)


def _rank() -> int:
    return int(os.environ.get("RANK", "0"))
