"""Training one pipeline stage with the delays of several, for schedules whose stages differ."""

from dataclasses import replace

from megatron_async.registry import Flag
from megatron_async.schedules.schedule import Pipeline

__all__ = ["EMULATE_PIPELINE_STAGES", "as_emulated", "emulated_stages"]

EMULATE_PIPELINE_STAGES = Flag(
    name="--emulate-pipeline-stages",
    parse=int,
    metavar="P",
    help="With --pipeline-schedule pipedream or paci and one pipeline stage: give each layer the "
    "delay that it would have in a pipeline of P stages, so that such a pipeline's training can be "
    "studied on one device.",
    fits=lambda stages: stages is None or stages >= 1,
    takes="an integer >= 1",
)


def emulated_stages(pipeline: Pipeline) -> int | None:
    """Return P, None if nothing is emulated."""
    stages: int | None = pipeline.value(EMULATE_PIPELINE_STAGES)
    return stages


def as_emulated(pipeline: Pipeline) -> Pipeline:
    """Return the pipeline whose delays are trained with: that of P stages, or the run's own."""
    stages = emulated_stages(pipeline)
    return pipeline if stages is None else replace(pipeline, stages=stages)
