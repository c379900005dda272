"""The flags: what they are called, what they default to, and whether they are used."""

import argparse
from dataclasses import replace

import pytest

from megatron_async.config.arguments import add_arguments, used, used_in
from megatron_async.corrections import CORRECTIONS
from megatron_async.schedules import SCHEDULES, asynchronous_names
from tests.config.cases import DEFAULTS

# dest -> (arguments, value)
GIVEN: dict[str, tuple[list[str], object]] = {
    "cpu": (["--cpu"], True),
    "fused_cpu_kernels": (["--fused-cpu-kernels"], True),
    "pipeline_schedule": (["--pipeline-schedule", "pipedream-2bw"], "pipedream-2bw"),
    "delay_correction": (["--delay-correction", "error-feedback"], "error-feedback"),
    "delay_correction_strength": (["--delay-correction-strength", "0.5"], 0.5),
    "delay_correction_adaptive_strength": (["--delay-correction-adaptive-strength"], True),
    "delay_correction_momentum": (["--delay-correction-momentum", "0.9"], 0.9),
    "async_start_iteration": (["--async-start-iteration", "100"], 100),
    "deferred_update": (["--no-deferred-update"], False),
    "emulate_pipeline_stages": (["--emulate-pipeline-stages", "16"], 16),
    "delayed_microbatches": (["--delayed-microbatches", "5"], 5),
    "pipeline_extra_warmup": (["--pipeline-extra-warmup", "2"], 2),
    "log_fingerprints": (["--log-fingerprints", "prints"], "prints"),
    "grad_norm_scope": (["--grad-norm-scope", "stage"], "stage"),
    "log_pipeline_bubble": (["--log-pipeline-bubble"], True),
    "log_enqueues": (["--log-enqueues", "enqueues"], "enqueues"),
    "second_grad_buffer": (["--second-grad-buffer"], True),
    "ddp_bucket_all_stages": (["--ddp-bucket-all-stages"], True),
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


def test_help_names_the_schedules_and_corrections_that_are_registered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def text() -> str:
        parser = argparse.ArgumentParser(formatter_class=argparse.RawTextHelpFormatter)
        return add_arguments(parser).format_help()

    for name in (*asynchronous_names(), *CORRECTIONS.names):
        assert name in text()
    zigzag = replace(SCHEDULES["fresh-2bw"], name="zigzag", help="goes to and fro")
    magic = replace(CORRECTIONS["nesterov"], name="magic", summary="undoes the delay")
    monkeypatch.setattr(SCHEDULES, "_records", {"zigzag": zigzag})
    monkeypatch.setattr(CORRECTIONS, "_records", {"magic": magic})
    assert "'zigzag' goes to and fro. One of: default, zigzag." in text()
    assert "'magic' undoes the delay. " in text()
    assert "One of: none, magic." in text()


def test_megatrons_own_schedules_are_not_offered() -> None:
    assert {"1f1b", "interleaved"} <= set(SCHEDULES.names)
    assert not {"1f1b", "interleaved"} & set(asynchronous_names())


def test_the_number_of_delayed_microbatches_is_a_word_or_a_number() -> None:
    for text, value in (("fewest", "fewest"), ("all", "all"), ("7", 7)):
        assert parse("--delayed-microbatches", text).delayed_microbatches == value


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
        ["--delayed-microbatches", "some"],
        ["--pipeline-extra-warmup", "0.5"],
    ],
)
def test_values_of_the_wrong_type_end_the_run(
    argv: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        parse(*argv)
    assert argv[0] in capsys.readouterr().err
