"""Rules that follow from the deferred update and from what Megatron does around an iteration."""

import math
from typing import Final

from megatron_async.config.validation.rule import (
    Rule,
    Scope,
    Subject,
    dest_of,
    given,
    hybrid_layers,
    rule,
)

__all__ = ["RULES"]

_LAYERS: Final = frozenset("*-EM")
"""Attention, MLP, MoE; Mamba is warned of."""


def _predicts_early(subject: Subject) -> bool:
    layout = subject.get("pipeline_model_parallel_layout")
    before_the_last = layout.rpartition("|")[0] if isinstance(layout, str) else ""
    return bool(subject.get("mtp_num_layers")) and (
        "m" in before_the_last or bool(subject.get("mtp_standalone"))
    )


def _saves_locally(subject: Subject) -> bool:
    return bool(subject.get("non_persistent_ckpt_type") == "local")


_OPTIMIZER = (
    rule(
        "--use-precision-aware-optimizer",
        "the main parameters, which a delay correction changes, are inside of the fused optimizer, "
        "which would overwrite the change",
        "Drop it, or drop --delay-correction.",
        when=lambda s: bool(s.get("use_precision_aware_optimizer")) and s.config.corrected,
    ),
    rule(
        "--optimizer-cpu-offload",
        "copies of parameters and gradients on the host follow one weight version",
    ),
    rule(
        "--qk-clip",
        "it clips right after the step, which then has only been launched, and so the wrong "
        "version",
        "Use --qk-layernorm.",
    ),
    rule(
        "--num-distributed-optimizer-instances",
        "gradient norms over several instances of the distributed optimizer are not tested",
        "Use one instance.",
        when=lambda s: s.get("num_distributed_optimizer_instances", 1) > 1,
    ),
    rule(
        "grad_norm_skip_threshold (optimizer configuration)",
        "whether to skip an update is known only while the next batch is running",
        "Leave it infinite.",
        when=lambda s: math.isfinite(s.get("grad_norm_skip_threshold", math.inf)),
        name="grad_norm_skip_threshold",
    ),
    rule(
        "--optimizer",
        lambda s: (
            f"{s.get('optimizer')} of this Megatron fails in its first step with the "
            "emerging-optimizers that is installed (it is written for 0.2.0)"
        ),
        "Install NVIDIA-NeMo/Emerging-Optimizers at its tag v0.2.0, or use muon or normuon.",
        when=lambda s: s.optimizer is not None and not s.optimizer.runs(),
        name="optimizer_runs",
        scope=Scope.ALWAYS,
    ),
    rule(
        "--use-distributed-optimizer",
        "with an optimizer other than sgd and adam it means Megatron's layer-wise optimizer, which "
        "works in bf16 alone",
        "Add --bf16, or drop it.",
        scope=Scope.ALWAYS,
        when=lambda s: bool(s.get("use_layer_wise_distributed_optimizer")) and not s.get("bf16"),
        name="layer_wise_fp32",
    ),
    rule(
        "--optimizer",
        lambda s: (
            f"Megatron cannot save {s.get('optimizer')}'s state, which has not the parameters' "
            "shapes, in the format torch_dist"
        ),
        "Add --ckpt-format torch.",
        when=lambda s: (
            s.optimizer is not None
            and not s.optimizer.saved_in_torch_dist
            and bool(s.get("save"))
            and not s.get("no_save_optim")
            and s.get("ckpt_format") == "torch_dist"
        ),
        name="optimizer_torch_dist",
    ),
    rule("--freeze-all-layers", "there is nothing to update", "Use the default schedule."),
)

_MODELS = (
    rule(
        "--mtp-num-layers",
        "layers that predict further tokens, on a stage before the last, make it one more stage "
        "with a copy of the word embedding, and one that sends further outputs",
        "Let --pipeline-model-parallel-layout have them (m) on the last stage.",
        when=_predicts_early,
        name="mtp_before_the_last_stage",
    ),
    rule(
        "--mtp-num-layers",
        "with tied embeddings Megatron gives the last of several stages an output layer that it "
        "never uses, cannot save in the format torch_dist, and never reduces",
        "Add --untie-embeddings-and-output-weights.",
        when=lambda s: bool(s.get("mtp_num_layers")) and s.tied and s.stages > 1,
        name="mtp_tied",
    ),
    rule(
        "--mtp-num-layers",
        "hybrid models with multi-token prediction are not tested",
        "Leave out what --hybrid-layer-pattern has behind /.",
        when=lambda s: bool(s.get("mtp_num_layers")) and bool(s.get("hybrid_layer_pattern")),
        name="mtp_hybrid",
    ),
    *(
        rule(
            flag,
            "an encoder-decoder model sends two tensors between stages",
            "Use a decoder-only model.",
            when=given(dest_of(flag)),
        )
        for flag in ("--decoder-num-layers", "--decoder-seq-length")
    ),
    rule(
        "--hybrid-layer-pattern",
        lambda s: (
            f"layers of the kind {', '.join(sorted(hybrid_layers(s) - _LAYERS))} are not tested"
        ),
        "Use * (attention), - (MLP) and E (MoE) layers.",
        when=lambda s: bool(hybrid_layers(s) - _LAYERS),
    ),
    rule(
        "--enable-mhc-connections",
        "several residual streams were not tried with an asynchronous schedule",
    ),
    rule(
        "--dsa-indexer-loss-coeff",
        "the indexer loss takes its scale from the last forward, which may be another batch's",
        "Set it to 0.",
        when=lambda s: (s.get("dsa_indexer_loss_coeff") or 0) > 0,
    ),
    rule(
        "--vision-pretraining",
        "vision models change gradients and weights around the step, which is not at its usual "
        "place",
        "Use the default schedule.",
    ),
    rule(
        "--perform-rl-step",
        "rollouts and inference change the weights and the data between iterations",
        "Use the default schedule.",
    ),
)

_LOOP = (
    rule(
        "--iterations-to-skip",
        "a skipped batch's first microbatches have already been read and run forward",
        "Remove the samples from the data.",
    ),
    rule(
        "dataloader_save (argument)",
        "Megatron saves an external data loader's own state from the first stage, which has read "
        "the first microbatches of the next batch, and a resumed run would leave them out",
        "Leave it empty, and let the loader start behind args.consumed_train_samples.",
        when=lambda s: bool(s.get("dataloader_save")),
        name="dataloader_save",
    ),
    rule(
        "--full-validation",
        "Megatron 0.19 stops at the first evaluation with it, unless there may be several sets",
        "Add --multiple-validation-sets, which takes a single set, too.",
        when=lambda s: bool(s.get("full_validation") and not s.get("multiple_validation_sets")),
    ),
    rule(
        "--phase-transition-iterations",
        "the data of a phase ends with it, and stages read ahead into the next",
        "Start a run of its own for each phase, with --exit-interval.",
    ),
    rule(
        "--rerun-mode",
        "report_stats runs each iteration twice, which a schedule with microbatches in flight "
        "cannot",
        "Use --rerun-mode disabled.",
        when=lambda s: s.get("rerun_mode") == "report_stats",
        name="rerun_report_stats",
    ),
    rule(
        "--inprocess-restart",
        "a restart inside of the process would keep the pipeline's state and its process groups",
        "Let the launcher restart the job.",
    ),
    rule(
        "--adlr-autoresume",
        "it saves and exits at a place of its own, with software that is not public",
        "Use --exit-signal-handler.",
    ),
    rule(
        "--fake-process-group",
        "the update takes the gradient norm from what other stages send, and nothing is sent",
        "Use the default schedule.",
    ),
    rule(
        "--save-wgrads-interval",
        "while updates are deferred, the saved gradients would lack the tied embedding's sum over "
        "stages and the division by the number of tokens",
        "Drop it, or add --no-deferred-update.",
        when=lambda s: bool(s.get("save_wgrads_interval")) and s.config.deferred_update,
    ),
    rule(
        "--save-dgrads-interval",
        "its hooks would miss or mix up microbatches that run forward in one iteration and "
        "backward in the next",
    ),
    *(
        rule(
            flag,
            "an iteration runs forwards of two batches, and the file would hold both under one "
            "number",
        )
        for flag in ("--save-activations-interval", "--save-tokens-per-expert-interval")
    ),
    rule(
        "--save-params-interval",
        "the version that is saved is not the one that its iteration number names",
        "Take the weights from a checkpoint.",
    ),
    rule(
        "--moe-routing-trace-path",
        "an iteration runs forwards of two batches, and the trace would hold both under one number",
    ),
    rule(
        "--logits-save-dir",
        "saving a teacher's logits sets the loss to 0, so there are no updates to make "
        "asynchronous",
        "Use the default schedule.",
    ),
    rule(
        "--ckpt-format",
        "local checkpoints are made of the state that a torch_dist checkpoint holds",
        "Use torch_dist.",
        when=lambda s: _saves_locally(s) and s.get("ckpt_format") != "torch_dist",
        name="local_checkpoints_format",
    ),
    rule(
        "--dist-ckpt-optim-fully-reshardable",
        "Megatron cannot put that form of the optimizer's state into a local checkpoint",
        when=lambda s: (
            _saves_locally(s)
            and bool(s.get("use_distributed_optimizer"))
            and bool(s.get("dist_ckpt_optim_fully_reshardable"))
        ),
        name="local_checkpoints_reshardable",
    ),
    rule(
        "--ckpt-step",
        "Megatron would load a later local checkpoint instead",
        "Drop it, or --non-persistent-ckpt-type.",
        when=lambda s: _saves_locally(s) and bool(s.get("ckpt_step")),
        name="local_checkpoints_step",
    ),
    rule(
        "--async-save",
        "on CPU ranks no local checkpoint was written in the background, and it was not tried on "
        "GPUs",
        "Drop it, or use --non-persistent-ckpt-type global.",
        when=lambda s: _saves_locally(s) and bool(s.get("async_save")),
        name="local_checkpoints_background",
    ),
    rule(
        "--ckpt-assume-constant-structure",
        "what a checkpoint holds changes when the asynchronous part of the run begins",
        "Drop it, or --async-start-iteration.",
        when=lambda s: (
            s.config.start_iteration > 0 and bool(s.get("ckpt_assume_constant_structure"))
        ),
    ),
    rule(
        "--use-persistent-ckpt-worker",
        "with --ckpt-assume-constant-structure the worker keeps handles of the device memory that "
        "it saw first, and the newest weights take turns with two memories: it would save the two "
        "versions swapped, without a word",
        "Drop --ckpt-assume-constant-structure.",
        when=lambda s: bool(
            s.get("async_save")
            and s.get("use_persistent_ckpt_worker")
            and s.get("ckpt_assume_constant_structure")
        ),
        name="cached_handles",
    ),
    rule(
        "--ckpt-convert-format",
        "the conversion would drop the state of the asynchronous run",
        "Convert with the default schedule; the newest weights are kept.",
    ),
    rule(
        "--moe-use-upcycling",
        "it builds and saves a second model before training",
        "Upcycle with the default schedule, then load the result.",
    ),
)

RULES: Final[tuple[Rule, ...]] = (*_OPTIMIZER, *_MODELS, *_LOOP)
