"""What Megatron's training loop keeps in globals.

Source: megatron/training/training.py, global_vars.py and
megatron/core/num_microbatches_calculator.py.
"""

import argparse
import copy
import sys
import time
from typing import Any

__all__ = [
    "add_tokenizer_arguments",
    "arguments_are_parsed",
    "batches_left",
    "minutes_trained",
    "next_num_microbatches",
    "parsed_arguments",
    "signal_received",
    "step_batch_sizes",
]


def arguments_are_parsed() -> bool:
    """Whether Megatron has parsed its arguments in this process. Imports nothing."""
    return parsed_arguments() is not None


def parsed_arguments() -> argparse.Namespace | None:
    """Return Megatron's arguments; None if it has parsed none in this process. Imports nothing."""
    variables = sys.modules.get("megatron.training.global_vars")
    args: argparse.Namespace | None = getattr(variables, "_GLOBAL_ARGS", None)
    return args


def add_tokenizer_arguments(parser: argparse.ArgumentParser) -> None:
    """Add Megatron's flags of tokenizers to a parser."""
    from megatron.training.arguments import _add_tokenizer_args

    _add_tokenizer_args(parser)


def next_num_microbatches(args: argparse.Namespace) -> int:
    """Return the number of microbatches of the next iteration's batch."""
    from megatron.core import num_microbatches_calculator

    calculator: Any = num_microbatches_calculator._GLOBAL_NUM_MICROBATCHES_CALCULATOR
    consumed = args.consumed_train_samples + calculator.get_current_running_global_batch_size()
    following = copy.copy(calculator)
    following.update(consumed, False)
    return int(following.get())


def batches_left(args: argparse.Namespace, iteration: int) -> int:
    """Return how many iterations there are up to the first one after which the run is known to
    end, the given one (0-indexed) and that one included."""
    ends = [int(args.train_iters)]
    if args.exit_interval:
        ends.append((iteration // args.exit_interval + 1) * args.exit_interval)
    ends += [end for end in args.phase_transition_iterations or () if end > iteration]
    return max(min(ends) - iteration, 1)


def minutes_trained() -> float:
    """Return the time since training began, as ``--exit-duration-in-mins`` counts it."""
    from megatron.training import training

    return (time.time() - float(training._TRAIN_START_TIME)) / 60.0


def signal_received() -> bool:
    """Whether this rank has got the signal of ``--exit-signal-handler``."""
    from megatron.training import get_signal_handler

    return bool(get_signal_handler()._signal_received)


def step_batch_sizes(schedule: str, seq_length: int | None) -> list[tuple[int, int]]:
    """Parse ``--step-batch-size-schedule``: (first sample, batch size) of each step."""
    from megatron.core.num_microbatches_calculator import StepBatchsizeNumMicroBatchesCalculator

    steps: list[tuple[int, int]] = StepBatchsizeNumMicroBatchesCalculator._parse_schedule(
        schedule, seq_length
    )
    return steps
