"""The times of actions as flags of the commands that simulate or replay them."""

import argparse

from megatron_async.schedules.simulator import Costs

__all__ = ["add_cost_flags", "costs_of"]


def add_cost_flags(
    parser: argparse.ArgumentParser, *, message: str = "one message between stages"
) -> None:
    """Add the flags, in milliseconds; by default a forward takes 1, a backward 2, the rest nothing.

    Args:
        parser: the command's.
        message: what takes the latency.
    """
    for name, default, text in (
        ("--forward-ms", 1.0, "forward of a microbatch"),
        ("--backward-ms", 2.0, "its backward"),
        ("--optimizer-ms", 0.0, "optimizer step of a stage"),
        ("--latency-ms", 0.0, message),
        ("--reduction-ms", 0.0, "a batch's data-parallel reduction"),
        ("--gather-ms", 0.0, "a version's data-parallel gather"),
    ):
        parser.add_argument(name, type=float, default=default, help=text)


def costs_of(args: argparse.Namespace) -> Costs:
    """Return what those flags say."""
    return Costs(
        forward=args.forward_ms,
        backward=args.backward_ms,
        optimizer=args.optimizer_ms,
        latency=args.latency_ms,
        reduction=args.reduction_ms,
        gather=args.gather_ms,
    )
