"""Logs of runs as Megatron and torch write them, with chosen numbers."""

from collections.abc import Mapping, Sequence

from megatron_async.gpu_check.run_log import RunLog
from tests.tools.test_training_log import line

__all__ = ["LOSSES", "MIB", "log_of", "memory_line", "race_report"]

MIB = 2.0**20
LOSSES = tuple(5.5 - 0.1 * number for number in range(14))


def memory_line(rank: int, iteration: int, held_mib: float, peak_mib: float) -> str:
    """As report_memory of megatron/training/utils/common_utils.py prints it."""
    return (
        f"[Rank {rank}] (after {iteration} iterations) memory (MB) | allocated: {held_mib:.2f} | "
        f"max allocated: {peak_mib:.2f} | reserved: 9000.00 | max reserved: 9001.00"
    )


def race_report() -> list[str]:
    """What torch's own sanitizer prints for a race."""
    from torch.cuda import _sanitizer as sanitizer

    handler = sanitizer.EventHandler()
    for stream in (0, 1):  # two writes of one tensor on two streams, and no event between them
        errors = handler._handle_kernel_launch(stream, set(), {1}, set(), "op", {1: ["self"]})
    return str(errors[0]).splitlines()


def log_of(
    losses: Sequence[float] = LOSSES,
    *,
    ms: float = 100.0,
    bubble: float | None = None,
    memory: Mapping[int, tuple[float, float]] | None = None,
    races: int = 0,
    name: str = "run",
) -> RunLog:
    """A run's log.

    Args:
        losses: of the iterations.
        ms: time of each iteration; the first ones take ten times as long.
        bubble: percent.
        memory: (held, peak) in MiB by rank, behind every fourth iteration.
        races: how often the sanitizer reports one.
        name: of the run.
    """
    log = RunLog(name)
    share = "" if bubble is None else f" bubble: {bubble:.1f}% |"
    for number, loss in enumerate(losses, start=1):
        # Megatron's second line has the mean of two losses.
        shown = (losses[0] + losses[1]) / 2 if number == 2 else loss
        slow = 10 if number < 4 else 1
        log.feed(line(number, f"{shown:.6E}", ms=slow * ms, bubble=share if number > 2 else ""))
        if number % 4 == 0:
            for rank, (held, peak) in (memory or {}).items():
                log.feed(memory_line(rank, number, held, peak))
    for _ in range(races):
        for text in race_report():
            log.feed(text)
    return log
