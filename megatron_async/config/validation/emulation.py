"""Rules on training one stage with the delays of several, and on schedules that need several."""

from typing import Any, Final

from megatron_async.config.validation.rule import Rule, Subject, dest_of, rule
from megatron_async.schedules.emulation import EMULATE_PIPELINE_STAGES
from megatron_async.schedules.fresh_2bw import DELAYED_MICROBATCHES, FRESH_2BW

__all__ = ["RULES"]

_FLAG: Final = EMULATE_PIPELINE_STAGES.name
_UNEVEN: Final = (
    "--decoder-first-pipeline-num-layers",
    "--decoder-last-pipeline-num-layers",
    "--account-for-embedding-in-pipeline-split",
    "--account-for-loss-in-pipeline-split",
    "--pipeline-model-parallel-layout",
    "--hybrid-layer-pattern",
    "--mtp-num-layers",
)
"""Flags that give stages unequal numbers of layers, or layers of unequal kinds."""


def _uneven(subject: Subject) -> str | None:
    return next((flag for flag in _UNEVEN if subject.get(dest_of(flag))), None)


def _router_bias(subject: Subject) -> str | None:
    """The flag by which routers have biases that updates change."""
    if subject.get("num_experts") is None:
        return None
    if subject.get("moe_router_enable_expert_bias"):
        return "--moe-router-enable-expert-bias"
    balancing = subject.get("moe_router_load_balancing_type", "none")
    if "quantile_balancing" in ([balancing] if isinstance(balancing, str) else balancing):
        return "--moe-router-load-balancing-type quantile_balancing"
    return None


def _drifts(subject: Subject) -> bool:
    record = subject.config.schedule_record
    return record is not None and record.drifts


def _layers(subject: Subject) -> Any:
    return subject.get("num_layers")


RULES: Final[tuple[Rule, ...]] = (
    rule(
        _FLAG,
        lambda s: f"it emulates a pipeline on one stage, and there are {s.stages}",
        "Use --pipeline-model-parallel-size 1, or drop it.",
        when=lambda s: s.emulated is not None and s.stages > 1,
        name="emulation_in_pipeline",
    ),
    rule(
        _FLAG,
        lambda s: f"layers are spread evenly over the emulated stages, and {_uneven(s)} is given",
        "Drop either.",
        when=lambda s: s.emulated is not None and _uneven(s) is not None,
        name="emulation_uneven",
    ),
    rule(
        _FLAG,
        lambda s: (
            "older versions are kept of parameters alone, not of the biases by which routers "
            f"balance the experts, and {_router_bias(s)} is given"
        ),
        "Drop either.",
        when=lambda s: s.emulated is not None and _router_bias(s) is not None,
        name="emulation_router_bias",
    ),
    rule(
        _FLAG,
        lambda s: (
            f"{_layers(s)} layers do not divide into {s.emulated} stages: some have "
            f"{'none' if _layers(s) < (s.emulated or 0) else 'one more than others'}"
        ),
        "Emulate a number of stages that divides the layers if a real pipeline is meant.",
        when=lambda s: (
            (s.emulated or 0) > 0 and _layers(s) is not None and _layers(s) % s.emulated != 0
        ),
        name="emulation_undivided",
        warning=True,
    ),
    rule(
        _FLAG,
        lambda s: (
            f"under {s.config.schedule} a correction is as strong as its stage's delay asks for, "
            "which is not emulated"
        ),
        "Drop --delay-correction, or use real stages.",
        when=lambda s: s.emulated is not None and s.config.corrected and _drifts(s),
        name="emulation_corrected",
    ),
    rule(
        "--pipeline-schedule",
        lambda s: f"{s.config.schedule} has no delay on a single stage",
        lambda s: (
            "Add more stages, or give it a delay: "
            + (
                f"{DELAYED_MICROBATCHES.name} N"
                if s.config.schedule == FRESH_2BW.name
                else f"{_FLAG} P"
            )
            + "."
        ),
        when=lambda s: s.stages == 1 and s.delays(1) == [0.0],
        name="no_delay_on_a_single_stage",
        warning=True,
    ),
)
