"""Megatron's training loop: what waits for all ranks in each iteration, and evaluations."""

import functools
import time
from typing import Any

from megatron_async.hooks.row import TRAINING, hook, row
from megatron_async.megatron import releases

__all__ = [
    "ROWS",
    "decide_exit",
    "elapsed_without_barrier",
    "finalize_async_save",
    "keep_random_state",
    "lengths_of_sequences",
    "loss_group",
    "norm_without_waiting",
    "own_value_if_deferring",
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
def norm_without_waiting(original: Any) -> Any:
    @functools.wraps(original)
    def calc_params_l2_norm(*args: Any, **kwargs: Any) -> Any:
        from megatron_async.runtime.run import run

        engine = run.engine
        if engine is None:
            return original(*args, **kwargs)
        if run.deferring and not engine.drained:
            report = engine.updates.last_report
            return None if report is None else report.params_norm
        engine.settle()
        return original(*args, **kwargs)

    return calc_params_l2_norm


@hook
def lengths_of_sequences(original: Any) -> Any:
    @functools.wraps(original)
    def consume_seqlen_stats_in_iteration() -> Any:
        from megatron_async.megatron import packed_sequences
        from megatron_async.runtime.run import run

        engine = run.engine
        if engine is None or not engine.asynchronous_now:
            return original()
        if not run.deferring:
            if packed_sequences.are_packed(engine.args):
                packed_sequences.have_all_ranks_sum()
            return original()
        if engine.packed is not None:
            return engine.packed.take()
        # Of a script that packs without Megatron's flags: counted as whole sequences.
        packed_sequences.take_sums()
        return None, None

    return consume_seqlen_stats_in_iteration


@hook
def loss_group(original: Any) -> Any:
    @functools.wraps(original)
    def get_attr_wrapped_model(model: Any, attr: str, *args: Any, **kwargs: Any) -> Any:
        from megatron_async.megatron.data_parallel import with_loss_group
        from megatron_async.runtime.run import run

        found = original(model, attr, *args, **kwargs)
        if attr != "pg_collection" or found is None or not run.deferring:
            return found
        assert run.engine is not None
        group = run.engine.loss_group
        return found if group is None else with_loss_group(found, group)

    return get_attr_wrapped_model


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
        TRAINING,
        "get_attr_wrapped_model",
        loss_group,
        "train_step averages the loss on the communicator of the data-parallel reductions, and so "
        "behind the one in flight with --second-grad-buffer",
        versions=releases.since("0.19"),
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
        "consume_seqlen_stats_in_iteration",
        lengths_of_sequences,
        "sums over all ranks in each iteration in which this one ran a forward, and in the last "
        "iteration not every stage does",
    ),
    row(
        TRAINING,
        "calc_params_l2_norm",
        norm_without_waiting,
        "sums over all ranks in each iteration; the norm of a complete version comes with its "
        "update. Undeferred, the weights that the iteration made are summed, on every stage",
    ),
)
