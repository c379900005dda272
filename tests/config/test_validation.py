"""The checks on the arguments: what passes, what is listed, and how a job ends."""

import argparse
import io
import math
import time
from types import SimpleNamespace

import pytest

from megatron_async.config.validation import ArgumentError, Facts, check, enforce, notes
from tests.config.cases import (
    ASYNC,
    EMULATED,
    FACTS,
    FRESH,
    ONE_STAGE,
    PIPEDREAM,
    PLAIN,
    STAGE_NORM,
    UNTIED,
    parse,
    problems,
    validate,
)
from tests.support.gpt import gpt_args
from tests.support.torchrun import run_torchrun


@pytest.mark.parametrize(
    ("argv", "world_size"),
    [
        ([], 4),
        (["--delay-correction", "error-feedback"], 4),
        (["--optimizer", "adam", "--delay-correction", "error-feedback"], 4),
        (["--optimizer", "adam", "--delay-correction", "nesterov", "--adam-beta1", "0"], 4),
        (["--use-distributed-optimizer", "--overlap-grad-reduce"], 8),
        (["--optimizer", "sgd", "--untie-embeddings-and-output-weights", *STAGE_NORM], 4),
        (["--optimizer", "soap", "--second-grad-buffer", "--overlap-grad-reduce"], 8),
        (["--optimizer", "lion", "--no-deferred-update", "--log-params-norm"], 4),
        (["--no-deferred-update", "--save-wgrads-interval", "5"], 4),
        (["--num-experts", "4", "--moe-aux-loss-coeff", "0.01"], 4),
        (
            ["--decoder-first-pipeline-num-layers", "1", "--decoder-last-pipeline-num-layers", "1"],
            4,
        ),
        (["--pipeline-model-parallel-layout", "Ett|tt|tt|ttL"], 4),
        (["--recompute-granularity", "full", "--recompute-method", "uniform"], 4),
        (["--exit-signal-handler", "--exit-duration-in-mins", "5", "--exit-interval", "3"], 4),
        (["--log-num-zeros-in-grad", "--check-weight-hash-across-dp-replicas-interval", "5"], 4),
        (["--calculate-per-token-loss", "--log-pipeline-bubble"], 4),
        (["--log-params-norm", "--log-throughput", "--dataloader-type", "external"], 4),
        (["--sft"], 4),
        (["--dataloader-inter-document-masking"], 4),
        (["--reset-position-ids", "--reset-attention-mask", "--eod-mask-loss"], 4),
        (["--dataloader-type", "cyclic", "--async-start-iteration", "5"], 4),
        (["--ckpt-assume-constant-structure", "--async-save"], 4),
        (["--eval-iters", "0", "--use-tp-pp-dp-mapping"], 8),
        (["--pipeline-extra-warmup", "3"], 4),
        (["--pipeline-extra-warmup", "1", *FRESH, "--delayed-microbatches", "6"], 4),
        ([*FRESH, "--no-deferred-update"], 4),
        ([*FRESH, "--delay-correction", "error-feedback", "--optimizer", "adam"], 4),
        (["--pipeline-schedule", "paci", "--delayed-microbatches", "all"], 4),
        ([*PIPEDREAM, "--no-deferred-update", "--log-params-norm"], 4),
        ([*PIPEDREAM, "--global-batch-size", "1"], 4),
        ([*PIPEDREAM, "--delay-correction", "nesterov"], 4),
        ([*PIPEDREAM, "--delay-correction", "weight-prediction", *UNTIED], 4),
        ([*PIPEDREAM, *ONE_STAGE, "--emulate-pipeline-stages", "8"], 4),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else str(value),
)
def test_what_runs_passes_without_a_warning_after_megatrons_own_checks(
    parser: argparse.ArgumentParser, argv: list[str], world_size: int
) -> None:
    assert check(validate(parser, [*PLAIN, *ASYNC, *argv], world_size), FACTS) == []


def test_megatrons_own_checks_leave_what_the_rules_read(parser: argparse.ArgumentParser) -> None:
    argv = [*PLAIN, *ASYNC, "--num-layers-per-virtual-pipeline-stage", "1"]
    errors, _ = problems(validate(parser, argv))
    assert [text.partition(":")[0] for text in errors] == [
        "--num-layers-per-virtual-pipeline-stage"
    ]
    errors, _ = problems(validate(parser, [*PLAIN, *ASYNC, "--enable-cuda-graph"]))
    assert [text.partition(":")[0] for text in errors] == ["--cuda-graph-impl"]
    pattern = ["--hybrid-override-pattern", "G*G*G*G*"]
    errors, _ = problems(validate(parser, [*PLAIN, *ASYNC, *pattern]))
    assert "--hybrid-layer-pattern" in {text.partition(":")[0] for text in errors}


@pytest.mark.parametrize(
    ("optimizer", "dest", "flag"),
    [
        ("sgd", "sgd_momentum", "--sgd-momentum"),
        ("muon", "muon_momentum", "--muon-momentum"),
        ("adaptive_muon", "muon_momentum", "--muon-momentum"),
        ("normuon", "muon_momentum", "--muon-momentum"),
        ("adam", "adam_beta1", "--adam-beta1"),
        ("soap", "adam_beta1", "--adam-beta1"),
        ("lion", "lion_beta1", "--lion-beta1"),
        ("adan", "adan_beta1", "--adan-beta1"),
        ("mars", "mars_beta1", "--mars-beta1"),
        ("nadamw", "nadamw_beta1", "--nadamw-beta1"),
    ],
)
@pytest.mark.parametrize("adaptive_muon_runs", [True], indirect=True)
@pytest.mark.usefixtures("adaptive_muon_runs")
def test_momentum_of_each_optimizer(
    parser: argparse.ArgumentParser, optimizer: str, dest: str, flag: str
) -> None:
    # A sign is not to be corrected, which is warned of.
    correction = "none" if optimizer == "lion" else "error-feedback"
    args = parse(parser, [*PLAIN, *ASYNC, "--delay-correction", correction])
    vars(args).update({"optimizer": optimizer, dest: 0.9})
    assert check(args, FACTS) == []
    setattr(args, dest, 0.89)
    (warning,) = check(args, FACTS)
    assert warning.startswith("--optimizer: a delay is borne the better")
    assert f"{flag} 0.89 is low" in warning


def test_optimizers_that_suffer_most_are_named(parser: argparse.ArgumentParser) -> None:
    args = parse(parser, [*PLAIN, *ASYNC])
    for args.optimizer, name in (("adam", "AdamW"), ("mars", "MARS")):
        (warning,) = check(args, FACTS)
        assert name in warning
    args.delay_correction = "error-feedback"
    assert check(args, FACTS) == []


@pytest.mark.parametrize(
    ("argv", "belongs", "chosen"),
    [
        (
            [*ONE_STAGE, *EMULATED],
            "--pipeline-schedule paci or pipedream",
            "--pipeline-schedule is pipedream-2bw",
        ),
        (
            [*EMULATED, "--pipeline-schedule", "default"],
            "--pipeline-schedule paci or pipedream",
            "--pipeline-schedule is default",
        ),
        (
            ["--delay-correction-strength", "0.5"],
            "--delay-correction error-feedback or weight-prediction or delay-compensation",
            "--delay-correction is none",
        ),
        (
            ["--delay-correction-momentum", "0.9", "--delay-correction", "error-feedback"],
            "--delay-correction nesterov",
            "--delay-correction is error-feedback",
        ),
        (
            ["--delay-correction-adaptive-strength", "--delay-correction", "nesterov"],
            "--delay-correction error-feedback or delay-compensation",
            "--delay-correction is nesterov",
        ),
    ],
)
def test_a_flag_of_another_schedule_or_correction_is_refused(
    parser: argparse.ArgumentParser, argv: list[str], belongs: str, chosen: str
) -> None:
    errors, _ = problems(parse(parser, [*PLAIN, *ASYNC, *argv]))
    flag = next(each for each in argv if each.startswith(("--emulate", "--delay-correction-")))
    assert errors == [f"{flag}: it belongs to {belongs}, and {chosen}. Add that, or drop it."]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (
            [*FRESH, "--delayed-microbatches", "2"],
            (
                "--delayed-microbatches: 2 of 8 microbatches cannot be what is delayed, at least 3 "
                "have to be (3 for 4 pipeline stages). Give a number from 3 to 8, fewest or all."
            ),
        ),
        (
            [*FRESH, "--delayed-microbatches", "9", "--pipeline-extra-warmup", "2"],
            (
                "--delayed-microbatches: 9 of 8 microbatches cannot be what is delayed, at least 5 "
                "have to be (3 for 4 pipeline stages, 2 for --pipeline-extra-warmup). Give a "
                "number from 5 to 8, fewest or all."
            ),
        ),
        # The stages that are emulated count, as real ones do.
        (
            [
                *(*ONE_STAGE, *EMULATED, "--global-batch-size", "32"),
                *("--pipeline-schedule", "paci", "--delayed-microbatches", "2"),
            ],
            (
                "--delayed-microbatches: 2 of 8 microbatches cannot be what is delayed, at least 3 "
                "have to be (3 for 4 pipeline stages). Give a number from 3 to 8, fewest or all."
            ),
        ),
        (
            ["--pipeline-schedule", "paci", "--no-deferred-update"],
            (
                "--no-deferred-update: which microbatches drift follows from where the deferred "
                "update is made. Drop it."
            ),
        ),
        (
            ["--pipeline-schedule", "paci", "--overlap-param-gather"],
            (
                "--overlap-param-gather: the only copy of the weights would be computed on while "
                "it is gathered. Drop it."
            ),
        ),
    ],
)
def test_what_a_schedule_has_against_its_flags_is_listed(
    parser: argparse.ArgumentParser, argv: list[str], message: str
) -> None:
    errors, _ = problems(parse(parser, [*PLAIN, *ASYNC, *argv]))
    assert errors == [message]


def test_a_schedule_is_not_asked_about_numbers_that_make_no_sense(
    parser: argparse.ArgumentParser,
) -> None:
    argv = [*PLAIN, *FRESH, "--delayed-microbatches", "2", "--global-batch-size", "1"]
    assert len(problems(parse(parser, argv))[0]) == 1


def test_a_run_is_told_how_many_microbatches_are_delayed_and_why(
    parser: argparse.ArgumentParser,
) -> None:
    (note,) = notes(parse(parser, [*PLAIN, *FRESH]), FACTS)
    assert note == (
        "fresh-2bw: 3 of 8 microbatches of a batch run on the weights before the newest (3 for 4 "
        "pipeline stages): a mean delay of 0.375 of an update."
    )
    (note,) = notes(parse(parser, [*PLAIN, *FRESH, "--delayed-microbatches", "all"]), FACTS)
    assert "8 of 8 microbatches" in note
    assert "(--delayed-microbatches all): a mean delay of 1 of an update." in note
    assert notes(parse(parser, [*PLAIN, *ASYNC]), FACTS) == []
    assert notes(parse(parser, PLAIN), FACTS) == []


def test_all_problems_are_listed(parser: argparse.ArgumentParser) -> None:
    argv = [
        *PLAIN,
        *ASYNC,
        "--fp16",
        "--qk-clip",
        "--global-batch-size",
        "1",
        "--optimizer",
        "adam",
    ]
    with pytest.raises(ArgumentError, match="3 problems") as caught:
        check(parse(parser, argv), FACTS)
    flags = [text.partition(":")[0] for text in caught.value.problems]
    assert flags == ["--global-batch-size", "--fp16", "--qk-clip"]
    for number, flag in enumerate(flags, start=1):
        assert f"\n  {number}. {flag}: " in str(caught.value)


def test_configuration_objects_are_checked_too(parser: argparse.ArgumentParser) -> None:
    args = parse(parser, [*PLAIN, *ASYNC])
    good = SimpleNamespace(fp16=False, variable_seq_lengths=False)
    assert check(args, FACTS, configs=[good]) == []
    bad = SimpleNamespace(delay_wgrad_compute=True)
    optimizer = SimpleNamespace(grad_norm_skip_threshold=1.0)
    with pytest.raises(ArgumentError) as caught:
        check(args, FACTS, configs=[good, bad, optimizer])
    assert [text.split()[0] for text in caught.value.problems] == [
        "--delay-wgrad-compute:",
        "grad_norm_skip_threshold",
    ]


def test_megatrons_real_configurations_pass(parser: argparse.ArgumentParser) -> None:
    from megatron.core.optimizer import OptimizerConfig
    from megatron.core.transformer import TransformerConfig

    args = parse(parser, [*PLAIN, *ASYNC])
    model = TransformerConfig(num_layers=8, hidden_size=64, num_attention_heads=4)
    assert check(args, FACTS, configs=[model, OptimizerConfig(optimizer="muon")]) == []
    optimizer = OptimizerConfig(optimizer="muon", grad_norm_skip_threshold=math.pi)
    with pytest.raises(ArgumentError, match="grad_norm_skip_threshold"):
        check(args, FACTS, configs=[model, optimizer])


def test_installed_megatron_is_a_tested_release() -> None:
    args = argparse.Namespace(log_pipeline_bubble=True)
    assert check(args, Facts.current()) == check(args) == []


@pytest.mark.parametrize("version", ["0.18.1", "0.21.0", "1.19.0"])
def test_other_releases_are_named(version: str) -> None:
    args = argparse.Namespace(log_pipeline_bubble=True)
    with pytest.raises(ArgumentError, match=version):
        check(args, Facts(megatron_version=version))


@pytest.mark.parametrize("version", ["0.18.2", "0.19.0", "0.19.2+c0ffee", "0.19.0rc1", "0.20.0"])
def test_patch_releases_are_taken_as_tested(version: str) -> None:
    assert (
        check(argparse.Namespace(log_pipeline_bubble=True), Facts(megatron_version=version)) == []
    )


def test_yaml_configuration_that_swallowed_the_flags() -> None:
    args = argparse.Namespace(yaml_cfg="config.yaml")
    assert check(args, FACTS) == []
    with pytest.raises(ArgumentError, match="--yaml-cfg"):
        check(args, Facts(megatron_version="0.19.2", flags_given=True))


def test_rank_0_prints_once_and_every_rank_ends(parser: argparse.ArgumentParser) -> None:
    args = parse(parser, [*PLAIN, *ASYNC, "--fp16"])
    printed = {}
    for rank in (0, 1):
        stream = io.StringIO()
        began = time.monotonic()
        with pytest.raises(SystemExit) as caught:
            enforce(args, FACTS, rank=rank, stream=stream, grace=0.2 if rank else 100.0)
        assert caught.value.code == 2
        printed[rank] = stream.getvalue()
        assert time.monotonic() - began >= 0.2 * rank
    assert printed[0].count("--fp16: ") == 1
    assert printed[1] == ""


def test_warnings_are_printed_by_rank_0_alone(parser: argparse.ArgumentParser) -> None:
    args = parse(parser, [*PLAIN, *ASYNC, "--optimizer", "adam"])
    streams = [io.StringIO(), io.StringIO()]
    for rank, stream in enumerate(streams):
        enforce(args, FACTS, rank=rank, stream=stream)
    assert streams[0].getvalue().startswith("WARNING: megatron_async: --optimizer: AdamW")
    assert streams[0].getvalue().count("\n") == 1
    assert streams[1].getvalue() == ""


def test_launcher_ends_a_job_of_two_ranks_with_one_list_of_problems() -> None:
    argv = gpt_args(
        pipeline_model_parallel_size=2,
        pipeline_schedule="pipedream-2bw",
        save_dgrads_interval=5,
        save_params_interval=5,
    )
    result = run_torchrun(2, argv, launcher="plugin", check=False)
    assert result.returncode == 1
    assert result.crashed == []
    printed = [rank.stdout + rank.stderr for rank in result.ranks]
    for flag in ("--save-dgrads-interval: ", "--save-params-interval: "):
        assert [text.count(flag) for text in printed] == [1, 0]
    assert "2 problems" in printed[0]
    assert not any("Traceback" in text for text in printed)
    assert result.iterations == []
