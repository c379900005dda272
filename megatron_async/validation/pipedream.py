"""Rules on ``--pipeline-schedule pipedream``, and on its emulation on one stage."""

from typing import Any, Final

from megatron_async.arguments import PIPEDREAM
from megatron_async.validation.rule import Rule, Subject, dest_of, rule

__all__ = ["RULES"]

_UNEVEN: Final = (
    "--decoder-first-pipeline-num-layers",
    "--decoder-last-pipeline-num-layers",
    "--account-for-embedding-in-pipeline-split",
    "--account-for-loss-in-pipeline-split",
    "--pipeline-model-parallel-layout",
)
"""Flags that give stages unequal numbers of layers."""


def _uneven(subject: Subject) -> str | None:
    return next((flag for flag in _UNEVEN if subject.get(dest_of(flag))), None)


def _layers(subject: Subject) -> Any:
    return subject.get("num_layers")


RULES: Final[tuple[Rule, ...]] = (
    rule(
        "--deferred-update",
        "the gradients of pipedream's last stage have no delay, so that its next forward has to "
        "wait for the update",
        "Drop it.",
        when=lambda s: s.config.schedule == PIPEDREAM and s.config.deferred_update,
        name="pipedream_deferred_update",
    ),
    rule(
        "--delay-correction",
        "weight prediction looks ahead by the delay, and with pipedream the two uses of a tied "
        "embedding have different ones",
        "Add --untie-embeddings-and-output-weights, or use another correction.",
        when=lambda s: (
            s.config.schedule == PIPEDREAM
            and s.config.correction == "weight-prediction"
            and max(s.stages, s.config.emulated_stages or 1) > 1
            and not s.get("untie_embeddings_and_output_weights", False)
        ),
        name="pipedream_tied_prediction",
    ),
    rule(
        "--step-batch-size-schedule",
        "pipedream runs one batch forward while it runs another backward, microbatch by "
        "microbatch, so all need the same number of them",
        "Use one batch size, or one pipeline stage with --emulate-pipeline-stages.",
        when=lambda s: (
            s.config.schedule == PIPEDREAM
            and s.stages > 1
            and s.get("step_batch_size_schedule") is not None
        ),
        name="pipedream_batch_size_schedule",
    ),
    rule(
        "--emulate-pipeline-stages",
        lambda s: f"{s.config.emulated_stages} is not a number of stages",
        "Give an integer >= 1.",
        when=lambda s: s.config.emulated_stages is not None and s.config.emulated_stages < 1,
    ),
    rule(
        "--emulate-pipeline-stages",
        lambda s: f"it emulates a pipeline on one stage, and there are {s.stages}",
        "Use --pipeline-model-parallel-size 1, or drop it.",
        when=lambda s: s.config.emulated_stages is not None and s.stages > 1,
        name="emulation_in_pipeline",
    ),
    rule(
        "--emulate-pipeline-stages",
        lambda s: f"layers are spread evenly over the emulated stages, and {_uneven(s)} is given",
        "Drop either.",
        when=lambda s: s.config.emulated_stages is not None and _uneven(s) is not None,
        name="emulation_uneven",
    ),
    rule(
        "--emulate-pipeline-stages",
        lambda s: (
            f"{_layers(s)} layers do not divide into {s.config.emulated_stages} stages: some have "
            f"{'none' if _layers(s) < s.config.emulated_stages else 'one more than others'}"
        ),
        "Emulate a number of stages that divides the layers if a real pipeline is meant.",
        when=lambda s: (
            (s.config.emulated_pipeline or 0) > 0
            and _layers(s) is not None
            and _layers(s) % s.config.emulated_pipeline != 0
        ),
        name="emulation_undivided",
        warning=True,
    ),
    rule(
        "--pipeline-schedule",
        "pipedream has no delay on a single stage",
        "Add --emulate-pipeline-stages, or more stages.",
        when=lambda s: (
            s.config.schedule == PIPEDREAM and s.stages == 1 and s.config.emulated_stages is None
        ),
        name="pipedream_single_stage",
        warning=True,
    ),
)
