"""The command-line flags of this package and the settings they make.

The flags live in one argparse group beside Megatron's own. What combinations of them and of
Megatron's flags make sense is decided in :mod:`megatron_async.validation`; here is only what they
are called and what they mean.
"""

import argparse
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, Final, Self

__all__ = [
    "CORRECTIONS",
    "DEFAULTS",
    "DEFAULT_SCHEDULE",
    "NO_CORRECTION",
    "SCHEDULES",
    "AsyncConfig",
    "add_arguments",
    "set_defaults",
    "used",
    "used_in",
]

DEFAULT_SCHEDULE: Final = "default"
NO_CORRECTION: Final = "none"
SCHEDULES: Final[tuple[str, ...]] = (DEFAULT_SCHEDULE, "pipedream-2bw")
CORRECTIONS: Final[tuple[str, ...]] = (NO_CORRECTION, "error-feedback")

# dest -> default of every flag. Megatron-only namespaces lack the attributes; they count as these.
DEFAULTS: Final[dict[str, object]] = {
    "cpu": False,
    "pipeline_schedule": DEFAULT_SCHEDULE,
    "delay_correction": NO_CORRECTION,
    "delay_correction_strength": 1.0,
    "async_start_iteration": 0,
    "deferred_update": None,  # None: on with every asynchronous schedule
    "grad_norm_scope": "global",
    "log_pipeline_bubble": False,
    "second_grad_buffer": False,
}


def add_arguments(
    parser: argparse.ArgumentParser,
    *,
    schedules: Collection[str] = SCHEDULES,
    corrections: Collection[str] = CORRECTIONS,
) -> argparse.ArgumentParser:
    """Add the flags to ``parser``, in a group named ``megatron_async``.

    The signature is that of Megatron's ``extra_args_provider``. Names of schedules and corrections
    are not checked by argparse, which would print its usage once per rank, but by
    :func:`megatron_async.validation.check`.

    Args:
        parser: Megatron's parser, or an empty one.
        schedules: names shown in the help of ``--pipeline-schedule``.
        corrections: names shown in the help of ``--delay-correction``.

    Returns:
        The same parser.
    """
    group = parser.add_argument_group(title="megatron_async")
    group.add_argument(
        "--cpu",
        action="store_true",
        help="Run on CPU ranks over gloo, to debug a run on a machine without a GPU. Read by the "
        "launcher before Megatron is imported.",
    )
    group.add_argument(
        "--pipeline-schedule",
        type=str,
        default=DEFAULTS["pipeline_schedule"],
        metavar="NAME",
        help="Pipeline schedule. 'default' is Megatron's own choice between no pipelining, 1F1B "
        "and interleaved 1F1B; 'pipedream-2bw' runs without a pipeline flush, on weights that "
        f"are one update old. One of: {', '.join(schedules)}.",
    )
    group.add_argument(
        "--delay-correction",
        type=str,
        default=DEFAULTS["delay_correction"],
        metavar="NAME",
        help="Correction of the update for the delay of its gradient. 'error-feedback' adds the "
        "difference between this update and the last one; it keeps one buffer of the main "
        f"parameters' size. One of: {', '.join(corrections)}.",
    )
    group.add_argument(
        "--delay-correction-strength",
        type=float,
        default=DEFAULTS["delay_correction_strength"],
        metavar="LAMBDA",
        help="Factor of the delay correction. 0 leaves the update as it is.",
    )
    group.add_argument(
        "--async-start-iteration",
        type=int,
        default=DEFAULTS["async_start_iteration"],
        metavar="N",
        help="Train synchronously for the first N iterations, then asynchronously.",
    )
    group.add_argument(
        "--deferred-update",
        action=argparse.BooleanOptionalAction,
        default=DEFAULTS["deferred_update"],
        help="Complete the optimizer step of a batch while the next batch is computed, so that no "
        "stage waits for a collective across stages. On by default with an asynchronous schedule; "
        "--no-deferred-update keeps the step at the end of the iteration.",
    )
    group.add_argument(
        "--grad-norm-scope",
        choices=("global", "stage"),
        default=DEFAULTS["grad_norm_scope"],
        help="Parameters over which the gradient norm for clipping is taken: all of the model's, "
        "or those of the pipeline stage alone.",
    )
    group.add_argument(
        "--log-pipeline-bubble",
        action="store_true",
        help="Log the share of the iteration that the stages spent waiting for others: in "
        "point-to-point receives, for the update, and for data. Works with every schedule.",
    )
    group.add_argument(
        "--second-grad-buffer",
        action="store_true",
        help="Keep a second full-size gradient buffer, so that the data-parallel reduction of a "
        "batch runs wholly under the next batch. Costs 4 bytes per parameter in fp32.",
    )
    return parser


def used(args: argparse.Namespace) -> bool:
    """Whether any flag of this package differs from its default.

    Without one, a run has to be Megatron's own in every byte.
    """
    return any(getattr(args, dest, default) != default for dest, default in DEFAULTS.items())


def used_in(argv: Sequence[str]) -> bool:
    """:func:`used` for a command line that Megatron has not parsed yet.

    Args:
        argv: the training script's arguments, without its name.

    Raises:
        SystemExit: a flag of this package has a value of the wrong type; argparse prints it.
    """
    parser = argparse.ArgumentParser(prog="megatron_async", add_help=False, allow_abbrev=False)
    return used(add_arguments(parser).parse_known_args(argv)[0])


@dataclass(frozen=True, kw_only=True)
class AsyncConfig:
    """The settings, once Megatron's arguments are parsed.

    ``deferred_update`` is resolved here: where neither form of the flag was given it is on with an
    asynchronous schedule and off with Megatron's.
    """

    cpu: bool = False
    schedule: str = DEFAULT_SCHEDULE
    correction: str = NO_CORRECTION
    correction_strength: float = 1.0
    start_iteration: int = 0
    deferred_update: bool = False
    grad_norm_scope: str = "global"
    log_bubble: bool = False
    second_grad_buffer: bool = False

    @classmethod
    def from_args(cls, args: argparse.Namespace) -> Self:
        """Read the settings from a namespace; attributes it lacks have their defaults."""
        values: dict[str, Any] = {
            dest: getattr(args, dest, default) for dest, default in DEFAULTS.items()
        }
        deferred = values["deferred_update"]
        asynchronous = values["pipeline_schedule"] != DEFAULT_SCHEDULE
        return cls(
            cpu=values["cpu"],
            schedule=values["pipeline_schedule"],
            correction=values["delay_correction"],
            correction_strength=values["delay_correction_strength"],
            start_iteration=values["async_start_iteration"],
            deferred_update=asynchronous if deferred is None else deferred,
            grad_norm_scope=values["grad_norm_scope"],
            log_bubble=values["log_pipeline_bubble"],
            second_grad_buffer=values["second_grad_buffer"],
        )

    @property
    def asynchronous(self) -> bool:
        """Whether the schedule is another than Megatron's own selection."""
        return self.schedule != DEFAULT_SCHEDULE

    @property
    def corrected(self) -> bool:
        """Whether a delay correction is on."""
        return self.correction != NO_CORRECTION


def set_defaults(args: argparse.Namespace) -> list[str]:
    """Adjust Megatron's settings that an asynchronous schedule cannot run with.

    Called right after Megatron's ``validate_args`` and before anything reads the settings. With
    the default schedule nothing changes.

    Returns:
        One sentence for each adjustment, for rank 0 to print.
    """
    config = AsyncConfig.from_args(args)
    if not config.asynchronous:
        return []
    notices: list[str] = []
    args.deferred_update = config.deferred_update
    if args.rerun_mode == "validate_results":
        # Megatron's default: one all-reduce over all ranks in each iteration, to decide whether to
        # run the iteration again. A schedule that keeps state between iterations cannot do that.
        args.rerun_mode = "disabled"
        notices.append(
            f"--rerun-mode disabled is set: with --pipeline-schedule {config.schedule} an "
            "iteration cannot be run again, and the check waits for all stages."
        )
    return notices
