"""A case for each rule on the arguments: what makes it, and no other, fire."""

import argparse
import copy
from typing import Any

from megatron_async.config.arguments import flags
from megatron_async.config.settings import set_defaults
from megatron_async.config.validation import ArgumentError, Facts, check
from megatron_async.config.validation.rule import dest_of

__all__ = [
    "ASYNC",
    "CASES",
    "DEFAULTS",
    "EMULATED",
    "FACTS",
    "FRESH",
    "LAYOUT",
    "MODEL",
    "ONE_STAGE",
    "PIPEDREAM",
    "PLAIN",
    "STAGE_NORM",
    "UNTIED",
    "parse",
    "problems",
    "validate",
]

DEFAULTS = {dest: flag.default for dest, flag in flags().items()}
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


_PARSED: dict[tuple[str, ...], argparse.Namespace] = {}


def _parsed(parser: argparse.ArgumentParser, argv: list[str]) -> argparse.Namespace:
    """``parser.parse_args``, which takes a tenth of a second, once for each command line."""
    if tuple(argv) not in _PARSED:
        _PARSED[tuple(argv)] = parser.parse_args(argv)
    return copy.deepcopy(_PARSED[tuple(argv)])


def parse(
    parser: argparse.ArgumentParser, argv: list[str], world_size: int = 4
) -> argparse.Namespace:
    """Megatron's namespace before ``validate_args``, with what that derives set by hand."""
    args = _parsed(parser, argv)
    model_size = (
        args.tensor_model_parallel_size
        * args.pipeline_model_parallel_size
        * args.context_parallel_size
    )
    args.data_parallel_size = world_size // max(model_size, 1)
    args.gtp_weight_remat_size = 1
    args.virtual_pipeline_model_parallel_size = None
    set_defaults(args)
    return args


def validate(
    parser: argparse.ArgumentParser, argv: list[str], world_size: int = 4
) -> argparse.Namespace:
    """The namespace as Megatron's own ``validate_args`` leaves it."""
    from megatron.training.arguments import validate_args

    args = _parsed(parser, argv)
    args._is_global_batch_size_explicitly_specified = args.global_batch_size is not None
    args.rank, args.world_size = 0, world_size
    validate_args(args)
    set_defaults(args)
    return args


VIRTUAL = {"virtual_pipeline_model_parallel_size": 2}
MOE = ["--num-experts", "8"]
MTP = ["--mtp-num-layers", "1"]
STAGE_NORM = ["--grad-norm-scope", "stage"]
UNTIED = ["--untie-embeddings-and-output-weights"]
UNDEFERRED = ["--no-deferred-update"]
FRESH = ["--pipeline-schedule", "fresh-2bw"]
PIPEDREAM = ["--pipeline-schedule", "pipedream"]
ONE_STAGE = ["--pipeline-model-parallel-size", "1"]
EMULATED = ["--emulate-pipeline-stages", "4"]
LOCAL = ["--non-persistent-ckpt-type", "local"]

# rule -> (arguments added to an asynchronous run, attributes that validate_args or a script sets).
CASES: dict[str, tuple[list[str], dict[str, Any]]] = {
    "pipeline_schedule": (["--pipeline-schedule", "pipedream-3bw"], {}),
    "delay_correction": (["--delay-correction", "magic"], {}),
    "correction_without_delay": (
        ["--pipeline-schedule", "default", "--delay-correction", "error-feedback"],
        {},
    ),
    "delay_correction_strength_range": (
        ["--delay-correction", "error-feedback", "--delay-correction-strength", "nan"],
        {},
    ),
    "basis_rotation": (["--delay-correction", "basis-rotation"], {}),
    "delay_correction_strength_misplaced": (
        ["--delay-correction", "nesterov", "--delay-correction-strength", "0.5"],
        {},
    ),
    "delay_correction_adaptive_strength_misplaced": (
        ["--delay-correction", "weight-prediction", "--delay-correction-adaptive-strength"],
        {},
    ),
    "delay_correction_momentum_range": (
        ["--delay-correction", "nesterov", "--delay-correction-momentum", "1"],
        {},
    ),
    "delay_correction_momentum_misplaced": (
        ["--delay-correction", "error-feedback", "--delay-correction-momentum", "0.9"],
        {},
    ),
    "correction_of_one_step": (
        ["--pipeline-schedule", "pipedream", "--delay-correction", "error-feedback"],
        {},
    ),
    "correction_of_signs": (["--optimizer", "lion", "--delay-correction", "error-feedback"], {}),
    "async_start_iteration_range": (["--async-start-iteration", "-1"], {}),
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
    "emulate_pipeline_stages_misplaced": ([*ONE_STAGE, *EMULATED], {}),
    "pipeline_extra_warmup_with_default_schedule": (
        ["--pipeline-schedule", "default", "--pipeline-extra-warmup", "1"],
        {},
    ),
    "pipeline_extra_warmup_range": (["--pipeline-extra-warmup", "-1"], {}),
    "no_extra_warmup": ([*PIPEDREAM, "--pipeline-extra-warmup", "1"], {}),
    "extra_warmup_stages": (["--pipeline-extra-warmup", "4"], {}),
    "delayed_microbatches_range": ([*FRESH, "--delayed-microbatches", "-1"], {}),
    "delayed_microbatches_misplaced": (["--delayed-microbatches", "all"], {}),
    "stage_norm_undeferred": ([*STAGE_NORM, *UNTIED, *UNDEFERRED], {}),
    "stage_norm_tied": (STAGE_NORM, {}),
    "second_grad_buffer": (["--second-grad-buffer", "--overlap-grad-reduce", *UNDEFERRED], {}),
    "second_grad_buffer_fp32_accumulation": (
        [
            "--second-grad-buffer",
            "--overlap-grad-reduce",
            "--use-distributed-optimizer",
            "--ddp-reduce-scatter-with-fp32-accumulation",
        ],
        {},
    ),
    "bucket_all_stages_connections": (["--ddp-bucket-all-stages", "--overlap-grad-reduce"], {}),
    "ddp_bucket_all_stages_with_default_schedule": (
        ["--pipeline-schedule", "default", "--ddp-bucket-all-stages"],
        {},
    ),
    "bucket_all_stages_overlap": (["--ddp-bucket-all-stages"], {}),
    "enqueues_of_a_gpu": (["--log-enqueues", "enqueues"], {}),
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
    "optimizer_runs": (["--optimizer", "adaptive_muon"], {}),  # through its record
    "layer_wise_fp32": (
        ["--optimizer", "muon", "--use-distributed-optimizer"],
        {"use_layer_wise_distributed_optimizer": True, "bf16": False},
    ),
    "optimizer_torch_dist": (
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
            ("--nadamw-beta1", "1"),
            ("--nadamw-beta2", "nan"),
            ("--nadamw-eps", "-1"),
            ("--nadamw-momentum-decay", "inf"),
            ("--normuon-beta2", "1"),
            ("--normuon-eps", "nan"),
            ("--normuon-update-rms", "0"),
        )
    },
    "yaml_cfg": (["--yaml-cfg", "config.yaml"], {}),
    "cpu_context_parallel": (
        ["--cpu", "--context-parallel-size", "2", "--window-size", "8,0"],
        {},
    ),
    "undeferrable_schedule": ([*PIPEDREAM, "--deferred-update"], {}),
    "tied_look_ahead": (
        [*PIPEDREAM, "--delay-correction", "weight-prediction"],
        {},
    ),
    "unequal_batches": (
        [*PIPEDREAM, "--step-batch-size-schedule", "0:4 1280:8"],
        {},
    ),
    "emulate_pipeline_stages_range": (
        [*PIPEDREAM, *ONE_STAGE, "--emulate-pipeline-stages", "0"],
        {},
    ),
    "emulation_in_pipeline": ([*PIPEDREAM, *EMULATED], {}),
    "emulation_uneven": (
        [*PIPEDREAM, *ONE_STAGE, *EMULATED, "--decoder-first-pipeline-num-layers", "3"],
        {},
    ),
    "emulation_router_bias": (
        [*PIPEDREAM, *ONE_STAGE, *EMULATED, *MOE, "--moe-router-enable-expert-bias"],
        {},
    ),
    "emulation_undivided": (
        [*PIPEDREAM, *ONE_STAGE, "--emulate-pipeline-stages", "3"],
        {},
    ),
    "emulation_corrected": (
        [
            *ONE_STAGE,
            *EMULATED,
            "--pipeline-schedule",
            "paci",
            "--delay-correction",
            "weight-prediction",
            "--untie-embeddings-and-output-weights",
            "--global-batch-size",
            "16",
        ],
        {},
    ),
    "no_delay_on_a_single_stage": ([*PIPEDREAM, *ONE_STAGE], {}),
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
    "packed_microbatches": (["--micro-batch-size", "2", "--sft"], {}),
    "variable_seq_lengths": ([], {"variable_seq_lengths": True}),
    "quant_recipe": ([], {"quant_recipe": object()}),
    "use_kitchen": ([], {"use_kitchen": True}),
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
    "moe_single_grouped_weight": ([*MOE, "--moe-single-grouped-weight"], {}),
    "moe_single_grouped_bias": ([*MOE, "--moe-single-grouped-bias"], {}),
    "moe_paged_stash": ([*MOE, "--moe-paged-stash"], {}),
    "moe_expert_rank_capacity_factor": ([*MOE, "--moe-expert-rank-capacity-factor", "1.2"], {}),
    "moe_enable_routing_replay": ([*MOE, "--moe-enable-routing-replay"], {}),
    "use_precision_aware_optimizer": (
        ["--use-precision-aware-optimizer", "--delay-correction", "error-feedback"],
        {},
    ),
    "optimizer_cpu_offload": (["--optimizer-cpu-offload"], {}),
    "qk_clip": (["--qk-clip"], {}),
    "num_distributed_optimizer_instances": (["--num-distributed-optimizer-instances", "2"], {}),
    "grad_norm_skip_threshold": ([], {"grad_norm_skip_threshold": 5.0}),
    "freeze_all_layers": (["--freeze-all-layers"], {}),
    "mtp_before_the_last_stage": (
        [*MTP, *UNTIED, "--pipeline-model-parallel-layout", "Ett|tt|ttm|ttL"],
        {},
    ),
    "mtp_tied": (MTP, {}),
    "mtp_hybrid": ([*MTP, *UNTIED, "--hybrid-layer-pattern", "*-*-*-*-"], {}),
    "decoder_num_layers": (["--decoder-num-layers", "4"], {}),
    "decoder_seq_length": (["--decoder-seq-length", "32"], {}),
    "enable_mhc_connections": ([], {"enable_mhc_connections": True}),
    "mamba_layers": (["--hybrid-layer-pattern", "M*M*M*M*"], {}),
    "hybrid_layer_pattern": (["--hybrid-layer-pattern", "G*G*G*G*"], {}),
    "dsa_indexer_loss_coeff": (["--dsa-indexer-loss-coeff", "0.1"], {}),
    "vision_pretraining": (["--vision-pretraining"], {}),
    "perform_rl_step": (["--perform-rl-step"], {}),
    "iterations_to_skip": (["--iterations-to-skip", "3", "4"], {}),
    "dataloader_save": (["--dataloader-type", "external"], {"dataloader_save": "there"}),
    "full_validation": (["--full-validation"], {}),
    "phase_transition_iterations": (["--phase-transition-iterations", "10"], {}),
    "rerun_report_stats": (["--rerun-mode", "report_stats"], {}),
    "inprocess_restart": (["--inprocess-restart"], {}),
    "adlr_autoresume": (["--adlr-autoresume"], {}),
    "fake_process_group": (["--fake-process-group"], {}),
    "save_wgrads_interval": (["--save-wgrads-interval", "5"], {}),
    "save_dgrads_interval": (["--save-dgrads-interval", "5"], {}),
    "save_activations_interval": (["--save-activations-interval", "5"], {}),
    "save_tokens_per_expert_interval": ([*MOE, "--save-tokens-per-expert-interval", "5"], {}),
    "save_params_interval": (["--save-params-interval", "5"], {}),
    "moe_routing_trace_path": ([*MOE, "--moe-routing-trace-path", "trace"], {}),
    "logits_save_dir": (["--logits-save-dir", "logits"], {}),
    "local_checkpoints_format": ([*LOCAL, "--ckpt-format", "torch"], {}),
    "local_checkpoints_reshardable": (
        [
            *(*LOCAL, "--optimizer", "adam", "--use-distributed-optimizer"),
            "--dist-ckpt-optim-fully-reshardable",
        ],
        {},
    ),
    "local_checkpoints_step": ([*LOCAL, "--ckpt-step", "3"], {}),
    "local_checkpoints_background": (
        [*LOCAL, "--async-save", "--use-persistent-ckpt-worker"],
        {},
    ),
    "cached_handles": (
        [
            "--async-save",
            "--use-persistent-ckpt-worker",
            "--ckpt-assume-constant-structure",
            "--save",
            "checkpoints",
        ],
        {},
    ),
    "ckpt_assume_constant_structure": (
        ["--ckpt-assume-constant-structure", "--async-start-iteration", "5"],
        {},
    ),
    "ckpt_convert_format": (["--ckpt-convert-format", "torch"], {}),
    "moe_use_upcycling": ([*MOE, "--moe-use-upcycling"], {}),
    "sensitive_optimizer": (["--optimizer", "adam"], {}),
    "low_momentum": (["--muon-momentum", "0.5"], {}),
    "delay_correction_strength_idle": (
        ["--delay-correction", "error-feedback", "--delay-correction-strength", "0"],
        {},
    ),
    "stacked_momentum": (["--optimizer", "adam", "--delay-correction", "nesterov"], {}),
    "delay_correction_momentum_idle": (
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
