"""The modes whose time the benchmarks compare, with stages that sleep instead of computing.

A mode is run as a real training job on CPU ranks (:func:`run`), and its action lists on the
simulator's clock (:func:`simulated_ms`), from the same numbers.
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

__all__ = ["MODES", "Mode", "Pace", "ideal_ms", "impossible", "mean_delay", "run", "simulated_ms"]

_SETTLED = 5
"""A batch whose weights are those of every later one, counted from its own number."""


@dataclass(frozen=True, kw_only=True)
class Pace:
    """What every mode is run with.

    Attributes:
        stages: p.
        microbatches: m.
        forward_ms: t_f, of a microbatch through a stage.
        backward_ms: t_b.
        optimizer_ms: t_opt.
        latency_ms: messages between stages arrive so much late.
        delayed_microbatches: c, where a schedule has it, as ``--delayed-microbatches`` takes it.
        extra_warmup: microbatches more in flight, where a schedule has it.
        tied: whether the first and the last stage share the embedding.
        log_interval: iterations between log lines.
        iterations: measured, fill and drain excluded.
        timeout: seconds until a job is stopped.
    """

    stages: int
    microbatches: int
    forward_ms: float
    backward_ms: float
    optimizer_ms: float
    latency_ms: float = 0.0
    delayed_microbatches: int | str = DELAYED_MICROBATCHES.default
    extra_warmup: int = 0
    tied: bool = True
    log_interval: int = 1000000
    iterations: int = 6
    timeout: float = 900.0


@dataclass(frozen=True, kw_only=True)
class Mode:
    """A schedule, and how it is run.

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


_LAYERS_A_STAGE = 2  # the same model for all modes

MODES = {
    "1f1b": Mode(title="Megatron 1F1B", schedule=ONE_F_ONE_B),
    "interleaved": Mode(title="Megatron interleaved 1F1B (v = 2)", schedule=INTERLEAVED, chunks=2),
    "2bw-undeferred": Mode(title="2BW, update undeferred", schedule=PIPEDREAM_2BW, deferred=False),
    "2bw": Mode(title="2BW, update deferred", schedule=PIPEDREAM_2BW),
    "fresh-2bw": Mode(title="fresh-2bw", schedule=FRESH_2BW),
    "paci": Mode(title="PACI", schedule=PACI),
    "2bw-no-update": Mode(title="2BW, no update at all", schedule=PIPEDREAM_2BW, update=False),
    "2bw-misplaced": Mode(
        title="2BW, update completed after the receive (wrong)", schedule=misplaced_schedule()
    ),
}
"""By the name that the benchmarks give them."""


def impossible(mode: Mode, pace: Pace) -> str | None:
    """Say why a mode cannot be run; None if it can."""
    schedule, pipeline = mode.schedule, mode.pipeline(pace)
    if mode.chunks > 1 and (pace.stages < 2 or pace.microbatches % pace.stages):
        return f"it needs at least 2 stages and a multiple of {pace.stages} microbatches"
    least = schedule.least_microbatches(pipeline)
    if pace.microbatches < least:
        return f"it needs at least {least} microbatches"
    if pipeline.extra_warmup > pace.stages - 1:
        return f"--pipeline-extra-warmup is at most {pace.stages - 1} with {pace.stages} stages"
    problems = schedule.problems(pipeline, pace.microbatches)
    return problems[0].message if problems else None


def run(mode: Mode, pace: Pace) -> Measurement:
    """Train, and return what was measured.

    Raises:
        JobError: the job failed.
    """
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
        flags=[*flags, *mode.flags(pace)],
        iterations=pace.iterations,
        timeout=pace.timeout,
        settings={
            "forward_seconds": pace.forward_ms / 1e3,
            "backward_seconds": pace.backward_ms / 1e3,
            "optimizer_seconds": pace.optimizer_ms / 1e3,
            "chunks": mode.chunks,
            "update": mode.update,
            "latency_seconds": pace.latency_ms / 1e3,
        },
    )


def ideal_ms(mode: Mode, pace: Pace) -> float:
    """Return m (t_f + t_b) + t_opt: an iteration without a bubble."""
    slots = pace.microbatches * (pace.forward_ms + pace.backward_ms)
    return slots + (pace.optimizer_ms if mode.update else 0.0)


def simulated_ms(mode: Mode, pace: Pace) -> float:
    """Return the milliseconds per iteration that the simulator predicts."""
    pipeline = mode.pipeline(pace)
    calls = settled_calls(mode.schedule, pipeline, pace.microbatches)
    costs = Costs(
        forward=pace.forward_ms,
        backward=pace.backward_ms,
        optimizer=pace.optimizer_ms if mode.update else 0.0,
        latency=pace.latency_ms,
    )
    lists = action_lists(mode.schedule, pipeline, [pace.microbatches] * calls)
    # gloo's transfers wait for both sides; Megatron's interleaved schedule waits for none.
    return simulate(lists, costs, rendezvous=mode.chunks == 1).iteration_time


def mean_delay(mode: Mode, pace: Pace) -> float:
    """Return by how many updates the first stage's gradients are late."""
    rule = mode.schedule.rule(mode.pipeline(pace), pace.microbatches)
    return rule.mean_delay(_SETTLED, pace.microbatches, 0)
