"""Rules that warn of what runs but is unwise."""

import math
from collections.abc import Callable
from typing import Final

from megatron_async.arguments import NO_CORRECTION
from megatron_async.validation.rule import Rule, Subject, dest_of, rule

__all__ = ["RULES"]

_LEAST_MOMENTUM: Final = 0.9
_SENSITIVE: Final = {"adam": "AdamW", "mars": "MARS"}  # arXiv 2606.30634: their loss suffers most


_MOMENTUM: Final = {
    "--sgd-momentum": ("sgd",),
    "--muon-momentum": ("muon", "dist_muon", "adaptive_muon", "normuon"),
    "--adam-beta1": ("adam", "soap"),
    "--lion-beta1": ("lion",),
    "--adan-beta1": ("adan",),
    "--mars-beta1": ("mars",),
}
"""Momentum flag -> the optimizers that use it for all matrices."""


def _low(flag: str) -> Callable[[Subject], bool]:
    return lambda s: (
        s.config.correction != "nesterov"  # which has the momentum
        and s.get("optimizer") in _MOMENTUM[flag]
        and float(s.get(dest_of(flag), _LEAST_MOMENTUM)) < _LEAST_MOMENTUM
    )


RULES: Final[tuple[Rule, ...]] = (
    rule(
        "--optimizer",
        lambda s: f"{_SENSITIVE[s.get('optimizer')]} bears the delay worse than Muon does",
        "Consider --delay-correction error-feedback, or --optimizer muon.",
        when=lambda s: (
            s.get("optimizer") in _SENSITIVE
            and (s.config.correction == NO_CORRECTION or s.config.correction_strength == 0)
        ),
        name="sensitive_optimizer",
        warning=True,
    ),
    *(
        rule(
            flag,
            "a delay is borne the better, the higher the momentum is, and this is low",
            f"Consider {_LEAST_MOMENTUM} or more.",
            when=_low(flag),
            warning=True,
        )
        for flag in _MOMENTUM
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
        "--delay-correction-momentum",
        "0 leaves the updates as they are, and the buffer is kept all the same",
        "Drop --delay-correction, or give a momentum above 0.",
        when=lambda s: s.config.correction_momentum == 0,
        name="zero_momentum",
        warning=True,
    ),
    rule(
        "--delay-correction",
        "the momentum of nesterov comes on top of Adam's own, and the two delay each other",
        "Consider --adam-beta1 0.",
        when=lambda s: (
            s.config.correction == "nesterov"
            and s.get("optimizer") == "adam"
            and s.get("adam_beta1", 0.9) > 0
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
        "--rampup-batch-size",
        "Megatron 0.19 ignores it",
        "Use --step-batch-size-schedule.",
        warning=True,
    ),
)
