"""Megatron's schedules and those of this package, with stages that sleep instead of computing.

A mode is run as a real training job on CPU ranks, and its action lists on the simulator's clock,
from the same numbers.
"""

from dataclasses import dataclass

from megatron_async.schedules.fresh_2bw import DELAYED_MICROBATCHES, FRESH_2BW
from megatron_async.schedules.interleaved import INTERLEAVED
from megatron_async.schedules.one_f_one_b import ONE_F_ONE_B
from megatron_async.schedules.paci import PACI
from megatron_async.schedules.pipedream_2bw import PIPEDREAM_2BW
from megatron_async.schedules.schedule import Pipeline, Schedule, action_lists, settled_calls
from megatron_async.schedules.simulator import Costs, simulate
from support.jobs import Measurement, gpt_flags, run_job
from support.misplaced import misplaced_schedule
from support.pace import Pace

__all__ = ["MODES", "MegatronMode"]

_LAYERS_A_STAGE = 2  # the same model for all modes


@dataclass(frozen=True, kw_only=True)
class MegatronMode:
    """A schedule, and how it is run. The rest is that of :class:`support.pace.Paced`.

    Attributes:
        title: in tables and pictures.
        schedule: its record.
        deferred: whether updates are deferred, where the schedule can do that.
        update: False: batches are never applied.
        chunks: model chunks on each stage.
    """

    title: str
    schedule: Schedule
    deferred: bool = True
    update: bool = True
    chunks: int = 1

    @property
    def hides_update(self) -> bool:
        return self.schedule.asynchronous and self.deferred and self.update

    def pipeline(self, pace: Pace) -> Pipeline:
        """Return what the lists are made for."""
        own = {flag.dest for flag in self.schedule.flags} & {DELAYED_MICROBATCHES.dest}
        return Pipeline(
            stages=pace.stages,
            deferred=self.deferred and self.schedule.deferrable,
            chunks=self.chunks,
            extra_warmup=pace.extra_warmup if self.schedule.extra_warmup else 0,
            flags=dict.fromkeys(own, pace.delayed_microbatches),
        )

    def flags(self, pace: Pace) -> list[str]:
        """Return the flags of the training script that make the mode."""
        pipeline = self.pipeline(pace)
        found: list[str] = []
        if self.schedule.asynchronous:
            found += ["--pipeline-schedule", self.schedule.name]
            if not pipeline.deferred:
                found.append("--no-deferred-update")
        if pipeline.extra_warmup:
            found += ["--pipeline-extra-warmup", str(pipeline.extra_warmup)]
        if DELAYED_MICROBATCHES.dest in pipeline.flags:
            found += [DELAYED_MICROBATCHES.name, str(pace.delayed_microbatches)]
        if self.chunks > 1:
            layers = _LAYERS_A_STAGE // self.chunks
            found += ["--num-layers-per-virtual-pipeline-stage", str(layers)]
        return found

    def impossible(self, pace: Pace) -> str | None:
        schedule, pipeline = self.schedule, self.pipeline(pace)
        if self.chunks > 1 and (pace.stages < 2 or pace.microbatches % pace.stages):
            return f"it needs at least 2 stages and a multiple of {pace.stages} microbatches"
        if pipeline.extra_warmup > pace.stages - 1:
            return f"--pipeline-extra-warmup is at most {pace.stages - 1} with {pace.stages} stages"
        least = schedule.least_microbatches(pipeline)
        if pace.microbatches < least:
            return f"it needs at least {least} microbatches"
        problems = schedule.problems(pipeline, pace.microbatches)
        return problems[0].message if problems else None

    def run(self, pace: Pace) -> Measurement:
        flags = gpt_flags(
            layers=_LAYERS_A_STAGE * pace.stages,
            hidden_size=32,
            heads=2,
            seq_length=32,
            vocab_size=128,
            stages=pace.stages,
            microbatches=pace.microbatches,
            iterations=pace.iterations,
            tied=pace.tied,
            log_interval=pace.log_interval,
        )
        return run_job(
            ranks=pace.stages,
            flags=[*flags, *self.flags(pace)],
            iterations=pace.iterations,
            timeout=pace.timeout,
            settings={
                "forward_seconds": pace.forward_ms / 1e3,
                "backward_seconds": pace.backward_ms / 1e3,
                "optimizer_seconds": pace.optimizer_ms / 1e3,
                "chunks": self.chunks,
                "update": self.update,
                "latency_seconds": pace.latency_ms / 1e3,
            },
        )

    def simulated_ms(self, pace: Pace) -> float:
        pipeline = self.pipeline(pace)
        calls = settled_calls(self.schedule, pipeline, pace.microbatches)
        costs = Costs(
            forward=pace.forward_ms,
            backward=pace.backward_ms,
            optimizer=pace.optimizer_ms if self.update else 0.0,
            latency=pace.latency_ms,
        )
        lists = action_lists(self.schedule, pipeline, [pace.microbatches] * calls)
        # gloo's transfers wait for both sides; Megatron's interleaved schedule waits for none.
        return simulate(lists, costs, rendezvous=self.chunks == 1).iteration_time

    def mean_delay(self, pace: Pace) -> float:
        pipeline = self.pipeline(pace)
        rule = self.schedule.rule(pipeline, pace.microbatches)
        return rule.mean_staleness(pipeline.stages)


MODES = {
    "1f1b": MegatronMode(title="Megatron 1F1B", schedule=ONE_F_ONE_B),
    "interleaved": MegatronMode(
        title="Megatron interleaved 1F1B (v = 2)", schedule=INTERLEAVED, chunks=2
    ),
    "2bw-undeferred": MegatronMode(
        title="2BW, update undeferred", schedule=PIPEDREAM_2BW, deferred=False
    ),
    "2bw": MegatronMode(title="2BW, update deferred", schedule=PIPEDREAM_2BW),
    "fresh-2bw": MegatronMode(title="fresh-2bw", schedule=FRESH_2BW),
    "paci": MegatronMode(title="PACI", schedule=PACI),
    "2bw-no-update": MegatronMode(
        title="2BW, no update at all", schedule=PIPEDREAM_2BW, update=False
    ),
    "2bw-misplaced": MegatronMode(
        title="2BW, update completed after the receive (wrong)", schedule=misplaced_schedule()
    ),
}
