"""What the attributes of the hook table are replaced by.

Each function takes the original and returns the replacement. Modules that need Megatron are
imported when a replacement runs: the table is made before Megatron is.
"""

import contextlib
import functools
import inspect
import time
from collections.abc import Callable
from typing import Any

__all__ = [
    "add_arguments",
    "attach",
    "checkpointing",
    "decide_exit",
    "elapsed_without_barrier",
    "embedding_gradients",
    "finalize_async_save",
    "forward_pre_hook",
    "keep_random_state",
    "log_line",
    "log_scalars",
    "optimizer_state_keys",
    "own_value_if_deferring",
    "report_moe_metrics",
    "schedule",
    "sync_moe_metrics",
    "timed_receive",
    "validate",
    "whole_data_file",
    "whole_tracker_file",
]


def add_arguments(original: Any) -> Any:
    from megatron_async.arguments import add_arguments, mend_help
    from megatron_async.optimizers import add_optimizer_arguments

    @functools.wraps(original)
    def add_megatron_arguments(parser: Any) -> Any:
        return mend_help(add_optimizer_arguments(add_arguments(original(parser))))

    return add_megatron_arguments


def validate(original: Any) -> Any:
    @functools.wraps(original)
    def validate_args(args: Any, *rest: Any, **kwargs: Any) -> Any:
        from megatron_async.startup import check_arguments

        result = original(args, *rest, **kwargs)
        check_arguments(args)
        return result

    return validate_args


def attach(original: Any) -> Any:
    @functools.wraps(original)
    def get_megatron_optimizer(config: Any, model_chunks: Any, *rest: Any, **kwargs: Any) -> Any:
        from megatron.core.utils import get_model_config
        from megatron.training import get_args

        from megatron_async import engine, optimizers, startup
        from megatron_async.arguments import AsyncConfig

        args = get_args()
        if config.optimizer in optimizers.NAMES:
            optimizers.register()
        if AsyncConfig.from_args(args).asynchronous:
            # A script may have set what no flag can.
            startup.check_configs(args, get_model_config(model_chunks[0]), config)
        optimizer = original(config, model_chunks, *rest, **kwargs)
        if AsyncConfig.from_args(args).asynchronous:
            engine.attach(args, model_chunks, optimizer)
        return optimizer

    return get_megatron_optimizer


def schedule(original: Any) -> Any:
    @functools.wraps(original)
    def get_forward_backward_func(*args: Any, **kwargs: Any) -> Any:
        from megatron_async import engine

        run = original(*args, **kwargs)
        running = engine.current()
        if running is not None:
            run = functools.partial(running.forward_backward, run)
        return _timing_data(run)

    return get_forward_backward_func


def _timing_data(run: Any) -> Any:
    """Count the time that a training step waits for data, if the bubble is measured."""
    from megatron_async import bubble

    measured = bubble.log()
    if measured is None:
        return run

    def timed(*, data_iterator: Any, forward_only: bool = False, **kwargs: Any) -> Any:
        if not forward_only:
            if isinstance(data_iterator, list):
                data_iterator = [bubble.TimedIterator(it, measured.meter) for it in data_iterator]
            elif data_iterator is not None:
                data_iterator = bubble.TimedIterator(data_iterator, measured.meter)
        return run(data_iterator=data_iterator, forward_only=forward_only, **kwargs)

    return timed


def own_value_if_deferring(original: Any) -> Any:
    @functools.wraps(original)
    def reduce_across_model_parallel_group(value: Any, *args: Any, **kwargs: Any) -> Any:
        from megatron_async import engine

        return value if engine.deferring() else original(value, *args, **kwargs)

    return reduce_across_model_parallel_group


def embedding_gradients(original: Any) -> Any:
    @functools.wraps(original)
    def allreduce_word_embedding_grads(*args: Any, **kwargs: Any) -> Any:
        from megatron_async import bubble, engine

        if engine.deferring():
            return None
        measured = bubble.log()
        if measured is not None:
            measured.wait_for_stages()
        return original(*args, **kwargs)

    return allreduce_word_embedding_grads


def elapsed_without_barrier(original: Any) -> Any:
    @functools.wraps(original)
    def elapsed(self: Any, reset: bool = True, barrier: bool = False) -> Any:
        import torch

        from megatron_async import engine

        if not (barrier and self._started and engine.deferring()):
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


def timed_receive(original: Any) -> Any:
    @functools.wraps(original)
    def communicate(self: Any, *, recv_prev: bool, recv_next: bool, **kwargs: Any) -> Any:
        from megatron_async import bubble

        measured = bubble.log()
        if measured is None or not (recv_prev or recv_next):
            return original(self, recv_prev=recv_prev, recv_next=recv_next, **kwargs)
        with measured.meter.waiting():
            *received, requests = original(self, recv_prev=recv_prev, recv_next=recv_next, **kwargs)
        if isinstance(requests, dict):  # of an interleaved schedule, which waits for them itself
            requests = {
                name: bubble.TimedRequest(request, measured.meter)
                if name.startswith("recv")
                else request
                for name, request in requests.items()
            }
        return *received, requests

    return communicate


def log_scalars(original: Any) -> Any:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def training_log(*args: Any, **kwargs: Any) -> Any:
        from megatron.training import get_args

        from megatron_async import bubble, engine

        call = signature.bind(*args, **kwargs).arguments
        iteration = call["iteration"]
        settings = get_args()
        measured = bubble.log()
        if measured is not None:
            if not engine.deferring():
                measured.add(*measured.meter.close_iteration())
            if iteration % settings.log_interval == 0:
                measured.close(everywhere=engine.deferring())
        result = original(*args, **kwargs)
        if iteration % settings.tensorboard_log_interval == 0:
            _write_scalars(iteration)
        return result

    return training_log


def _write_scalars(iteration: int) -> None:
    from megatron.training import get_tensorboard_writer, get_wandb_writer

    from megatron_async import bubble, engine

    scalars: list[tuple[str, float, int]] = []
    running = engine.current()
    if running is not None and running.asynchronous_now:
        scalars += running.scalars()
    measured = bubble.log()
    if measured is not None and measured.share is not None:
        scalars.append(("pipeline-bubble", measured.share, iteration))
    writer, wandb_writer = get_tensorboard_writer(), get_wandb_writer()
    for name, value, at in scalars:
        if writer:
            writer.add_scalar(name, value, at)
        if wandb_writer:
            # W&B takes no step that lies behind the last one; what belongs to an earlier iteration
            # carries its number along.
            wandb_writer.log({name: value, f"{name} iteration": at}, iteration)


def log_line(original: Any) -> Any:
    @functools.wraps(original)
    def print_rank_last(message: Any) -> Any:
        from megatron_async import bubble

        measured = bubble.log()
        if (
            measured is not None
            and measured.share is not None
            and isinstance(message, str)
            and " iteration " in message
            and message.endswith("|")
        ):
            message += f" bubble: {100 * measured.share:.1f}% |"
        return original(message)

    return print_rank_last


def decide_exit(original: Any) -> Any:
    @functools.wraps(original)
    def checkpoint_and_decide_exit(*args: Any, **kwargs: Any) -> Any:
        from megatron.training import get_args

        from megatron_async import engine, exit_flags

        running = engine.current()
        if running is None or not engine.deferring():
            return original(*args, **kwargs)
        # Megatron asks all ranks, by a blocking collective in every iteration. The answer is known
        # already; only in the iteration in which all ranks know that they stop is it asked for.
        settings = get_args()
        handler, minutes = settings.exit_signal_handler, settings.exit_duration_in_mins
        overtime = running.out_of_time or running.agreed("overtime")
        with exit_flags.replaced(
            settings,
            exit_signal_handler=bool(handler and running.agreed("signals")),
            exit_duration_in_mins=minutes if overtime else None,
        ):
            return original(*args, **kwargs)

    return checkpoint_and_decide_exit


def finalize_async_save(original: Any) -> Any:
    @functools.wraps(original)
    def maybe_finalize_async_save(blocking: bool = False, terminate: bool = False) -> Any:
        from megatron_async import engine

        running = engine.current()
        polling = not (blocking or terminate)
        # Polling is a collective over all ranks in every iteration. They know from the last update
        # whether any of them is still writing.
        if (
            running is not None
            and engine.deferring()
            and polling
            and not running.saves_are_written()
        ):
            return None
        if running is None:
            return original(blocking=blocking, terminate=terminate)
        from megatron_async.checkpoint_files import write_errors

        with write_errors():
            return original(blocking=blocking, terminate=terminate)

    return maybe_finalize_async_save


def forward_pre_hook(original: Any) -> Any:
    @functools.wraps(original)
    def should_disable_forward_pre_hook(args: Any) -> Any:
        from megatron_async import engine

        return False if engine.current() is not None else original(args)

    return should_disable_forward_pre_hook


def report_moe_metrics(original: Any) -> Any:
    @functools.wraps(original)
    def report(self: Any, loss_scale: float, *args: Any, **kwargs: Any) -> Any:
        from megatron_async import engine

        running = engine.current()
        if running is None or running.moe is None or not engine.deferring():
            return original(self, loss_scale, *args, **kwargs)
        with running.moe.reporting(round(1.0 / loss_scale)):
            return original(self, loss_scale, *args, **kwargs)

    return report


def sync_moe_metrics(original: Any) -> Any:
    @functools.wraps(original)
    def sync_metrics(self: Any, *args: Any, **kwargs: Any) -> Any:
        from megatron_async import engine

        return None if engine.deferring() else original(self, *args, **kwargs)

    return sync_metrics


def checkpointing(name: str) -> Callable[[Any], Any]:
    """Let a function of our checkpointing stand in; it is called with the original first."""

    def make(original: Any) -> Any:
        @functools.wraps(original)
        def replacement(*args: Any, **kwargs: Any) -> Any:
            from megatron_async import bubble, checkpointing

            with bubble.paused():
                return getattr(checkpointing, name)(original, *args, **kwargs)

        return replacement

    return make


def whole_tracker_file(original: Any) -> Any:
    from megatron_async.checkpoint_files import WholeTrackerFile

    return WholeTrackerFile(original)


class _Property(property):
    """A property that can be marked as replaced."""


def optimizer_state_keys(original: Any) -> Any:
    def optimizer_state_keys(self: Any) -> tuple[str, ...]:
        from megatron_async import checkpointing

        return checkpointing.optimizer_state_keys(original.fget, self)

    return _Property(optimizer_state_keys, doc=original.__doc__)


def keep_random_state(original: Any) -> Any:
    @functools.wraps(original)
    def evaluate(*args: Any, **kwargs: Any) -> Any:
        from megatron_async import bubble, engine, random_state

        running = engine.current()
        kept = contextlib.nullcontext() if running is None else random_state.preserved()
        with kept, bubble.paused():
            result = original(*args, **kwargs)
        if running is not None and result[2]:
            # All ranks were asked, and know that --exit-duration-in-mins is over. Megatron leaves
            # the model in evaluation mode then: no iteration may follow.
            running.out_of_time = True
        return result

    return evaluate


def whole_data_file(original: Any) -> Any:
    @functools.wraps(original)
    def initialize(self: Any, path_prefix: str, *args: Any, **kwargs: Any) -> None:
        from megatron_async import data_files

        with data_files.named_in_errors(path_prefix):
            original(self, path_prefix, *args, **kwargs)
        data_files.check(self)

    return initialize
