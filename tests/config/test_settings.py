"""The settings made of the flags, and what they change of Megatron's."""

import argparse
import dataclasses

import pytest

from megatron_async.config.settings import AsyncConfig, set_defaults
from megatron_async.corrections import CORRECTIONS
from megatron_async.schedules.emulation import EMULATE_PIPELINE_STAGES
from megatron_async.schedules.fresh_2bw import DELAYED_MICROBATCHES
from megatron_async.schedules.pipedream_2bw import PIPEDREAM_2BW
from megatron_async.schedules.schedule import Pipeline
from tests.config.test_arguments import GIVEN, parse


def test_settings_of_a_namespace_without_the_flags() -> None:
    config = AsyncConfig.from_args(argparse.Namespace())
    of_schedules = {"emulate_pipeline_stages": None, "delayed_microbatches": "fewest"}
    assert config == AsyncConfig(schedule_flags=of_schedules) == AsyncConfig.from_args(parse())
    assert not config.asynchronous
    assert not config.corrected
    assert not config.deferred_update


def test_settings_of_every_flag() -> None:
    argv = [argument for arguments, _ in GIVEN.values() for argument in arguments]
    config = AsyncConfig.from_args(parse(*argv))
    assert config == AsyncConfig(
        cpu=True,
        schedule="pipedream-2bw",
        schedule_flags={"emulate_pipeline_stages": 16, "delayed_microbatches": 5},
        correction="error-feedback",
        correction_settings={
            "delay_correction_strength": 0.5,
            "delay_correction_adaptive_strength": True,
        },
        start_iteration=100,
        deferred_update=False,
        grad_norm_scope="stage",
        log_bubble=True,
        log_fingerprints="prints",
        log_enqueues="enqueues",
        second_grad_buffer=True,
        bucket_all_stages=True,
        extra_warmup=2,
    )
    assert config.asynchronous
    assert config.corrected
    assert config.schedule_record is PIPEDREAM_2BW
    assert config.correction_label == "error-feedback with adaptive strength"
    assert config.correction_record is CORRECTIONS["error-feedback"]
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.cpu = False  # type: ignore[misc]


def test_what_the_lists_of_a_run_are_made_for() -> None:
    argv = [argument for arguments, _ in GIVEN.values() for argument in arguments]
    pipeline = AsyncConfig.from_args(parse(*argv)).pipeline(stages=4, gather_ahead=True, replicas=2)
    assert pipeline == Pipeline(
        stages=4,
        deferred=False,
        gather_ahead=True,
        reduce_late=True,
        replicas=2,
        extra_warmup=2,
        flags={"emulate_pipeline_stages": 16, "delayed_microbatches": 5},
    )
    assert pipeline.value(EMULATE_PIPELINE_STAGES) == 16
    assert Pipeline(stages=4).value(DELAYED_MICROBATCHES) == "fewest"


def test_unknown_names_have_no_record() -> None:
    config = AsyncConfig(schedule="zigzag", correction="magic")
    assert (config.schedule_record, config.correction_record) == (None, None)
    assert config.asynchronous
    assert config.corrected
    assert config.correction_label == "magic"
    # Megatron's own schedules are no choice.
    assert AsyncConfig(schedule="1f1b").schedule_record is None


@pytest.mark.parametrize(
    ("argv", "deferred"),
    [
        ([], False),
        (["--pipeline-schedule", "pipedream-2bw"], True),
        (["--pipeline-schedule", "pipedream-2bw", "--deferred-update"], True),
        (["--pipeline-schedule", "pipedream-2bw", "--no-deferred-update"], False),
        (["--pipeline-schedule", "pipedream"], False),
        (["--pipeline-schedule", "pipedream", "--deferred-update"], True),  # which is refused
    ],
)
def test_the_update_is_deferred_by_default_where_the_schedule_is_asynchronous(
    argv: list[str], deferred: bool
) -> None:
    args = parse(*argv)
    assert AsyncConfig.from_args(args).deferred_update is deferred
    args.rerun_mode = "disabled"
    set_defaults(args)
    assert AsyncConfig.from_args(args).deferred_update is deferred


def test_the_update_of_pipedream_is_not_deferred_with_a_notice() -> None:
    args = parse("--pipeline-schedule", "pipedream")
    args.rerun_mode = "disabled"
    (notice,) = set_defaults(args)
    assert "--no-deferred-update" in notice
    assert set_defaults(args) == []
    given = parse("--pipeline-schedule", "pipedream", "--no-deferred-update")
    given.rerun_mode = "disabled"
    assert set_defaults(given) == []


def test_a_schedules_own_flags_reach_it() -> None:
    args = parse("--pipeline-schedule", "pipedream", "--emulate-pipeline-stages", "8")
    config = AsyncConfig.from_args(args)
    assert config.schedule_record is not None
    assert config.schedule_record.emulated_stages(config.pipeline(stages=1)) == 8
    assert PIPEDREAM_2BW.emulated_stages(config.pipeline(stages=1)) is None


def test_reruns_are_disabled_with_a_notice() -> None:
    args = parse("--pipeline-schedule", "pipedream-2bw")
    args.rerun_mode = "validate_results"
    (notice,) = set_defaults(args)
    assert args.rerun_mode == "disabled"
    assert "--rerun-mode disabled" in notice
    assert "pipedream-2bw" in notice
    assert set_defaults(args) == []


def test_other_settings_of_reruns_are_left_to_the_checks() -> None:
    args = parse("--pipeline-schedule", "pipedream-2bw")
    args.rerun_mode = "report_stats"
    assert set_defaults(args) == []
    assert args.rerun_mode == "report_stats"


def test_nothing_is_adjusted_with_the_default_schedule() -> None:
    args = parse("--log-pipeline-bubble", "--cpu")
    args.rerun_mode = "validate_results"
    before = dict(vars(args))
    assert set_defaults(args) == []
    assert vars(args) == before
