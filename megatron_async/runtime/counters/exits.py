"""Which ranks want to stop: a signal has come, or the time is over."""

import argparse

from megatron_async.megatron.training import minutes_trained, signal_received
from megatron_async.runtime.counters.counter import Counter

__all__ = ["OVERTIME", "SIGNALS", "ExitVotes"]

SIGNALS = "signals"
"""Name of the number of ranks that got the signal of ``--exit-signal-handler``."""
OVERTIME = "overtime"
"""Name of the number of ranks for which ``--exit-duration-in-mins`` is over."""


class ExitVotes(Counter):
    """The votes of one rank.

    Args:
        args: Megatron's; its flags decide what is counted.
    """

    def __init__(self, args: argparse.Namespace) -> None:
        self._minutes = args.exit_duration_in_mins
        self.names = tuple(
            name
            for name, wanted in (
                (SIGNALS, args.exit_signal_handler),
                (OVERTIME, bool(args.exit_duration_in_mins)),
            )
            if wanted
        )

    def collect(self) -> dict[str, float]:
        votes: dict[str, float] = {}
        if SIGNALS in self.names:
            votes[SIGNALS] = float(signal_received())
        if OVERTIME in self.names:
            votes[OVERTIME] = float(minutes_trained() > self._minutes)
        return votes
