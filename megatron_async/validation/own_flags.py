"""Rules on this package's own flags, and on the Megatron that it is used with."""

import math
from collections.abc import Callable
from typing import Final

from megatron_async.arguments import CORRECTIONS, SCHEDULES, AsyncConfig
from megatron_async.corrections.catalogue import CATALOGUE
from megatron_async.validation.rule import TESTED_MEGATRON, Rule, Scope, Subject, dest_of, rule

__all__ = ["RULES"]

_BASIS_ROTATION: Final = "basis-rotation"
_ADAPTING: Final = tuple(kind.name for kind in CATALOGUE.values() if kind.adapts)
_ANY_DELAY: Final = tuple(kind.name for kind in CATALOGUE.values() if kind.any_delay)
_ONE_STEP: Final = ("default", "pipedream-2bw")
"""Schedules whose delay is at most one step."""


def _tested(version: str) -> bool:
    return ".".join(version.split("+")[0].split(".")[:2]) in TESTED_MEGATRON


def _tied(subject: Subject) -> bool:
    return subject.stages > 1 and not subject.get("untie_embeddings_and_output_weights", False)


def _without_schedule(dest: str, default: object) -> Callable[[Subject], bool]:
    return lambda s: not s.config.asynchronous and getattr(s.args, dest, default) != default


_RANGES: Final[tuple[tuple[tuple[str, ...], str, Callable[[float], bool]], ...]] = (
    (
        (
            *("--adan-beta1", "--adan-beta2", "--adan-beta3"),
            *("--mars-beta1", "--mars-beta2", "--normuon-beta2"),
        ),
        "a number of at least 0 and below 1",
        lambda value: 0.0 <= value < 1.0,
    ),
    (
        ("--adan-eps", "--mars-eps", "--normuon-eps", "--mars-gamma"),
        "a finite number of at least 0",
        lambda value: 0.0 <= value < math.inf,
    ),
    (
        ("--normuon-update-rms",),
        "a finite number above 0",
        lambda value: 0.0 < value < math.inf,
    ),
)
"""Flags of this package's optimizers, and what they take."""


def _outside(dest: str, fits: Callable[[float], bool]) -> Callable[[Subject], bool]:
    def outside(subject: Subject) -> bool:
        value = subject.get(dest)
        return value is not None and not fits(value)

    return outside


def _is_no(dest: str, what: str) -> Callable[[Subject], str]:
    return lambda subject: f"{subject.get(dest)} is not {what}"


RULES: Final[tuple[Rule, ...]] = (
    rule(
        "--pipeline-schedule",
        lambda s: f"there is no schedule {s.config.schedule!r}",
        f"Use {' or '.join(SCHEDULES)}.",
        when=lambda s: s.config.schedule not in s.facts.schedules,
        scope=Scope.ALWAYS,
    ),
    rule(
        "--delay-correction",
        lambda s: f"there is no correction {s.config.correction!r}",
        f"Use {' or '.join(CORRECTIONS)}.",
        when=lambda s: (
            s.config.correction not in s.facts.corrections
            and s.config.correction != _BASIS_ROTATION
        ),
        scope=Scope.ALWAYS,
    ),
    rule(
        "--delay-correction",
        "basis rotation (arXiv 2602.03515) is no correction of an update but an optimizer: Adam in "
        "the eigenbasis of its gradients",
        "Use --optimizer soap --no-soap-use-kl-shampoo, which is that, and another correction or "
        "none.",
        when=lambda s: s.config.correction == _BASIS_ROTATION,
        name="basis_rotation",
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
        "--delay-correction-strength",
        lambda s: f"{s.config.correction} has no strength",
        "Drop it.",
        when=lambda s: (
            s.config.correction_strength != 1.0
            and s.config.correction_kind is not None
            and not s.config.correction_kind.scaled
        ),
        name="strength_of_unscaled_correction",
        scope=Scope.ALWAYS,
    ),
    rule(
        "--delay-correction-adaptive-strength",
        lambda s: (
            f"{s.config.correction} has no adaptive strength"
            if s.config.corrected
            else "no correction is chosen whose strength could adapt"
        ),
        f"Add --delay-correction {' or '.join(_ADAPTING)}, or drop it.",
        when=lambda s: s.config.correction_adapts and s.config.correction not in _ADAPTING,
        name="adaptive_strength",
        scope=Scope.ALWAYS,
    ),
    rule(
        "--delay-correction-momentum",
        lambda s: f"{s.config.correction_momentum} is not a momentum",
        "Give a number of at least 0 and below 1.",
        when=lambda s: not 0.0 <= s.config.correction_momentum < 1.0,
        scope=Scope.ALWAYS,
    ),
    rule(
        "--delay-correction-momentum",
        "it belongs to --delay-correction nesterov",
        "Add that, or drop it.",
        when=lambda s: (
            s.config.correction_momentum != AsyncConfig.correction_momentum
            and not (s.config.correction_kind is not None and s.config.correction_kind.has_momentum)
        ),
        name="momentum_without_nesterov",
        scope=Scope.ALWAYS,
    ),
    rule(
        "--delay-correction",
        lambda s: (
            f"{s.config.correction} is defined for a delay of one step, and the delay of "
            f"{s.config.schedule} differs between stages"
        ),
        f"Use --delay-correction {' or '.join(_ANY_DELAY)}, or --pipeline-schedule pipedream-2bw.",
        when=lambda s: (
            s.config.correction_kind is not None
            and not s.config.correction_kind.any_delay
            and s.config.schedule not in _ONE_STEP
        ),
        name="correction_of_one_step",
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
            "it belongs to an asynchronous schedule"
            + (", and so does --no-deferred-update" if flag == "--deferred-update" else ""),
            "Add --pipeline-schedule pipedream-2bw, or drop it.",
            when=_without_schedule(dest_of(flag), default),
            name=f"{dest_of(flag)}_with_default_schedule",
            scope=Scope.ALWAYS,
        )
        for flag, default in (
            ("--async-start-iteration", 0),
            ("--deferred-update", None),
            ("--emulate-pipeline-stages", None),
            ("--grad-norm-scope", "global"),
            ("--second-grad-buffer", False),
        )
    ),
    rule(
        "--grad-norm-scope",
        "a norm per stage is taken by the deferred update of pipedream-2bw alone",
        "Use --grad-norm-scope global, or --pipeline-schedule pipedream-2bw without "
        "--no-deferred-update.",
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
        "without the deferred update of pipedream-2bw nothing runs while the gradients are reduced",
        "Drop it, or use --pipeline-schedule pipedream-2bw without --no-deferred-update.",
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
    *(
        rule(
            flag,
            _is_no(dest_of(flag), what),
            f"Give {what}.",
            when=_outside(dest_of(flag), fits),
            name=f"{dest_of(flag)}_range",
            scope=Scope.ALWAYS,
        )
        for flags, what, fits in _RANGES
        for flag in flags
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
