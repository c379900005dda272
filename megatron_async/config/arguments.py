"""The command-line flags of this package.

They live in one argparse group beside Megatron's own: those that every run has, and those that
belong to a schedule or a correction. What combinations of them and of Megatron's flags make sense
is decided in :mod:`megatron_async.config.validation`; here is only what they are called and what
they mean.
"""

import argparse
from collections.abc import Mapping, Sequence

from megatron_async.corrections import CORRECTIONS, NO_CORRECTION
from megatron_async.registry import Flag
from megatron_async.schedules import DEFAULT, SCHEDULES, asynchronous_names

__all__ = ["add_arguments", "flags", "mend_help", "used", "used_in"]


def _schedule_help() -> str:
    parts = [f"'{each.name}' {each.help}" for each in SCHEDULES if each.asynchronous]
    return (
        f"Pipeline schedule. '{DEFAULT}' is Megatron's own choice between no pipelining, 1F1B and "
        f"interleaved 1F1B; {'; '.join(parts)}. One of: {', '.join(asynchronous_names())}."
    )


def _correction_help() -> str:
    parts = [f"'{each.name}' {each.summary}" for each in CORRECTIONS]
    return (
        f"Correction of the update for the delay of its gradient. {'; '.join(parts)}. Each keeps "
        f"one buffer of the main parameters' size, or two with an adaptive strength. One of: "
        f"{', '.join(CORRECTIONS.names)}."
    )


def _own_flags() -> tuple[Flag, ...]:
    # Names of schedules and corrections are not checked by argparse, which would print its usage
    # once per rank, but with all other checks.
    return (
        Flag(
            name="--cpu",
            switch=True,
            default=False,
            help="Run on CPU ranks over gloo, to debug a run on a machine without a GPU. Read by "
            "the launcher before Megatron is imported.",
        ),
        Flag(
            name="--fused-cpu-kernels",
            switch=True,
            default=False,
            help="With --cpu: attention, cross entropy and linear layers as torch's fused "
            "operators, for small models whose time goes into calling operators. Losses agree with "
            "Megatron's own to rounding. Give --no-create-attention-mask-in-dataloader as well.",
        ),
        Flag(
            name="--pipeline-schedule",
            default=DEFAULT,
            metavar="NAME",
            help=_schedule_help(),
        ),
        Flag(
            name="--delay-correction",
            default=NO_CORRECTION,
            metavar="NAME",
            help=_correction_help(),
        ),
        Flag(
            name="--async-start-iteration",
            parse=int,
            default=0,
            metavar="N",
            help="Train synchronously for the first N iterations, then asynchronously.",
            fits=lambda iteration: iteration >= 0,
            takes="an integer >= 0",
        ),
        Flag(
            name="--deferred-update",
            switch=True,
            negatable=True,
            default=None,  # on where the schedule can
            help="Complete the optimizer step of a batch while the next batch is computed, so that "
            "no stage waits for a collective across stages. On by default where the schedule has "
            "room for it; --no-deferred-update keeps the step at the end of the iteration.",
        ),
        Flag(
            name="--grad-norm-scope",
            choices=("global", "stage"),
            default="global",
            help="Parameters over which the gradient norm for clipping is taken: all of the "
            "model's, or those of the pipeline stage alone.",
        ),
        Flag(
            name="--log-pipeline-bubble",
            switch=True,
            default=False,
            help="Log the share of the iteration that the stages spent waiting for others: in "
            "point-to-point receives, for the update, and for data. Works with every schedule.",
        ),
        Flag(
            name="--pipeline-extra-warmup",
            parse=int,
            default=0,
            metavar="E",
            help="Microbatches that the first stage has in flight beside those of 1F1B, at most "
            "one fewer than stages; the others in proportion. Hides late messages on E of the "
            "links between stages: those between E + 1 nodes with as many stages each, or with the "
            "largest E all of them. Costs E more microbatches of activations on the first stage, "
            "and with fresh-2bw E more that are delayed.",
            fits=lambda extra: extra >= 0,
            takes="a number of microbatches, 0 or more",
        ),
        Flag(
            name="--log-fingerprints",
            metavar="DIR",
            help="Write hashes and norms of gradients, weights, optimizer state and random state "
            "of every update to DIR, a file for each rank, for `megatron-async compare`. Works "
            "with every schedule, and slows the run down.",
        ),
        Flag(
            name="--log-enqueues",
            metavar="DIR",
            help="With --cpu: write what each rank would enqueue on a GPU (kernels, collectives, "
            "events, waits) to DIR, a file for each rank, for `megatron-async replay`. Works with "
            "every schedule, and slows the run down.",
        ),
        Flag(
            name="--second-grad-buffer",
            switch=True,
            default=False,
            help="Keep a second full-size gradient buffer, so that the data-parallel reduction of "
            "a batch runs wholly under the next batch. Costs 4 bytes per parameter in fp32.",
        ),
        Flag(
            name="--ddp-bucket-all-stages",
            switch=True,
            default=False,
            help="With --overlap-grad-reduce: reduce gradients bucket by bucket on every pipeline "
            "stage. Megatron does so on the first one alone, and on the others reduces all at the "
            "end, where a synchronous schedule has a bubble and an asynchronous one has none. "
            "Slower with CUDA_DEVICE_MAX_CONNECTIONS=1, see docs/gpu.md.",
        ),
    )


def flags() -> Mapping[str, Flag]:
    """Return all flags by their ``dest``: of every run, of the schedules, of the corrections."""
    own = {flag.dest: flag for flag in _own_flags()}
    return {**own, **SCHEDULES.flags, **CORRECTIONS.flags}


def add_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add the flags to ``parser``, in a group named ``megatron_async``.

    The signature is that of Megatron's ``extra_args_provider``.

    Args:
        parser: Megatron's parser, or an empty one.

    Returns:
        The same parser.
    """
    group = parser.add_argument_group(title="megatron_async")
    for flag in flags().values():
        flag.add_to(group)
    return parser


def used(args: argparse.Namespace) -> bool:
    """Whether any flag of this package differs from its default.

    Without one, a run has to be Megatron's own in every byte. Megatron-only namespaces lack the
    attributes; they count as the defaults.
    """
    return any(getattr(args, dest, flag.default) != flag.default for dest, flag in flags().items())


def used_in(argv: Sequence[str]) -> bool:
    """:func:`used` for a command line that Megatron has not parsed yet.

    Args:
        argv: the training script's arguments, without its name.

    Raises:
        SystemExit: a flag of this package has a value of the wrong type; argparse prints it.
    """
    parser = argparse.ArgumentParser(prog="megatron_async", add_help=False, allow_abbrev=False)
    return used(add_arguments(parser).parse_known_args(argv)[0])


def mend_help(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Let ``--help`` print help texts with a bare per cent sign, as one of Megatron 0.19's.

    argparse takes it for the beginning of a format, and ends in a ValueError.

    Returns:
        The same parser.
    """
    formatter = parser._get_formatter()
    for action in parser._actions:
        if action.help and action.help is not argparse.SUPPRESS:
            try:
                formatter._expand_help(action)
            except (ValueError, TypeError, KeyError):
                action.help = action.help.replace("%", "%%")
    return parser
