"""Megatron's log line, TensorBoard and W&B: our scalars go there, too."""

import functools
import inspect
from typing import Any

from megatron_async.hooks.row import TRAINING, hook, row

__all__ = ["ROWS", "log_line", "log_scalars"]


@hook
def log_scalars(original: Any) -> Any:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def training_log(*args: Any, **kwargs: Any) -> Any:
        from megatron.training import get_args

        from megatron_async.runtime.run import run

        call = signature.bind(*args, **kwargs).arguments
        iteration = call["iteration"]
        settings = get_args()
        measured = run.bubble
        if measured is not None:
            if not run.deferring:
                measured.add(*measured.meter.close_iteration())
            if iteration % settings.log_interval == 0:
                measured.close(everywhere=run.deferring)
        result = original(*args, **kwargs)
        if iteration % settings.tensorboard_log_interval == 0:
            _write_scalars(iteration)
        return result

    return training_log


def _write_scalars(iteration: int) -> None:
    from megatron.training import get_tensorboard_writer, get_wandb_writer

    from megatron_async.runtime.run import run

    scalars: list[tuple[str, float, int]] = []
    if run.engine is not None and run.engine.asynchronous_now:
        scalars += run.engine.scalars()
    if run.bubble is not None and run.bubble.share is not None:
        scalars.append(("pipeline-bubble", run.bubble.share, iteration))
    writer, wandb_writer = get_tensorboard_writer(), get_wandb_writer()
    for name, value, at in scalars:
        if writer:
            writer.add_scalar(name, value, at)
        if wandb_writer:
            # W&B takes no step that lies behind the last one; what belongs to an earlier iteration
            # carries its number along.
            wandb_writer.log({name: value, f"{name} iteration": at}, iteration)


@hook
def log_line(original: Any) -> Any:
    @functools.wraps(original)
    def print_rank_last(message: Any) -> Any:
        from megatron_async.runtime.run import run

        share = None if run.bubble is None else run.bubble.share
        if (
            share is not None
            and isinstance(message, str)
            and " iteration " in message
            and message.endswith("|")
        ):
            message += f" bubble: {100 * share:.1f}% |"
        return original(message)

    return print_rank_last


ROWS = (
    row(TRAINING, "training_log", log_scalars, "our scalars go to the same writers"),
    row(
        TRAINING,
        "print_rank_last",
        log_line,
        "the bubble's share stands in the iteration's log line",
    ),
)
