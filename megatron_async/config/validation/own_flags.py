"""Rules on this package's own flags, and on the Megatron that it is used with.

Those of schedules, corrections and optimizers are made from their records, so that a registered one
is checked as those that come with the package.
"""

import math
import os
from collections.abc import Callable, Iterator
from typing import Any, Final

from megatron_async.config.arguments import flags
from megatron_async.config.validation.rule import Rule, Scope, Subject, dest_of, rule
from megatron_async.config.validation.schedule import longer_delays
from megatron_async.corrections import CORRECTIONS, RECOMMENDED
from megatron_async.megatron import releases
from megatron_async.optimizers import OPTIMIZERS
from megatron_async.registry import Flag, Registry
from megatron_async.schedules import RECOMMENDED as SCHEDULE
from megatron_async.schedules import SCHEDULES, asynchronous_names

__all__ = ["RULES", "registry_rules"]

_BASIS_ROTATION: Final = "basis-rotation"


def _names(names: list[str] | tuple[str, ...]) -> str:
    return " or ".join(names)


def _extra_warmups() -> str:
    return _names([each.name for each in SCHEDULES if each.extra_warmup])


def _deferrable() -> str:
    return _names([each.name for each in SCHEDULES if each.asynchronous and each.deferrable])


def _without_schedule(dest: str, default: object) -> Callable[[Subject], bool]:
    return lambda s: not s.config.asynchronous and getattr(s.args, dest, default) != default


def _any_delay() -> str:
    return _names([each.name for each in CORRECTIONS if each.any_delay])


_CONNECTIONS: Final = "CUDA_DEVICE_MAX_CONNECTIONS"

RULES: Final[tuple[Rule, ...]] = (
    rule(
        "--pipeline-schedule",
        lambda s: f"there is no schedule {s.config.schedule!r}",
        lambda s: f"Use {_names(asynchronous_names())}.",
        when=lambda s: s.config.schedule not in asynchronous_names(),
        scope=Scope.ALWAYS,
    ),
    rule(
        "--delay-correction",
        lambda s: f"there is no correction {s.config.correction!r}",
        lambda s: f"Use {_names(CORRECTIONS.names)}.",
        when=lambda s: s.config.correction not in (*CORRECTIONS.names, _BASIS_ROTATION),
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
        f"Add --pipeline-schedule {SCHEDULE}, or drop it.",
        when=lambda s: s.config.corrected and not s.config.asynchronous,
        name="correction_without_delay",
        scope=Scope.ALWAYS,
    ),
    rule(
        "--delay-correction",
        lambda s: (
            f"{s.config.correction} is defined for a delay of one step, and the delay of "
            f"{s.config.schedule} differs between stages"
        ),
        lambda s: f"Use --delay-correction {_any_delay()}, or --pipeline-schedule {SCHEDULE}.",
        when=lambda s: (
            s.config.correction_record is not None
            and not s.config.correction_record.any_delay
            and longer_delays(s)
        ),
        name="correction_of_one_step",
    ),
    rule(
        "--delay-correction",
        lambda s: (
            f"{s.config.correction} makes {s.get('optimizer')} worse in all that was measured: its "
            "update is a sign, and where that flips the correction adds two steps to one"
        ),
        "Drop it, or use another optimizer.",
        when=lambda s: (
            s.config.correction == RECOMMENDED
            and s.optimizer is not None
            and s.optimizer.sign_update
        ),
        name="correction_of_signs",
        warning=True,
    ),
    rule(
        "--delay-correction",
        lambda s: (
            f"{s.config.correction} looks ahead by the delay, and with {s.config.schedule} the two "
            "uses of a tied embedding have different ones"
        ),
        "Add --untie-embeddings-and-output-weights and drop --mtp-num-layers, or use another "
        "correction.",
        when=lambda s: (
            s.config.correction_record is not None
            and s.config.correction_record.looks_ahead
            and s.embedding_copied
            and longer_delays(s)
        ),
        name="tied_look_ahead",
    ),
    *(
        rule(
            flag,
            "it belongs to an asynchronous schedule"
            + (", and so does --no-deferred-update" if flag == "--deferred-update" else ""),
            f"Add --pipeline-schedule {SCHEDULE}, or drop it.",
            when=_without_schedule(dest_of(flag), default),
            name=f"{dest_of(flag)}_with_default_schedule",
            scope=Scope.ALWAYS,
        )
        for flag, default in (
            ("--async-start-iteration", 0),
            ("--deferred-update", None),
            ("--grad-norm-scope", "global"),
            ("--second-grad-buffer", False),
            ("--ddp-bucket-all-stages", False),
            ("--pipeline-extra-warmup", 0),
        )
    ),
    rule(
        "--pipeline-extra-warmup",
        lambda s: f"{s.config.schedule} has no more microbatches in flight than 1F1B",
        lambda s: f"Use --pipeline-schedule {_extra_warmups()}, or drop it.",
        when=lambda s: (
            s.config.extra_warmup > 0
            and s.config.schedule_record is not None
            and not s.config.schedule_record.extra_warmup
        ),
        name="no_extra_warmup",
    ),
    rule(
        "--pipeline-extra-warmup",
        lambda s: (
            f"{s.config.extra_warmup} links between stages are to be made up for, and there "
            f"{'is 1' if s.stages == 2 else f'are {s.stages - 1}'}"
        ),
        lambda s: f"Give at most {s.stages - 1}." if s.stages > 1 else "Drop it.",
        when=lambda s: s.config.extra_warmup > s.stages - 1,
        name="extra_warmup_stages",
    ),
    rule(
        "--deferred-update",
        lambda s: (
            f"the gradients of {s.config.schedule}'s last stage have no delay, so that its next "
            "forward has to wait for the update"
        ),
        "Drop it.",
        when=lambda s: (
            s.config.schedule_record is not None
            and not s.config.schedule_record.deferrable
            and s.config.deferred_update
        ),
        name="undeferrable_schedule",
    ),
    rule(
        "--grad-norm-scope",
        lambda s: f"a norm per stage is taken by the deferred update of {_deferrable()} alone",
        lambda s: (
            f"Use --grad-norm-scope global, or --pipeline-schedule {_deferrable()} without "
            "--no-deferred-update."
        ),
        when=lambda s: s.config.grad_norm_scope == "stage" and not s.config.deferred_update,
        name="stage_norm_undeferred",
    ),
    rule(
        "--grad-norm-scope",
        "the first and the last stage share the embedding and would clip it by different norms, so "
        "that their copies drift apart",
        "Use --grad-norm-scope global, or --untie-embeddings-and-output-weights and no "
        "--mtp-num-layers.",
        when=lambda s: s.config.grad_norm_scope == "stage" and s.stages > 1 and s.embedding_copied,
        name="stage_norm_tied",
    ),
    rule(
        "--second-grad-buffer",
        lambda s: (
            f"without the deferred update of {_deferrable()} nothing runs while the gradients are "
            "reduced"
        ),
        lambda s: (
            f"Drop it, or use --pipeline-schedule {_deferrable()} without --no-deferred-update."
        ),
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
        "--second-grad-buffer",
        "--ddp-reduce-scatter-with-fp32-accumulation finishes one reduction when the next one "
        "starts, and the two buffers' are in flight at once",
        "Drop either.",
        when=lambda s: (
            s.config.second_grad_buffer and bool(s.get("ddp_reduce_scatter_with_fp32_accumulation"))
        ),
        name="second_grad_buffer_fp32_accumulation",
    ),
    rule(
        "--ddp-bucket-all-stages",
        "without it each stage reduces its gradients at once, after the last backward",
        "Add --overlap-grad-reduce, or drop it.",
        when=lambda s: s.config.bucket_all_stages and not s.get("overlap_grad_reduce"),
        name="bucket_all_stages_overlap",
    ),
    rule(
        "--ddp-bucket-all-stages",
        f"with {_CONNECTIONS}=1 a bucket's reduction that waits for the one before it holds up "
        "the backward launched after it",
        f"Set {_CONNECTIONS}=32, or drop it.",
        when=lambda s: (
            s.config.bucket_all_stages
            and bool(s.get("overlap_grad_reduce"))
            and not s.config.cpu
            and os.environ.get(_CONNECTIONS) == "1"
        ),
        name="bucket_all_stages_connections",
        warning=True,
    ),
    rule(
        "--log-enqueues",
        "what a GPU is given is recorded on CPU ranks; a GPU has profilers of its own",
        "Add --cpu, or drop it.",
        when=lambda s: s.config.log_enqueues is not None and not s.config.cpu,
        name="enqueues_of_a_gpu",
        scope=Scope.ALWAYS,
    ),
    rule(
        "--pipeline-schedule",
        lambda s: (
            f"megatron-core {s.facts.megatron_version} is not a release that this package was "
            f"tested with, and it replaces parts of Megatron"
        ),
        f"Install a megatron-core that is {releases.VERSIONS}.",
        when=lambda s: not releases.is_supported(s.facts.megatron_version),
        name="megatron_version",
        scope=Scope.ALWAYS,
    ),
    rule(
        "--window-size",
        "on CPU ranks, window attention does not work with context parallelism",
        "Drop --cpu, or use --context-parallel-size 1.",
        when=lambda s: (
            s.config.cpu
            and s.get("context_parallel_size", 1) > 1
            and s.get("window_size") is not None
        ),
        name="cpu_context_parallel",
        scope=Scope.ALWAYS,
    ),
    rule(
        "--yaml-cfg",
        "Megatron then ignores the command line, and with it the flags of this package",
        "Give all of the arguments as flags.",
        scope=Scope.ALWAYS,
    ),
)


def registry_rules() -> Iterator[Rule]:
    """Make the rules on the flags that belong to schedules, corrections and optimizers."""
    for flag in {**flags(), **OPTIMIZERS.flags}.values():
        if flag.takes:
            yield _range(flag)
    for dest, flag in SCHEDULES.flags.items():
        yield _misplaced(SCHEDULES, flag, dest, lambda s: s.config.schedule)
    for dest, flag in CORRECTIONS.flags.items():
        yield _misplaced(CORRECTIONS, flag, dest, lambda s: s.config.correction)
        if flag.idle is not None:
            yield _idle(flag)


def _range(flag: Flag) -> Rule:
    def outside(subject: Subject) -> bool:
        value = subject.get(flag.dest, flag.default)
        wrong = isinstance(value, float) and math.isnan(value)
        return wrong or (value is not None and not flag.fits(value))

    return rule(
        flag.name,
        lambda s: f"{s.get(flag.dest, flag.default)} is not {flag.takes.partition(';')[0]}",
        f"Give {flag.takes}.",
        when=outside,
        name=f"{flag.dest}_range",
        scope=Scope.ALWAYS,
    )


def _misplaced(
    registry: Registry[Any],
    flag: Flag,
    dest: str,
    chosen: Callable[[Subject], str],
) -> Rule:
    """A rule against a flag whose record was not chosen."""

    def applies(subject: Subject) -> bool:
        given = getattr(subject.args, dest, flag.default) != flag.default
        return given and chosen(subject) not in registry.owners(dest)

    return rule(
        flag.name,
        lambda s: (
            f"it belongs to {registry.flag} {_names(registry.owners(dest))}, and "
            f"{registry.flag} is {chosen(s)}"
        ),
        "Add that, or drop it.",
        when=applies,
        name=f"{dest}_misplaced",
        scope=Scope.ALWAYS,
    )


def _idle(flag: Flag) -> Rule:
    return rule(
        flag.name,
        f"{flag.idle:g} leaves the updates as they are, and the buffer is kept all the same",
        "Drop --delay-correction, or give a value above it.",
        when=lambda s: (
            s.config.corrected and s.config.correction_settings.get(flag.dest) == flag.idle
        ),
        name=f"{flag.dest}_idle",
        warning=True,
    )
