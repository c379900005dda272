"""What the paced benchmarks run a mode with, and what a mode can do."""

from dataclasses import dataclass
from typing import Protocol

from megatron_async.schedules.fresh_2bw import DELAYED_MICROBATCHES
from support.jobs import Measurement

__all__ = ["Pace", "Paced", "ideal_ms"]


@dataclass(frozen=True, kw_only=True)
class Pace:
    """The same for every mode.

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


class Paced(Protocol):
    """A mode: something that trains, and that can be compared with others on one clock."""

    @property
    def title(self) -> str:
        """In tables and pictures."""

    @property
    def update(self) -> bool:
        """Whether batches are applied."""

    @property
    def hides_update(self) -> bool:
        """Whether updates are deferred, so that an iteration need not wait for any."""

    def impossible(self, pace: Pace) -> str | None:
        """Say why it cannot be run; None if it can."""

    def run(self, pace: Pace) -> Measurement:
        """Train, and return what was measured.

        Raises:
            JobError: the job failed.
        """

    def simulated_ms(self, pace: Pace) -> float:
        """Return the milliseconds per iteration that its action lists take on a clock."""

    def mean_delay(self, pace: Pace) -> float:
        """Return by how many updates the first stage's gradients are late."""


def ideal_ms(mode: Paced, pace: Pace) -> float:
    """Return m (t_f + t_b) + t_opt: an iteration without a bubble."""
    slots = pace.microbatches * (pace.forward_ms + pace.backward_ms)
    return slots + (pace.optimizer_ms if mode.update else 0.0)
