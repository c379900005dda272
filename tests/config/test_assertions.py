"""What Megatron ends at with a bare assertion is said ahead of it, with what to change."""

import argparse

import pytest

from megatron_async.config.validation import ArgumentError, Rule, assertions, check
from megatron_async.config.validation.assertions import RULES
from tests.config.cases import ASYNC, DEFAULTS, FACTS, LOCAL, PLAIN, parse

CASES: dict[str, list[str]] = {
    "undivided_layers": ["--num-layers", "6"],
    "layers_left": ["--decoder-first-pipeline-num-layers", "3"],
    "eval_interval": ["--eval-interval", "0"],
    "log_interval": ["--log-interval", "0"],
    "no_stages": ["--pipeline-model-parallel-size", "0"],
    "micro_batch_size": ["--micro-batch-size", "0"],
    "global_batch_size": ["--global-batch-size", "0"],
    "step_schedule": ["--step-batch-size-schedule", "0:4 8:8"],
    "long_warmup": ["--lr-warmup-iters", "20"],
    "save_interval": ["--save", "checkpoints"],
    "overlap_p2p_comm_warmup_flush_without_interleaving": [
        "--overlap-p2p-communication-warmup-flush"
    ],
    "overlap_param_gather_with_optimizer_step_without_interleaving": [
        "--overlap-param-gather-with-optimizer-step"
    ],
    "local_checkpoints_extension": [*LOCAL, "--non-persistent-local-ckpt-dir", "/disk"],
    "local_checkpoints_directory": LOCAL,
    "local_checkpoints_replication": ["--replication"],
}


def problems(args: argparse.Namespace) -> list[str]:
    try:
        check(args, FACTS, parsed_only=True)
    except ArgumentError as error:
        return list(error.problems)
    return []


def test_every_rule_has_a_case_and_a_name_of_its_own() -> None:
    assert [rule.name for rule in RULES] == list(CASES)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_rule_is_the_only_one_to_fire_and_says_what_to_change(
    parser: argparse.ArgumentParser, rule: Rule, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed = rule.name != "local_checkpoints_extension"
    monkeypatch.setattr(assertions, "_has_resiliency_extension", lambda: installed)
    args = parse(parser, [*PLAIN, *ASYNC, *CASES[rule.name]])
    (message,) = problems(args)
    assert message.startswith(f"{rule.flag}: ")
    assert message.endswith(".")
    vars(args).update(DEFAULTS)
    assert problems(args) == []


@pytest.mark.parametrize(
    "name",
    # The others end it later, where the model or the data is built.
    [
        "save_interval",
        "overlap_param_gather_with_optimizer_step_without_interleaving",
        "local_checkpoints_replication",
    ],
)
def test_megatron_says_less(parser: argparse.ArgumentParser, name: str) -> None:
    from megatron.training.arguments import validate_args

    args = parser.parse_args([*PLAIN, *CASES[name]])
    args._is_global_batch_size_explicitly_specified = True
    args.rank, args.world_size = 0, 4
    with pytest.raises(AssertionError):
        validate_args(args)


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--num-layers", "6"], "6 layers do not divide into 4 pipeline stages"),
        (
            ["--num-layers", "8", "--account-for-loss-in-pipeline-split"],
            "9 layers do not divide into 4 pipeline stages",
        ),
        (
            ["--decoder-first-pipeline-num-layers", "8"],
            "no layers are left for the 3 stages in between",
        ),
        (
            ["--decoder-first-pipeline-num-layers", "3"],
            "5 layers are left, which do not divide into the 3 stages in between",
        ),
        (
            [
                *("--decoder-first-pipeline-num-layers", "5"),
                *("--decoder-last-pipeline-num-layers", "5"),
            ],
            "the first and the last stage take 2 layers more than there are",
        ),
        (
            [
                *("--pipeline-model-parallel-size", "2"),
                *("--decoder-first-pipeline-num-layers", "3"),
                *("--decoder-last-pipeline-num-layers", "4"),
            ],
            "1 layers are left, and no stages between the first and the last",
        ),
        # Megatron has built 28 of them (NVIDIA/Megatron-LM#1304).
        (["--num-layers", "30"], "30 layers do not divide into 4 pipeline stages"),
        # And the last 3 of 8 alone (NVIDIA/Megatron-LM#1778).
        (
            [
                *("--pipeline-model-parallel-size", "1"),
                *("--decoder-last-pipeline-num-layers", "3"),
            ],
            "5 layers are left, and no stages between the first and the last",
        ),
    ],
)
def test_layers_are_counted(parser: argparse.ArgumentParser, argv: list[str], words: str) -> None:
    (message,) = problems(parse(parser, [*PLAIN, *ASYNC, *argv]))
    assert words in message


@pytest.mark.parametrize(
    ("schedule", "words"),
    [
        ("4 8", 'Invalid schedule entry "4"'),
        ("0:x 4:8", "could not convert"),
        ("0:0 16K:8", "a batch has at least one sequence"),
        ("16K:8 32K:16", "its first threshold is not 0"),
        ("0:4 8:8", "its thresholds, in sequences, do not increase: 0, 0"),
    ],
)
def test_a_step_schedule_is_read(
    parser: argparse.ArgumentParser, schedule: str, words: str
) -> None:
    argv = [*PLAIN, *ASYNC, "--step-batch-size-schedule", schedule]
    (message,) = problems(parse(parser, argv))
    assert words in message


@pytest.mark.parametrize(
    "argv",
    [
        [],
        ["--step-batch-size-schedule", "0:8 64K:16"],
        ["--decoder-first-pipeline-num-layers", "2"],
        [
            *("--pipeline-model-parallel-size", "2"),
            *("--decoder-first-pipeline-num-layers", "3"),
            *("--decoder-last-pipeline-num-layers", "5"),
        ],
        ["--num-layers", "7", "--account-for-embedding-in-pipeline-split"],
        ["--num-layers", "7", "--pipeline-model-parallel-layout", "Ett|tt|tt|tL"],
        ["--save", "checkpoints", "--save-interval", "5"],
        [
            "--overlap-param-gather-with-optimizer-step",
            "--num-virtual-stages-per-pipeline-rank",
            "2",
        ],
    ],
    ids=lambda argv: " ".join(argv) or "plain",
)
def test_what_megatron_takes_passes(parser: argparse.ArgumentParser, argv: list[str]) -> None:
    assert problems(parse(parser, [*PLAIN, *ASYNC, *argv])) == []


def test_nothing_else_is_checked_before_megatron_has(parser: argparse.ArgumentParser) -> None:
    """What the other rules go by is made by Megatron's checks."""
    assert problems(parse(parser, [*PLAIN, *ASYNC, "--fp16"])) == []
