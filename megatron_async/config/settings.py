"""The settings that the flags make, and what they change of Megatron's."""

import argparse
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self

from megatron_async.config.arguments import flags
from megatron_async.corrections import CORRECTIONS, NO_CORRECTION, Correction
from megatron_async.schedules import DEFAULT, SCHEDULES, Schedule
from megatron_async.schedules.schedule import Pipeline

__all__ = ["AsyncConfig", "set_defaults"]


@dataclass(frozen=True, kw_only=True)
class AsyncConfig:
    """The settings, once Megatron's arguments are parsed.

    Attributes:
        schedule: name; with :data:`~megatron_async.schedules.DEFAULT` the run is synchronous.
        schedule_flags: the values of all schedules' own flags by their ``dest``.
        correction: name.
        correction_settings: the values of the correction's settings by their ``dest``.
        deferred_update: resolved: where neither form of the flag was given it is on with a schedule
            that can defer updates.
    """

    cpu: bool = False
    schedule: str = DEFAULT
    schedule_flags: Mapping[str, Any] = field(default_factory=dict)
    correction: str = NO_CORRECTION
    correction_settings: Mapping[str, Any] = field(default_factory=dict)
    start_iteration: int = 0
    deferred_update: bool = False
    grad_norm_scope: str = "global"
    log_bubble: bool = False
    log_fingerprints: str | None = None
    log_enqueues: str | None = None
    second_grad_buffer: bool = False
    bucket_all_stages: bool = False
    extra_warmup: int = 0

    @classmethod
    def from_args(cls, args: argparse.Namespace) -> Self:
        """Read the settings from a namespace; attributes it lacks have their defaults."""
        values = {dest: getattr(args, dest, flag.default) for dest, flag in flags().items()}
        schedule = SCHEDULES.get(values["pipeline_schedule"])
        correction = CORRECTIONS.get(values["delay_correction"])
        deferred = values["deferred_update"]
        if deferred is None:
            deferred = schedule is not None and schedule.asynchronous and schedule.deferrable
        return cls(
            cpu=values["cpu"],
            schedule=values["pipeline_schedule"],
            schedule_flags={dest: values[dest] for dest in SCHEDULES.flags},
            correction=values["delay_correction"],
            correction_settings={} if correction is None else correction.settings_in(args),
            start_iteration=values["async_start_iteration"],
            deferred_update=deferred,
            grad_norm_scope=values["grad_norm_scope"],
            log_bubble=values["log_pipeline_bubble"],
            log_fingerprints=values["log_fingerprints"],
            log_enqueues=values["log_enqueues"],
            second_grad_buffer=values["second_grad_buffer"],
            bucket_all_stages=values["ddp_bucket_all_stages"],
            extra_warmup=values["pipeline_extra_warmup"],
        )

    @property
    def asynchronous(self) -> bool:
        """Whether the schedule is another than Megatron's own selection."""
        return self.schedule != DEFAULT

    @property
    def schedule_record(self) -> Schedule | None:
        """The asynchronous schedule; None with Megatron's own, or with an unknown name."""
        record = SCHEDULES.get(self.schedule)
        return record if record is not None and record.asynchronous else None

    def pipeline(self, *, stages: int, gather_ahead: bool = False, replicas: int = 1) -> Pipeline:
        """Return what the schedule's lists are made for.

        Args:
            stages: p.
            gather_ahead: whether new versions are gathered under computation.
            replicas: ranks of a stage among which gradients are reduced.
        """
        return Pipeline(
            stages=stages,
            deferred=self.deferred_update,
            gather_ahead=gather_ahead,
            reduce_late=self.second_grad_buffer,
            replicas=replicas,
            extra_warmup=self.extra_warmup,
            flags=self.schedule_flags,
        )

    @property
    def corrected(self) -> bool:
        """Whether a delay correction is on."""
        return self.correction != NO_CORRECTION

    @property
    def correction_record(self) -> Correction | None:
        """What is known of the correction; None without one, or with an unknown one."""
        return CORRECTIONS.get(self.correction)

    @property
    def correction_label(self) -> str:
        """The correction and what decides which buffers it keeps."""
        record = self.correction_record
        return self.correction if record is None else record.label(self.correction_settings)


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
    record = config.schedule_record
    if record is not None and not record.deferrable and args.deferred_update is None:
        notices.append(
            f"--no-deferred-update is set: with --pipeline-schedule {record.name} the last stage "
            "has no delay, so its next forward needs the update."
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
