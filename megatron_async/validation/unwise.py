"""Rules that warn of what runs but is unwise."""

import math
from typing import Final

from megatron_async.arguments import NO_CORRECTION
from megatron_async.validation.rule import Rule, Subject, dest_of, rule

__all__ = ["RULES"]

_LEAST_MOMENTUM: Final = 0.9


def _momentum(subject: Subject) -> tuple[str, float]:
    """(flag, value) of the chosen optimizer's momentum; -1 for one that this package does not
    know."""
    optimizer = str(subject.get("optimizer", ""))
    flags = {
        "sgd": "--sgd-momentum",
        "muon": "--muon-momentum",
        "dist_muon": "--muon-momentum",
        "adaptive_muon": "--muon-momentum",
        "adam": "--adam-beta1",
        "soap": "--adam-beta1",
        "lion": "--lion-beta1",
    }
    flag = flags.get(optimizer)
    return ("", -1.0) if flag is None else (flag, float(subject.get(dest_of(flag), -1.0)))


def _weak_momentum(subject: Subject) -> bool:
    return 0 <= _momentum(subject)[1] < _LEAST_MOMENTUM


RULES: Final[tuple[Rule, ...]] = (
    rule(
        "--optimizer",
        "AdamW bears the delay worse than Muon does",
        "Consider --delay-correction error-feedback, or --optimizer muon.",
        when=lambda s: (
            s.get("optimizer") == "adam"
            and (s.config.correction == NO_CORRECTION or s.config.correction_strength == 0)
        ),
        name="adam_uncorrected",
        warning=True,
    ),
    rule(
        "--optimizer",
        lambda s: (
            f"{_momentum(s)[0]} {_momentum(s)[1]} is low; a delay is borne the better, the higher "
            "the momentum is"
        ),
        f"Consider {_LEAST_MOMENTUM} or more.",
        when=_weak_momentum,
        name="low_momentum",
        warning=True,
    ),
    rule(
        "--delay-correction-strength",
        "0 leaves the updates as they are, and the buffer is kept all the same",
        "Drop --delay-correction, or give a strength above 0.",
        when=lambda s: s.config.corrected and s.config.correction_strength == 0,
        name="zero_strength",
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
        "--rampup-batch-size",
        "Megatron 0.19 ignores it",
        "Use --step-batch-size-schedule.",
        warning=True,
    ),
)
