"""Every rule on the arguments: its message, and what it leaves alone."""

import argparse
import copy
import io
import math
import time
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_async.config.arguments import DEFAULTS, AsyncConfig, add_arguments, set_defaults
from megatron_async.config.validation import (
    RULES,
    ArgumentError,
    Facts,
    Rule,
    Scope,
    check,
    enforce,
)
from megatron_async.config.validation.rule import Subject, dest_of
from megatron_async.config.validation.schedule import batch_sizes
from megatron_async.optimizers import add_optimizer_arguments
from tests.support.gpt import gpt_args
from tests.support.torchrun import run_torchrun

FACTS = Facts(megatron_version="0.19.2")
ASYNC = ["--pipeline-schedule", "pipedream-2bw"]
MODEL = [
    *("--num-layers", "8", "--hidden-size", "64", "--num-attention-heads", "4"),
    *("--seq-length", "64", "--max-position-embeddings", "64", "--vocab-size", "256"),
    *("--mock-data", "--tokenizer-type", "NullTokenizer", "--train-iters", "20"),
    *("--lr", "1e-3", "--bf16", "--optimizer", "muon", "--transformer-impl", "local"),
]
LAYOUT = ["--pipeline-model-parallel-size", "4", "--micro-batch-size", "1"]
PLAIN = [*MODEL, *LAYOUT, "--global-batch-size", "8"]


@pytest.fixture(scope="module")
def parser() -> argparse.ArgumentParser:
    from megatron.training.arguments import add_megatron_arguments

    parser = add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))
    return add_optimizer_arguments(add_arguments(parser))


PARSED: dict[tuple[str, ...], argparse.Namespace] = {}


def parsed(parser: argparse.ArgumentParser, argv: list[str]) -> argparse.Namespace:
    """``parser.parse_args``, which takes a tenth of a second, once for each command line."""
    if tuple(argv) not in PARSED:
        PARSED[tuple(argv)] = parser.parse_args(argv)
    return copy.deepcopy(PARSED[tuple(argv)])


def parse(
    parser: argparse.ArgumentParser, argv: list[str], world_size: int = 4
) -> argparse.Namespace:
    """Megatron's namespace before ``validate_args``, with what that derives set by hand."""
    args = parsed(parser, argv)
    model_size = (
        args.tensor_model_parallel_size
        * args.pipeline_model_parallel_size
        * args.context_parallel_size
    )
    args.data_parallel_size = world_size // model_size
    args.gtp_weight_remat_size = 1
    args.virtual_pipeline_model_parallel_size = None
    set_defaults(args)
    return args


def validate(
    parser: argparse.ArgumentParser, argv: list[str], world_size: int = 4
) -> argparse.Namespace:
    """The namespace as Megatron's own ``validate_args`` leaves it."""
    from megatron.training.arguments import validate_args

    args = parsed(parser, argv)
    args._is_global_batch_size_explicitly_specified = args.global_batch_size is not None
    args.rank, args.world_size = 0, world_size
    validate_args(args)
    set_defaults(args)
    return args


VIRTUAL = {"virtual_pipeline_model_parallel_size": 2}
MOE = ["--num-experts", "8"]
STAGE_NORM = ["--grad-norm-scope", "stage"]
UNTIED = ["--untie-embeddings-and-output-weights"]
UNDEFERRED = ["--no-deferred-update"]
PIPEDREAM = ["--pipeline-schedule", "pipedream"]
ONE_STAGE = ["--pipeline-model-parallel-size", "1"]
EMULATED = ["--emulate-pipeline-stages", "4"]

# rule -> (arguments added to an asynchronous run, attributes that validate_args or a script sets).
CASES: dict[str, tuple[list[str], dict[str, Any]]] = {
    "pipeline_schedule": (["--pipeline-schedule", "pipedream-3bw"], {}),
    "delay_correction": (["--delay-correction", "magic"], {}),
    "correction_without_delay": (
        ["--pipeline-schedule", "default", "--delay-correction", "error-feedback"],
        {},
    ),
    "delay_correction_strength": (
        ["--delay-correction", "error-feedback", "--delay-correction-strength", "nan"],
        {},
    ),
    "strength_without_correction": (["--delay-correction-strength", "0.5"], {}),
    "basis_rotation": (["--delay-correction", "basis-rotation"], {}),
    "strength_of_unscaled_correction": (
        ["--delay-correction", "nesterov", "--delay-correction-strength", "0.5"],
        {},
    ),
    "adaptive_strength": (
        ["--delay-correction", "weight-prediction", "--delay-correction-adaptive-strength"],
        {},
    ),
    "delay_correction_momentum": (
        ["--delay-correction", "nesterov", "--delay-correction-momentum", "1"],
        {},
    ),
    "momentum_without_nesterov": (
        ["--delay-correction", "error-feedback", "--delay-correction-momentum", "0.9"],
        {},
    ),
    "correction_of_one_step": (
        ["--pipeline-schedule", "pipedream", "--delay-correction", "error-feedback"],
        {},
    ),
    "async_start_iteration": (["--async-start-iteration", "-1"], {}),
    "async_start_iteration_with_default_schedule": (
        ["--pipeline-schedule", "default", "--async-start-iteration", "10"],
        {},
    ),
    "deferred_update_with_default_schedule": (
        ["--pipeline-schedule", "default", "--no-deferred-update"],
        {},
    ),
    "grad_norm_scope_with_default_schedule": (
        ["--pipeline-schedule", "default", *STAGE_NORM],
        {},
    ),
    "second_grad_buffer_with_default_schedule": (
        ["--pipeline-schedule", "default", "--second-grad-buffer"],
        {},
    ),
    "emulate_pipeline_stages_with_default_schedule": (
        ["--pipeline-schedule", "default", *EMULATED],
        {},
    ),
    "stage_norm_undeferred": ([*STAGE_NORM, *UNTIED, *UNDEFERRED], {}),
    "stage_norm_tied": (STAGE_NORM, {}),
    "second_grad_buffer": (["--second-grad-buffer", "--overlap-grad-reduce", *UNDEFERRED], {}),
    "second_grad_buffer_local_accumulation": (
        [
            "--second-grad-buffer",
            "--overlap-grad-reduce",
            "--ddp-param-name-patterns-for-fp32-local-accumulation",
            "all",
        ],
        {},
    ),
    "megatron_version": ([], {}),  # through the facts
    "adaptive_muon": (["--optimizer", "adaptive_muon"], {}),  # through the facts, too
    "layer_wise_fp32": (
        ["--optimizer", "muon", "--use-distributed-optimizer"],
        {"use_layer_wise_distributed_optimizer": True, "bf16": False},
    ),
    "soap_torch_dist": (
        ["--optimizer", "soap", "--save", "checkpoints", "--ckpt-format", "torch_dist"],
        {},
    ),
    **{
        f"{dest_of(flag)}_range": ([flag, value], {})
        for flag, value in (
            ("--adan-beta1", "1.5"),
            ("--adan-beta2", "nan"),
            ("--adan-beta3", "1"),
            ("--adan-eps", "-1"),
            ("--mars-beta1", "-0.1"),
            ("--mars-beta2", "2"),
            ("--mars-eps", "inf"),
            ("--mars-gamma", "nan"),
            ("--normuon-beta2", "1"),
            ("--normuon-eps", "nan"),
            ("--normuon-update-rms", "0"),
        )
    },
    "yaml_cfg": (["--yaml-cfg", "config.yaml"], {}),
    "cpu_context_parallel": (["--cpu", "--context-parallel-size", "2"], {}),
    "pipedream_deferred_update": ([*PIPEDREAM, "--deferred-update"], {}),
    "pipedream_tied_prediction": (
        [*PIPEDREAM, "--delay-correction", "weight-prediction"],
        {},
    ),
    "pipedream_batch_size_schedule": (
        [*PIPEDREAM, "--step-batch-size-schedule", "0:4 1280:8"],
        {},
    ),
    "emulate_pipeline_stages": ([*ONE_STAGE, "--emulate-pipeline-stages", "0"], {}),
    "emulation_in_pipeline": ([*PIPEDREAM, *EMULATED], {}),
    "emulation_uneven": (
        [*PIPEDREAM, *ONE_STAGE, *EMULATED, "--decoder-first-pipeline-num-layers", "3"],
        {},
    ),
    "emulation_undivided": (
        [*PIPEDREAM, *ONE_STAGE, "--emulate-pipeline-stages", "3"],
        {},
    ),
    "pipedream_single_stage": ([*PIPEDREAM, *ONE_STAGE], {}),
    "global_batch_size": (["--global-batch-size", "2"], {}),
    "step_batch_size_schedule": (["--step-batch-size-schedule", "0:2 1280:8"], {}),
    "shrinking_batch": (["--step-batch-size-schedule", "0:8 1280:4"], {}),
    "uneven_batch": (
        ["--micro-batch-size", "2", "--step-batch-size-schedule", "0:6 1280:9"],
        {},
    ),
    "num_layers_per_virtual_pipeline_stage": (
        ["--num-layers-per-virtual-pipeline-stage", "1"],
        VIRTUAL,
    ),
    "num_virtual_stages_per_pipeline_rank": (
        ["--num-virtual-stages-per-pipeline-rank", "2"],
        VIRTUAL,
    ),
    "pipeline_model_parallel_layout": (
        ["--pipeline-model-parallel-layout", "Et|t|t|t|t|t|t|tL"],
        VIRTUAL,
    ),
    "overlap_moe_expert_parallel_comm": (["--overlap-moe-expert-parallel-comm"], {}),
    "delay_wgrad_compute": (["--delay-wgrad-compute"], {}),
    "overlap_dispatch_backward_with_experts_wgrad": (
        ["--overlap-dispatch-backward-with-experts-wgrad"],
        {},
    ),
    "defer_embedding_wgrad_compute": (["--defer-embedding-wgrad-compute"], {}),
    "fine_grained_activation_offloading": (["--fine-grained-activation-offloading"], {}),
    "cpu_offloading_num_layers": (["--cpu-offloading-num-layers", "1"], {}),
    "use_ring_exchange_p2p": (["--use-ring-exchange-p2p"], {}),
    "hybrid_context_parallel": (["--hybrid-context-parallel"], {}),
    "sft": (["--sft"], {}),
    "dataloader_inter_document_masking": (["--dataloader-inter-document-masking"], {}),
    "variable_seq_lengths": ([], {"variable_seq_lengths": True}),
    "num_microbatches_with_partial_activation_checkpoints": (
        [],
        {"num_microbatches_with_partial_activation_checkpoints": 2},
    ),
    "modelopt_enabled": ([], {"modelopt_enabled": True}),
    "fp16": (["--fp16"], {}),
    "fp8": (["--fp8-format", "hybrid"], {}),
    "fp4": (["--fp4-format", "e2m1"], {}),
    "fp8_param_gather": (["--fp8-param-gather"], {}),
    "fp4_param_gather": (["--fp4-param-gather"], {}),
    "te_precision_config_file": (["--te-precision-config-file", "precision.yaml"], {}),
    "kitchen_config_file": ([], {"kitchen_config_file": "kitchen.yaml"}),
    "kitchen_recipe_number": ([], {"kitchen_recipe_number": 0}),
    "use_megatron_fsdp": (["--use-megatron-fsdp"], {}),
    "use_torch_fsdp2": (["--use-torch-fsdp2"], {}),
    "tensor_parallel_num_weight_shards": (["--tensor-parallel-num-weight-shards", "2"], {}),
    "expert_tensor_parallel_num_weight_shards": (
        ["--expert-tensor-parallel-num-weight-shards", "2"],
        {},
    ),
    "cuda_graph_impl": (["--cuda-graph-impl", "local"], {}),
    "optimizer_cuda_graph": (["--optimizer-cuda-graph"], {}),
    "nccl_ub": (["--use-nccl-ub"], {}),
    "overlap_param_gather": (
        ["--overlap-param-gather"],
        {"use_layer_wise_distributed_optimizer": True},
    ),
    "second_grad_buffer_microbatches": (
        ["--second-grad-buffer", "--overlap-grad-reduce", "--global-batch-size", "3"],
        {},
    ),
    "second_grad_buffer_overlap": (["--second-grad-buffer"], {}),
    "overlap_param_gather_with_optimizer_step": (
        ["--overlap-param-gather-with-optimizer-step"],
        {},
    ),
    "moe_router_enable_expert_bias": ([*MOE, "--moe-router-enable-expert-bias"], {}),
    "global_aux_loss": (
        [*MOE, "--moe-router-load-balancing-type", "aux_loss", "global_aux_loss"],
        {},
    ),
    "quantile_balancing": (
        [*MOE, "--moe-router-load-balancing-type", "quantile_balancing"],
        {"moe_router_load_balancing_type": "quantile_balancing"},
    ),
    "moe_single_grouped_weight": ([*MOE, "--moe-single-grouped-weight"], {}),
    "moe_single_grouped_bias": ([*MOE, "--moe-single-grouped-bias"], {}),
    "moe_paged_stash": ([*MOE, "--moe-paged-stash"], {}),
    "moe_expert_rank_capacity_factor": ([*MOE, "--moe-expert-rank-capacity-factor", "1.2"], {}),
    "moe_enable_routing_replay": ([*MOE, "--moe-enable-routing-replay"], {}),
    "use_precision_aware_optimizer": (["--use-precision-aware-optimizer"], {}),
    "optimizer_cpu_offload": (["--optimizer-cpu-offload"], {}),
    "qk_clip": (["--qk-clip"], {}),
    "num_distributed_optimizer_instances": (["--num-distributed-optimizer-instances", "2"], {}),
    "grad_norm_skip_threshold": ([], {"grad_norm_skip_threshold": 5.0}),
    "freeze_all_layers": (["--freeze-all-layers"], {}),
    "mtp_num_layers": (["--mtp-num-layers", "1"], {}),
    "decoder_num_layers": (["--decoder-num-layers", "4"], {}),
    "decoder_seq_length": (["--decoder-seq-length", "32"], {}),
    "hybrid_layer_pattern": (["--hybrid-layer-pattern", "M*M*M*M*"], {}),
    "is_hybrid_model": (["--is-hybrid-model"], {}),
    "dsa_indexer_loss_coeff": (["--dsa-indexer-loss-coeff", "0.1"], {}),
    "vision_pretraining": (["--vision-pretraining"], {}),
    "perform_rl_step": (["--perform-rl-step"], {}),
    "iterations_to_skip": (["--iterations-to-skip", "3", "4"], {}),
    "external_dataloader": (["--dataloader-type", "external"], {}),
    "full_validation": (["--full-validation"], {}),
    "phase_transition_iterations": (["--phase-transition-iterations", "10"], {}),
    "rerun_report_stats": (["--rerun-mode", "report_stats"], {}),
    "inprocess_restart": (["--inprocess-restart"], {}),
    "adlr_autoresume": (["--adlr-autoresume"], {}),
    "fake_process_group": (["--fake-process-group"], {}),
    "log_params_norm": (["--log-params-norm"], {}),
    "save_wgrads_interval": (["--save-wgrads-interval", "5"], {}),
    "save_dgrads_interval": (["--save-dgrads-interval", "5"], {}),
    "save_activations_interval": (["--save-activations-interval", "5"], {}),
    "save_tokens_per_expert_interval": ([*MOE, "--save-tokens-per-expert-interval", "5"], {}),
    "save_params_interval": (["--save-params-interval", "5"], {}),
    "moe_routing_trace_path": ([*MOE, "--moe-routing-trace-path", "trace"], {}),
    "logits_save_dir": (["--logits-save-dir", "logits"], {}),
    "local_checkpoints": (["--non-persistent-ckpt-type", "local"], {}),
    "ckpt_assume_constant_structure": (
        ["--ckpt-assume-constant-structure", "--async-start-iteration", "5"],
        {},
    ),
    "ckpt_convert_format": (["--ckpt-convert-format", "torch"], {}),
    "moe_use_upcycling": ([*MOE, "--moe-use-upcycling"], {}),
    "sensitive_optimizer": (["--optimizer", "adam"], {}),
    "sgd_momentum": (["--optimizer", "sgd", "--sgd-momentum", "0.5"], {}),
    "muon_momentum": (["--muon-momentum", "0.5"], {}),
    "adam_beta1": (["--optimizer", "soap", "--adam-beta1", "0.5"], {}),
    "lion_beta1": (["--optimizer", "lion", "--lion-beta1", "0.5"], {}),
    "adan_beta1": ([], {"optimizer": "adan", "adan_beta1": 0.5}),
    "mars_beta1": (
        ["--delay-correction", "error-feedback"],
        {"optimizer": "mars", "mars_beta1": 0.5},
    ),
    "zero_strength": (
        ["--delay-correction", "error-feedback", "--delay-correction-strength", "0"],
        {},
    ),
    "stacked_momentum": (["--optimizer", "adam", "--delay-correction", "nesterov"], {}),
    "zero_momentum": (
        ["--delay-correction", "nesterov", "--delay-correction-momentum", "0"],
        {},
    ),
    "never_asynchronous": (["--async-start-iteration", "20"], {}),
    "stage_norm_unclipped": ([*STAGE_NORM, *UNTIED, "--clip-grad", "0"], {}),
    "second_grad_buffer_unused": (["--second-grad-buffer", "--overlap-grad-reduce"], {}),
    "timing_log_level": (["--timing-log-level", "1"], {}),
    "empty_unused_memory_level": (["--empty-unused-memory-level", "1"], {}),
    "train_sync_interval": (["--train-sync-interval", "10"], {}),
    "log_energy": (["--log-energy"], {}),
    "log_straggler": (["--log-straggler"], {}),
    "gpu_sniff_test_interval": (["--gpu-sniff-test-interval", "100"], {}),
    "rampup_batch_size": (["--rampup-batch-size", "2", "2", "100"], {}),
}


def problems(args: argparse.Namespace, facts: Facts = FACTS) -> tuple[list[str], list[str]]:
    """(problems, warnings)"""
    try:
        return [], check(args, facts)
    except ArgumentError as error:
        return list(error.problems), []


def flags_named(args: argparse.Namespace) -> list[str]:
    """The flag that each problem starts with."""
    return [text.partition(":")[0] for text in problems(args)[0]]


def case(parser: argparse.ArgumentParser, rule: Rule) -> argparse.Namespace:
    argv, attributes = CASES[rule.name]
    size = 8 if rule.name == "cpu_context_parallel" else 4
    args = parse(parser, [*PLAIN, *ASYNC, *argv], world_size=size)
    vars(args).update(attributes)
    return args


def facts_of(rule: Rule) -> Facts:
    if rule.name == "adaptive_muon":
        return Facts(megatron_version="0.19.2", adaptive_muon_runs=False)
    return Facts(megatron_version="0.21.0") if rule.name == "megatron_version" else FACTS


def test_every_rule_has_a_case_and_a_name_of_its_own() -> None:
    names = [rule.name for rule in RULES]
    assert len(set(names)) == len(names)
    assert set(names) == set(CASES)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_rule_is_the_only_one_to_fire_and_says_which_flag_why_and_what_instead(
    parser: argparse.ArgumentParser, rule: Rule
) -> None:
    errors, warnings = problems(case(parser, rule), facts_of(rule))
    messages = warnings if rule.warning else errors
    assert len(messages) == 1, messages
    assert messages[0].startswith(f"{rule.flag}: ")
    reason, _, remedy = messages[0].removeprefix(f"{rule.flag}: ").rpartition(". ")
    assert len(reason) > 10
    assert remedy.endswith(".")
    assert "\n" not in messages[0]


@pytest.mark.parametrize(
    "rule",
    [rule for rule in RULES if rule.scope is Scope.ASYNCHRONOUS],
    ids=lambda rule: rule.name,
)
def test_rule_on_the_asynchronous_schedule_leaves_the_default_one_alone(
    parser: argparse.ArgumentParser, rule: Rule
) -> None:
    argv, attributes = CASES[rule.name]
    args = parse(parser, [*PLAIN, *ASYNC, *argv])
    vars(args).update(DEFAULTS | attributes | {"log_pipeline_bubble": True})
    assert check(args, FACTS) == []


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_nothing_is_checked_without_a_flag_of_this_package(
    parser: argparse.ArgumentParser, rule: Rule
) -> None:
    args = case(parser, rule)
    vars(args).update(DEFAULTS)
    assert check(args, facts_of(rule)) == []


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
        (["--dataloader-type", "cyclic", "--async-start-iteration", "5"], 4),
        (["--ckpt-assume-constant-structure", "--async-save"], 4),
        (["--eval-iters", "0", "--use-tp-pp-dp-mapping"], 8),
        ([*PIPEDREAM, "--no-deferred-update", "--log-params-norm"], 4),
        ([*PIPEDREAM, "--global-batch-size", "1"], 4),
        ([*PIPEDREAM, "--delay-correction", "nesterov"], 4),
        ([*PIPEDREAM, "--delay-correction", "weight-prediction", *UNTIED], 4),
        ([*PIPEDREAM, *ONE_STAGE, "--emulate-pipeline-stages", "8"], 4),
        ([*ONE_STAGE, "--emulate-pipeline-stages", "16"], 4),
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
    pattern = ["--hybrid-override-pattern", "M*M*M*M*"]
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
    ],
)
def test_momentum_of_each_optimizer(
    parser: argparse.ArgumentParser, optimizer: str, dest: str, flag: str
) -> None:
    args = parse(parser, [*PLAIN, *ASYNC, "--delay-correction", "error-feedback"])
    vars(args).update({"optimizer": optimizer, dest: 0.9})
    assert check(args, FACTS) == []
    setattr(args, dest, 0.89)
    (warning,) = check(args, FACTS)
    assert warning.startswith(f"{flag}: ")


def test_optimizers_that_suffer_most_are_named(parser: argparse.ArgumentParser) -> None:
    args = parse(parser, [*PLAIN, *ASYNC])
    for args.optimizer, name in (("adam", "AdamW"), ("mars", "MARS")):
        (warning,) = check(args, FACTS)
        assert name in warning
    args.delay_correction = "error-feedback"
    assert check(args, FACTS) == []


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


@pytest.mark.parametrize(
    ("stages", "microbatches", "runs"),
    [(1, 1, True), (2, 1, True), (4, 3, True), (4, 2, False), (8, 7, True), (8, 6, False)],
)
def test_least_number_of_microbatches(
    parser: argparse.ArgumentParser, stages: int, microbatches: int, runs: bool
) -> None:
    layout = ["--pipeline-model-parallel-size", str(stages), "--micro-batch-size", "3"]
    batch = ["--global-batch-size", str(3 * 2 * microbatches)]
    args = parse(parser, [*MODEL, *layout, *batch, *ASYNC], world_size=2 * stages)
    errors, _ = problems(args)
    assert (errors == []) is runs
    if not runs:
        assert f"{microbatches} microbatches" in errors[0]
        assert f"at least {stages - 1}" in errors[0]
        assert f"{6 * (stages - 1)} samples" in errors[0]


@pytest.mark.parametrize(
    ("schedule", "start", "sizes"),
    [
        ("0:2 1280:4 3840:8", 0, [2, 4, 8]),
        ("0:2 1280:4 3840:8", 9, [2, 4, 8]),  # 10 iterations of 2 make 20 samples, 1280 tokens
        ("0:2 1280:4 3840:8", 10, [4, 8]),
        ("0:2 1280:4 3840:8", 19, [4, 8]),
        ("0:2 1280:4 3840:8", 20, [8]),
        ("0:6 640:12 704:24", 0, [6, 24]),  # 12 is over before it begins: 12 samples are past 11
    ],
)
def test_steps_of_a_batch_size_schedule(
    parser: argparse.ArgumentParser, schedule: str, start: int, sizes: list[int]
) -> None:
    from megatron.core.num_microbatches_calculator import StepBatchsizeNumMicroBatchesCalculator

    argv = ["--step-batch-size-schedule", schedule, "--async-start-iteration", str(start)]
    args = parse(parser, [*MODEL, *LAYOUT, *ASYNC, *argv])
    subject = Subject(args=args, config=AsyncConfig.from_args(args), facts=FACTS)
    assert batch_sizes(subject) == sizes

    calculator = StepBatchsizeNumMicroBatchesCalculator(1, 1, False, 1, schedule, 64)
    consumed, seen = 0, []
    for iteration in range(40):
        calculator.update(consumed, consistency_check=False)
        size = calculator.get_current_global_batch_size()
        if iteration >= start:
            seen.append(size)
        consumed += size
    assert sorted(set(seen)) == sizes


def test_step_with_too_few_microbatches_is_found_wherever_it_stands(
    parser: argparse.ArgumentParser,
) -> None:
    argv = [*MODEL, *LAYOUT, *ASYNC, "--step-batch-size-schedule", "0:2 1280:4"]
    errors, _ = problems(validate(parser, argv))
    assert len(errors) == 1
    assert errors[0].startswith("--step-batch-size-schedule: a batch has 2 microbatches")
    assert problems(validate(parser, [*argv, "--async-start-iteration", "10"])) == ([], [])


@pytest.mark.parametrize(
    ("schedule", "microbatches"),
    [("0:2 1280:4", None), ("0:1 640:2", 2), ("0:2 12800:4", 2)],  # that one's 4 comes too late
)
def test_steps_that_a_resumed_run_may_have_behind_it_do_not_count(
    parser: argparse.ArgumentParser, schedule: str, microbatches: int | None
) -> None:
    argv = [*MODEL, *LAYOUT, *ASYNC, "--load", "x", "--step-batch-size-schedule", schedule]
    errors, _ = problems(parse(parser, argv))
    if microbatches is None:
        assert errors == []
    else:
        assert len(errors) == 1
        assert f"a batch has {microbatches} microbatches" in errors[0]


@pytest.mark.parametrize(
    ("schedule", "more", "word"),
    [
        ("0:8 1280:12 2560:8", [], "shrinks from 12 to 8 samples at iteration 6"),
        ("0:8 1280:12 2560:9", [], "shrinks from 12 to 9 samples at iteration 6"),
        ("0:8 1280:8 2560:12", [], None),
        ("0:8 12800:4", [], None),  # behind the last of 20 iterations
        ("0:8 10240:4", [], None),  # that one's last sample
        ("0:8 10176:4", ["--train-iters", "21"], "shrinks from 8 to 4 samples at iteration 21"),
        ("0:6 640:9 1280:12", ["--micro-batch-size", "2"], "9 samples, from iteration 3 on"),
        ("0:6 640:9", ["--micro-batch-size", "2", "--load", "x"], "9 samples, from iteration 3 on"),
        ("0:7 640:8", ["--micro-batch-size", "2"], "7 samples, from iteration 1 on"),
        ("0:7 640:8", ["--micro-batch-size", "2", "--load", "x"], None),
    ],
)
def test_batches_on_which_megatron_would_stop_in_mid_run(
    parser: argparse.ArgumentParser, schedule: str, more: list[str], word: str | None
) -> None:
    argv = [*MODEL, *LAYOUT, *ASYNC, "--step-batch-size-schedule", schedule, *more]
    errors, _ = problems(parse(parser, argv))
    if word is None:
        assert errors == []
    else:
        assert len(errors) == 1
        assert errors[0].startswith("--step-batch-size-schedule: ")
        assert word in errors[0]


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


@pytest.mark.parametrize("version", ["0.18.2", "0.20.0", "1.19.0"])
def test_other_releases_are_named(version: str) -> None:
    args = argparse.Namespace(log_pipeline_bubble=True)
    with pytest.raises(ArgumentError, match=version):
        check(args, Facts(megatron_version=version))


@pytest.mark.parametrize("version", ["0.19.0", "0.19.2+c0ffee", "0.19.1rc1"])
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
        log_params_norm=True,
        save_params_interval=5,
    )
    result = run_torchrun(2, argv, launcher="plugin", check=False)
    assert result.returncode != 0
    printed = [rank.stdout + rank.stderr for rank in result.ranks]
    for flag in ("--log-params-norm: ", "--save-params-interval: "):
        assert [text.count(flag) for text in printed] == [1, 0]
    assert "2 problems" in printed[0]
    assert not any("Traceback" in text for text in printed)
    assert result.iterations == []
