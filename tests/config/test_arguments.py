"""The flags: what they are called, what they default to, and the settings made of them."""

import argparse
import dataclasses

import pytest

from megatron_async.config.arguments import (
    CORRECTIONS,
    DEFAULTS,
    SCHEDULES,
    AsyncConfig,
    add_arguments,
    set_defaults,
    used,
    used_in,
)

# dest -> (arguments, value)
GIVEN: dict[str, tuple[list[str], object]] = {
    "cpu": (["--cpu"], True),
    "pipeline_schedule": (["--pipeline-schedule", "pipedream-2bw"], "pipedream-2bw"),
    "delay_correction": (["--delay-correction", "error-feedback"], "error-feedback"),
    "delay_correction_strength": (["--delay-correction-strength", "0.5"], 0.5),
    "delay_correction_adaptive_strength": (["--delay-correction-adaptive-strength"], True),
    "delay_correction_momentum": (["--delay-correction-momentum", "0.9"], 0.9),
    "async_start_iteration": (["--async-start-iteration", "100"], 100),
    "deferred_update": (["--no-deferred-update"], False),
    "emulate_pipeline_stages": (["--emulate-pipeline-stages", "16"], 16),
    "grad_norm_scope": (["--grad-norm-scope", "stage"], "stage"),
    "log_pipeline_bubble": (["--log-pipeline-bubble"], True),
    "second_grad_buffer": (["--second-grad-buffer"], True),
}


def parse(*argv: str) -> argparse.Namespace:
    return add_arguments(argparse.ArgumentParser(allow_abbrev=False)).parse_args(argv)


def test_flags_have_the_defaults_of_the_table_and_no_others() -> None:
    assert vars(parse()) == DEFAULTS
    assert set(GIVEN) == set(DEFAULTS)


@pytest.mark.parametrize("dest", GIVEN)
def test_a_given_flag_is_read_and_counts_as_used(dest: str) -> None:
    argv, value = GIVEN[dest]
    args = parse(*argv)
    assert vars(args) == DEFAULTS | {dest: value}
    assert used(args)
    assert used_in(["--num-layers", "8", *argv, "--seed", "1"])


def test_nothing_is_used_without_a_flag() -> None:
    assert not used(parse())
    assert not used(argparse.Namespace(num_layers=8))  # a namespace of Megatron's own
    assert not used_in(["--num-layers", "8", "--data-path", "cpu", "--use-cpu-initialization"])
    assert not used_in(["--pipeline-schedule", "default"])


def test_abbreviations_are_not_taken() -> None:
    assert not used_in(["--pipeline-sched", "pipedream-2bw"])


def test_help_names_the_schedules_and_corrections() -> None:
    parser = argparse.ArgumentParser(formatter_class=argparse.RawTextHelpFormatter)
    text = add_arguments(parser, schedules=["default", "zigzag"], corrections=["none", "magic"])
    assert "One of: default, zigzag." in text.format_help()
    assert "One of: none, magic." in text.format_help()
    for name in (*SCHEDULES, *CORRECTIONS):
        assert name in add_arguments(argparse.ArgumentParser()).format_help()


def test_flags_stand_beside_megatrons_in_a_group_of_their_own() -> None:
    from megatron.training.arguments import add_megatron_arguments

    megatron = add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))
    theirs = {action.dest for action in megatron._actions}
    parser = add_arguments(megatron)  # argparse refuses a flag that is taken
    assert parser is megatron
    assert theirs.isdisjoint(DEFAULTS)
    (group,) = [group for group in parser._action_groups if group.title == "megatron_async"]
    assert {action.dest for action in group._group_actions} == set(DEFAULTS)
    assert all(action.help for action in group._group_actions)


@pytest.mark.parametrize(
    "argv",
    [
        ["--delay-correction-strength", "strong"],
        ["--delay-correction-momentum", "high"],
        ["--async-start-iteration", "1.5"],
        ["--emulate-pipeline-stages", "many"],
        ["--grad-norm-scope", "tensor"],
    ],
)
def test_values_of_the_wrong_type_end_the_run(
    argv: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        parse(*argv)
    assert argv[0] in capsys.readouterr().err


def test_settings_of_a_namespace_without_the_flags() -> None:
    config = AsyncConfig.from_args(argparse.Namespace())
    assert config == AsyncConfig() == AsyncConfig.from_args(parse())
    assert not config.asynchronous
    assert not config.corrected
    assert not config.deferred_update


def test_settings_of_every_flag() -> None:
    argv = [argument for arguments, _ in GIVEN.values() for argument in arguments]
    config = AsyncConfig.from_args(parse(*argv))
    assert config == AsyncConfig(
        cpu=True,
        schedule="pipedream-2bw",
        correction="error-feedback",
        correction_strength=0.5,
        correction_adapts=True,
        correction_momentum=0.9,
        start_iteration=100,
        deferred_update=False,
        grad_norm_scope="stage",
        log_bubble=True,
        second_grad_buffer=True,
        emulated_stages=16,
    )
    assert config.asynchronous
    assert config.corrected
    assert config.correction_label == "error-feedback with adaptive strength"
    assert config.correction_kind is not None
    assert config.correction_kind.name == "error-feedback"
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.cpu = False  # type: ignore[misc]


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


def test_stages_are_emulated_with_pipedream_alone() -> None:
    stages = ["--emulate-pipeline-stages", "8"]
    pipedream = parse("--pipeline-schedule", "pipedream", *stages)
    assert AsyncConfig.from_args(pipedream).emulated_pipeline == 8
    two_versions = parse("--pipeline-schedule", "pipedream-2bw", *stages)
    assert AsyncConfig.from_args(two_versions).emulated_pipeline is None
    assert AsyncConfig.from_args(two_versions).emulated_stages == 8


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
