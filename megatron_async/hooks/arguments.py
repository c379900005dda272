"""Megatron's command line: our flags beside its own, and the checks on all of them."""

import functools
import sys
from typing import Any

from megatron_async.hooks.row import hook, row

__all__ = ["ROWS", "checked", "with_flags"]

_ARGUMENTS = "megatron.training.arguments"


@hook
def with_flags(original: Any) -> Any:
    @functools.wraps(original)
    def add_megatron_arguments(parser: Any) -> Any:
        from megatron_async.config.arguments import add_arguments, mend_help
        from megatron_async.config.startup import check_command_line, flags_in
        from megatron_async.optimizers import add_optimizer_arguments

        if flags_in(sys.argv[1:]):
            check_command_line(sys.argv[1:])
        return mend_help(add_optimizer_arguments(add_arguments(original(parser))))

    return add_megatron_arguments


@hook
def checked(original: Any) -> Any:
    @functools.wraps(original)
    def validate_args(args: Any, *rest: Any, **kwargs: Any) -> Any:
        from megatron_async import hooks
        from megatron_async.config.settings import AsyncConfig
        from megatron_async.config.startup import check_arguments, check_parsed, flags_used
        from megatron_async.runtime.run import run

        check_parsed(args)
        result = original(args, *rest, **kwargs)
        check_arguments(args)
        if flags_used(args) and hooks.in_source():
            from megatron_async import cpu_backend

            # Nobody may have looked: no launcher is needed there.
            hooks.check_source()
            if args.cpu and not cpu_backend.installed():
                raise SystemExit(
                    "megatron_async: --cpu is read by the launcher, ahead of Megatron: put -m "
                    "megatron_async ahead of the script."
                )
        if AsyncConfig.from_args(args).log_bubble:
            from megatron_async.runtime.counters.bubble import BubbleLog

            run.bubble = BubbleLog()
        return result

    return validate_args


ROWS = (
    row(_ARGUMENTS, "add_megatron_arguments", with_flags, "the flags of this package"),
    row(
        _ARGUMENTS,
        "validate_args",
        checked,
        "the checks on the flags, before anything is built",
    ),
)
