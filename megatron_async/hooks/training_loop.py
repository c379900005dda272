"""Megatron's training loop: what waits for all ranks in each iteration, and evaluations."""

import functools
import time
from typing import Any

from megatron_async.hooks.row import TRAINING, hook, row

__all__ = [
    "ROWS",
    "decide_exit",
    "elapsed_without_barrier",
    "finalize_async_save",
    "keep_random_state",
    "own_value_if_deferring",
    "settled",
    "validate_result",
]


@hook
def own_value_if_deferring(original: Any) -> Any:
    @functools.wraps(original)
    def reduce_across_model_parallel_group(value: Any, *args: Any, **kwargs: Any) -> Any:
        from megatron_async.runtime.run import run

        return value if run.deferring else original(value, *args, **kwargs)

    return reduce_across_model_parallel_group


@hook
def elapsed_without_barrier(original: Any) -> Any:
    @functools.wraps(original)
    def elapsed(self: Any, reset: bool = True, barrier: bool = False) -> Any:
        import torch

        from megatron_async.runtime.run import run

        if not (barrier and self._started and run.deferring):
            return original(self, reset=reset, barrier=barrier)
        # The device-wide synchronisation of Timer.stop would wait for the update's collectives.
        torch.cuda.current_stream().synchronize()
        now = time.time()
        self._elapsed += now - self._start_time
        self._active_time += now - self._start_time
        self._start_time = now
        total = self._elapsed
        if reset:
            self._elapsed = 0.0
        return total

    return elapsed


@hook
def decide_exit(original: Any) -> Any:
    @functools.wraps(original)
    def checkpoint_and_decide_exit(*args: Any, **kwargs: Any) -> Any:
        from megatron.training import get_args

        from megatron_async.runtime.run import run

        engine = run.engine
        if engine is None or not run.deferring:
            return original(*args, **kwargs)
        from megatron_async.runtime import exit_flags
        from megatron_async.runtime.counters.exits import OVERTIME, SIGNALS

        # Megatron asks all ranks, by a blocking collective in every iteration. The answer is known
        # already; only in the iteration in which all ranks know that they stop is it asked for.
        settings = get_args()
        handler, minutes = settings.exit_signal_handler, settings.exit_duration_in_mins
        overtime = engine.out_of_time or engine.agreed(OVERTIME)
        with exit_flags.replaced(
            settings,
            exit_signal_handler=bool(handler and engine.agreed(SIGNALS)),
            exit_duration_in_mins=minutes if overtime else None,
        ):
            return original(*args, **kwargs)

    return checkpoint_and_decide_exit


@hook
def finalize_async_save(original: Any) -> Any:
    @functools.wraps(original)
    def maybe_finalize_async_save(blocking: bool = False, terminate: bool = False) -> Any:
        from megatron_async.runtime.run import run

        engine = run.engine
        if engine is None:
            return original(blocking=blocking, terminate=terminate)
        polling = not (blocking or terminate)
        # Polling is a collective over all ranks in every iteration. They know from the last update
        # whether any of them is still writing.
        if run.deferring and polling and not engine.saves_are_written():
            return None
        from megatron_async.checkpoint.files import write_errors

        with write_errors():
            return original(blocking=blocking, terminate=terminate)

    return maybe_finalize_async_save


@hook
def keep_random_state(original: Any) -> Any:
    @functools.wraps(original)
    def evaluate(*args: Any, **kwargs: Any) -> Any:
        from megatron_async.runtime.run import run

        engine = run.engine
        if engine is None:
            with run.paused():
                return original(*args, **kwargs)
        from megatron_async.runtime import random_state

        with random_state.preserved(), run.paused():
            result = original(*args, **kwargs)
        if result[2]:
            # All ranks were asked, and know that --exit-duration-in-mins is over. Megatron leaves
            # the model in evaluation mode then: no iteration may follow.
            engine.out_of_time = True
        return result

    return evaluate


@hook
def settled(original: Any) -> Any:
    @functools.wraps(original)
    def read_weights(*args: Any, **kwargs: Any) -> Any:
        from megatron_async.runtime.run import run

        if run.engine is not None:
            run.engine.settle()
        return original(*args, **kwargs)

    return read_weights


@hook
def validate_result(original: Any) -> Any:
    @functools.wraps(original)
    def validate_result(self: Any, *args: Any, fatal: bool = True, **kwargs: Any) -> None:
        from megatron_async.runtime.run import run

        if not (run.deferring and fatal):
            original(self, *args, fatal=fatal, **kwargs)

    return validate_result


ROWS = (
    row(
        TRAINING,
        "logical_and_across_model_parallel_group",
        own_value_if_deferring,
        "waits for all stages; the success of a deferred update is the same on all of them",
    ),
    row(
        TRAINING,
        "reduce_max_stat_across_model_parallel_group",
        own_value_if_deferring,
        "waits for all stages; every stage knows the gradient norm and the learning rate",
    ),
    row(
        "megatron.core.timers:Timer",
        "elapsed",
        elapsed_without_barrier,
        "a barrier over all ranks at every log line",
    ),
    row(
        TRAINING,
        "checkpoint_and_decide_exit",
        decide_exit,
        "collectives over all ranks with --exit-signal-handler and --exit-duration-in-mins",
    ),
    row(
        TRAINING,
        "maybe_finalize_async_save",
        finalize_async_save,
        "a collective over all ranks while an asynchronous save is under way",
    ),
    row(
        TRAINING,
        "evaluate",
        keep_random_state,
        "training goes on from the random state that it had before an evaluation",
    ),
    row(
        "megatron.core.rerun_state_machine:RerunStateMachine",
        "validate_result",
        validate_result,
        "waits for the device in the loss of each microbatch; a loss that is no number makes a "
        "gradient norm that is none, which ends the run before the update is published",
    ),
    row(
        TRAINING,
        "calc_params_l2_norm",
        settled,
        "it sums over the weights that the iteration made, on every stage",
    ),
)
