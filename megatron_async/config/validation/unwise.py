"""Rules that warn of what runs but is unwise."""

import math
from typing import Final

from megatron_async.config.validation.rule import Rule, Subject, dest_of, hybrid_layers, rule
from megatron_async.config.validation.schedule import least_microbatches, longer_delays
from megatron_async.corrections import RECOMMENDED
from megatron_async.corrections.correction import STRENGTH

__all__ = ["RULES"]

_LEAST_MOMENTUM: Final = 0.9


def _momentum(subject: Subject) -> float | None:
    """The optimizer's own momentum, None where there is none or it is not known."""
    record = subject.optimizer
    if record is None or record.momentum_flag is None:
        return None
    value = subject.get(dest_of(record.momentum_flag))
    return None if value is None else float(value)


def _momentum_flag(subject: Subject) -> str:
    record = subject.optimizer
    return (record.momentum_flag if record is not None else None) or "--optimizer"


def _has_own_momentum(subject: Subject) -> bool:
    record = subject.config.correction_record
    return record is not None and record.has_momentum


RULES: Final[tuple[Rule, ...]] = (
    rule(
        "--optimizer",
        lambda s: (
            f"{s.optimizer.title if s.optimizer else ''} bears the delay worse than Muon does"
        ),
        lambda s: (
            f"Consider --delay-correction {RECOMMENDED}, or --optimizer muon."
            if not longer_delays(s)
            else "Consider --optimizer muon."
        ),
        when=lambda s: (
            any(s.delays(max(least_microbatches(s), 1)))
            and s.optimizer is not None
            and s.optimizer.sensitive
            and (not s.config.corrected or s.config.correction_settings.get(STRENGTH.dest) == 0)
        ),
        name="sensitive_optimizer",
        warning=True,
    ),
    rule(
        "--optimizer",
        lambda s: (
            f"a delay is borne the better, the higher the momentum is, and {_momentum_flag(s)} "
            f"{_momentum(s):g} is low"
        ),
        f"Consider {_LEAST_MOMENTUM} or more.",
        when=lambda s: (
            not _has_own_momentum(s)
            and (momentum := _momentum(s)) is not None
            and momentum < _LEAST_MOMENTUM
        ),
        name="low_momentum",
        warning=True,
    ),
    rule(
        "--delay-correction",
        lambda s: (
            f"the momentum of {s.config.correction} comes on top of the optimizer's own, and the "
            "two delay each other"
        ),
        lambda s: f"Consider {_momentum_flag(s)} 0.",
        when=lambda s: (
            _has_own_momentum(s)
            and s.optimizer is not None
            and s.optimizer.momentum_optional
            and (_momentum(s) or 0.0) > 0
        ),
        name="stacked_momentum",
        warning=True,
    ),
    rule(
        "--async-start-iteration",
        "the run ends before its asynchronous part begins",
        "Lower it, or raise --train-iters.",
        when=lambda s: 0 < (s.get("train_iters") or math.inf) <= s.config.start_iteration,
        name="never_asynchronous",
        warning=True,
    ),
    rule(
        "--grad-norm-scope",
        "gradients are not clipped, so its only use is the log",
        "Give --clip-grad above 0, or drop it.",
        when=lambda s: s.config.grad_norm_scope == "stage" and s.get("clip_grad", 1.0) == 0.0,
        name="stage_norm_unclipped",
        warning=True,
    ),
    rule(
        "--second-grad-buffer",
        "there is one data-parallel replica, so there is no reduction to hide",
        when=lambda s: s.config.second_grad_buffer and s.replicas == 1,
        name="second_grad_buffer_unused",
        warning=True,
    ),
    rule(
        "--timing-log-level",
        "timers above level 0 put a barrier over all ranks into each iteration, which stops the "
        "pipeline",
        "Use it to look for a fault, not to train; --no-barrier-with-level-1-timing helps.",
        when=lambda s: s.get("timing_log_level", 0) > 0,
        warning=True,
    ),
    rule(
        "--empty-unused-memory-level",
        "emptying the allocator's cache waits for the whole device in each iteration",
        "Use level 0.",
        warning=True,
    ),
    rule(
        "--train-sync-interval",
        "it waits for the whole device, and so for what other stages have yet to send",
        warning=True,
    ),
    *(
        rule(
            flag,
            "it gathers from all ranks at each log line, which costs one pipeline bubble",
            "Raise --log-interval.",
            warning=True,
        )
        for flag in ("--log-energy", "--log-straggler")
    ),
    rule(
        "--gpu-sniff-test-interval",
        "each test waits for all ranks, which costs one pipeline bubble",
        "Choose a long interval.",
        warning=True,
    ),
    rule(
        "--hybrid-layer-pattern",
        "Mamba layers need a GPU, and were not tried with an asynchronous schedule",
        "Compare its first losses with another number of pipeline stages.",
        when=lambda s: "M" in hybrid_layers(s),
        name="mamba_layers",
        warning=True,
    ),
    rule(
        "--rampup-batch-size",
        "Megatron 0.19 ignores it",
        "Use --step-batch-size-schedule.",
        warning=True,
    ),
)
