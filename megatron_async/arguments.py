"""The command-line flags of this package and the settings they make.

The flags live in one argparse group beside Megatron's own. What combinations of them and of
Megatron's flags make sense is decided in :mod:`megatron_async.validation`; here is only what they
are called and what they mean.
"""

import argparse
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, Final, Self

from megatron_async.corrections.catalogue import CATALOGUE, CorrectionKind

__all__ = [
    "CORRECTIONS",
    "DEFAULTS",
    "DEFAULT_SCHEDULE",
    "NO_CORRECTION",
    "PIPEDREAM",
    "SCHEDULES",
    "AsyncConfig",
    "add_arguments",
    "mend_help",
    "set_defaults",
    "used",
    "used_in",
]

DEFAULT_SCHEDULE: Final = "default"
PIPEDREAM: Final = "pipedream"
"""The schedule with weight stashing, whose delay differs between the stages."""
NO_CORRECTION: Final = "none"
SCHEDULES: Final[tuple[str, ...]] = (DEFAULT_SCHEDULE, "pipedream-2bw", PIPEDREAM)
CORRECTIONS: Final[tuple[str, ...]] = (NO_CORRECTION, *CATALOGUE)

# dest -> default of every flag. Megatron-only namespaces lack the attributes; they count as these.
DEFAULTS: Final[dict[str, object]] = {
    "cpu": False,
    "pipeline_schedule": DEFAULT_SCHEDULE,
    "delay_correction": NO_CORRECTION,
    "delay_correction_strength": 1.0,
    "delay_correction_adaptive_strength": False,
    "delay_correction_momentum": 0.99,
    "async_start_iteration": 0,
    "deferred_update": None,  # None: on with every asynchronous schedule but pipedream
    "emulate_pipeline_stages": None,
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
        "are one update old; 'pipedream' stashes weights, so that stage s of p has a delay of "
        f"p - 1 - s updates, and is there for comparisons. One of: {', '.join(schedules)}.",
    )
    group.add_argument(
        "--delay-correction",
        type=str,
        default=DEFAULTS["delay_correction"],
        metavar="NAME",
        help="Correction of the update for the delay of its gradient. "
        + "; ".join(f"'{kind.name}' {kind.summary}" for kind in CATALOGUE.values())
        + ". Each keeps one buffer of the main parameters' size. "
        f"One of: {', '.join(corrections)}.",
    )
    group.add_argument(
        "--delay-correction-strength",
        type=float,
        default=DEFAULTS["delay_correction_strength"],
        metavar="LAMBDA",
        help="Factor of the delay correction. 0 leaves the update as it is.",
    )
    group.add_argument(
        "--delay-correction-adaptive-strength",
        action="store_true",
        help="Adapt the strength to each element and update, with --delay-correction-strength as "
        "the scale. Error feedback then looks ahead only as far as successive updates agree; delay "
        "compensation divides by the gradient's root mean square. Takes one more buffer.",
    )
    group.add_argument(
        "--delay-correction-momentum",
        type=float,
        default=DEFAULTS["delay_correction_momentum"],
        metavar="GAMMA",
        help="Momentum of --delay-correction nesterov.",
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
        "stage waits for a collective across stages. On by default with pipedream-2bw; "
        "--no-deferred-update keeps the step at the end of the iteration, as pipedream always "
        "does.",
    )
    group.add_argument(
        "--emulate-pipeline-stages",
        type=int,
        default=DEFAULTS["emulate_pipeline_stages"],
        metavar="P",
        help="With --pipeline-schedule pipedream and one pipeline stage: give each layer the delay "
        "that it would have in a pipeline of P stages, so that such a pipeline's training can be "
        "studied on one device. Changes nothing with pipedream-2bw, whose delay is one update for "
        "any number of stages.",
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
    asynchronous schedule other than pipedream and off with Megatron's.
    """

    cpu: bool = False
    schedule: str = DEFAULT_SCHEDULE
    correction: str = NO_CORRECTION
    correction_strength: float = 1.0
    correction_adapts: bool = False
    correction_momentum: float = 0.99
    start_iteration: int = 0
    deferred_update: bool = False
    grad_norm_scope: str = "global"
    log_bubble: bool = False
    second_grad_buffer: bool = False
    emulated_stages: int | None = None

    @classmethod
    def from_args(cls, args: argparse.Namespace) -> Self:
        """Read the settings from a namespace; attributes it lacks have their defaults."""
        values: dict[str, Any] = {
            dest: getattr(args, dest, default) for dest, default in DEFAULTS.items()
        }
        deferred = values["deferred_update"]
        deferrable = values["pipeline_schedule"] not in (DEFAULT_SCHEDULE, PIPEDREAM)
        return cls(
            cpu=values["cpu"],
            schedule=values["pipeline_schedule"],
            correction=values["delay_correction"],
            correction_strength=values["delay_correction_strength"],
            correction_adapts=values["delay_correction_adaptive_strength"],
            correction_momentum=values["delay_correction_momentum"],
            start_iteration=values["async_start_iteration"],
            deferred_update=deferrable if deferred is None else deferred,
            grad_norm_scope=values["grad_norm_scope"],
            log_bubble=values["log_pipeline_bubble"],
            second_grad_buffer=values["second_grad_buffer"],
            emulated_stages=values["emulate_pipeline_stages"],
        )

    @property
    def asynchronous(self) -> bool:
        """Whether the schedule is another than Megatron's own selection."""
        return self.schedule != DEFAULT_SCHEDULE

    @property
    def emulated_pipeline(self) -> int | None:
        """P, if one pipeline stage trains with the delays of P of them."""
        return self.emulated_stages if self.schedule == PIPEDREAM else None

    @property
    def corrected(self) -> bool:
        """Whether a delay correction is on."""
        return self.correction != NO_CORRECTION

    @property
    def correction_kind(self) -> CorrectionKind | None:
        """What is known of the correction; None without one, or with an unknown one."""
        return CATALOGUE.get(self.correction)

    @property
    def correction_label(self) -> str:
        """The correction and what decides which buffers it keeps."""
        return f"{self.correction}{' with adaptive strength' if self.correction_adapts else ''}"


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
    if config.schedule == PIPEDREAM and args.deferred_update is None:
        notices.append(
            f"--no-deferred-update is set: with --pipeline-schedule {PIPEDREAM} the last stage has "
            "no delay, so its next forward needs the update."
        )
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
