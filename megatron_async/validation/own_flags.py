"""Rules on this package's own flags, and on the Megatron that it is used with."""

import math
from collections.abc import Callable
from typing import Final

from megatron_async.validation.rule import TESTED_MEGATRON, Rule, Scope, Subject, dest_of, rule

__all__ = ["RULES"]


def _tested(version: str) -> bool:
    return ".".join(version.split("+")[0].split(".")[:2]) in TESTED_MEGATRON


def _tied(subject: Subject) -> bool:
    return subject.stages > 1 and not subject.get("untie_embeddings_and_output_weights", False)


def _without_schedule(dest: str, default: object) -> Callable[[Subject], bool]:
    return lambda s: not s.config.asynchronous and getattr(s.args, dest, default) != default


RULES: Final[tuple[Rule, ...]] = (
    rule(
        "--pipeline-schedule",
        lambda s: f"there is no schedule {s.config.schedule!r}",
        "Known ones are listed by --help.",
        when=lambda s: s.config.schedule not in s.facts.schedules,
        scope=Scope.ALWAYS,
    ),
    rule(
        "--delay-correction",
        lambda s: f"there is no correction {s.config.correction!r}",
        "Known ones are listed by --help.",
        when=lambda s: s.config.correction not in s.facts.corrections,
        scope=Scope.ALWAYS,
    ),
    rule(
        "--delay-correction",
        "with the default schedule no gradient is delayed",
        "Add --pipeline-schedule pipedream-2bw, or drop it.",
        when=lambda s: s.config.corrected and not s.config.asynchronous,
        name="correction_without_delay",
        scope=Scope.ALWAYS,
    ),
    rule(
        "--delay-correction-strength",
        lambda s: f"{s.config.correction_strength} is not a strength",
        "Give a finite number >= 0; 1 corrects in full.",
        when=lambda s: (
            not math.isfinite(s.config.correction_strength) or s.config.correction_strength < 0
        ),
        scope=Scope.ALWAYS,
    ),
    rule(
        "--delay-correction-strength",
        "no correction is chosen that it could scale",
        "Add --delay-correction error-feedback, or drop it.",
        when=lambda s: s.config.correction_strength != 1.0 and not s.config.corrected,
        name="strength_without_correction",
        scope=Scope.ALWAYS,
    ),
    rule(
        "--async-start-iteration",
        lambda s: f"{s.config.start_iteration} is not a number of iterations",
        "Give an integer >= 0.",
        when=lambda s: s.config.start_iteration < 0,
        scope=Scope.ALWAYS,
    ),
    *(
        rule(
            flag,
            "it belongs to an asynchronous schedule",
            "Add --pipeline-schedule pipedream-2bw, or drop it.",
            when=_without_schedule(dest_of(flag), default),
            name=f"{dest_of(flag)}_with_default_schedule",
            scope=Scope.ALWAYS,
        )
        for flag, default in (
            ("--async-start-iteration", 0),
            ("--deferred-update", None),
            ("--grad-norm-scope", "global"),
            ("--second-grad-buffer", False),
        )
    ),
    rule(
        "--grad-norm-scope",
        "a norm per stage is taken by the deferred update alone",
        "Drop --no-deferred-update, or use --grad-norm-scope global.",
        when=lambda s: s.config.grad_norm_scope == "stage" and not s.config.deferred_update,
        name="stage_norm_undeferred",
    ),
    rule(
        "--grad-norm-scope",
        "the first and the last stage share the embedding and would clip it by different norms, so "
        "that their copies drift apart",
        "Use --grad-norm-scope global, or --untie-embeddings-and-output-weights.",
        when=lambda s: s.config.grad_norm_scope == "stage" and _tied(s),
        name="stage_norm_tied",
    ),
    rule(
        "--second-grad-buffer",
        "without the deferred update nothing runs while the gradients are reduced",
        "Drop it, or drop --no-deferred-update.",
        when=lambda s: s.config.second_grad_buffer and not s.config.deferred_update,
    ),
    rule(
        "--second-grad-buffer",
        "gradients accumulated outside of the buffer are not doubled",
        "Drop it, or drop --ddp-param-name-patterns-for-fp32-local-accumulation.",
        when=lambda s: (
            s.config.second_grad_buffer
            and bool(s.get("ddp_param_name_patterns_for_fp32_local_accumulation"))
        ),
        name="second_grad_buffer_local_accumulation",
    ),
    rule(
        "--pipeline-schedule",
        lambda s: (
            f"megatron-core {s.facts.megatron_version} is not a release that this package was "
            f"tested with, and it replaces parts of Megatron"
        ),
        f"Install megatron-core {', '.join(f'{v}.*' for v in TESTED_MEGATRON)}.",
        when=lambda s: not _tested(s.facts.megatron_version),
        name="megatron_version",
        scope=Scope.ALWAYS,
    ),
    rule(
        "--yaml-cfg",
        "Megatron then ignores the command line, and with it the flags of this package",
        "Give all of the arguments as flags.",
        scope=Scope.ALWAYS,
    ),
    rule(
        "--context-parallel-size",
        "context parallelism needs Transformer Engine, which does not run on CPU ranks",
        "Drop --cpu, or use --context-parallel-size 1.",
        when=lambda s: s.config.cpu and s.get("context_parallel_size", 1) > 1,
        name="cpu_context_parallel",
        scope=Scope.ALWAYS,
    ),
)
