"""The Megatron attributes that are replaced, in one table.

Each row names the attribute, what replaces it, why, and the releases of megatron-core it holds for.
A replacement is made from the original and calls it; with ``--pipeline-schedule default`` every one
of them does what the original does. :func:`install` refuses to work on modules that bound a name
before it was replaced.
"""

import functools
import importlib
import inspect
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

__all__ = ["HOOKS", "Hook", "install", "installed"]

_V19 = ("0.19",)


@dataclass(frozen=True, kw_only=True)
class Hook:
    """One replaced attribute.

    Attributes:
        module: where the attribute lives.
        attribute: its name; dotted for a method of a class.
        make: takes the original, returns the replacement.
        why: one sentence.
        versions: release series of megatron-core that it was tested with.
    """

    module: str
    attribute: str
    make: Callable[[Any], Any]
    why: str
    versions: tuple[str, ...] = _V19


def _add_arguments(original: Any) -> Any:
    from megatron_async.arguments import add_arguments

    @functools.wraps(original)
    def add_megatron_arguments(parser: Any) -> Any:
        return add_arguments(original(parser))

    return add_megatron_arguments


def _validate(original: Any) -> Any:
    @functools.wraps(original)
    def validate_args(args: Any, *rest: Any, **kwargs: Any) -> Any:
        from megatron_async.startup import check_arguments

        result = original(args, *rest, **kwargs)
        check_arguments(args)
        return result

    return validate_args


def _attach(original: Any) -> Any:
    @functools.wraps(original)
    def get_megatron_optimizer(config: Any, model_chunks: Any, *rest: Any, **kwargs: Any) -> Any:
        from megatron.training import get_args

        from megatron_async import engine
        from megatron_async.arguments import AsyncConfig

        optimizer = original(config, model_chunks, *rest, **kwargs)
        if AsyncConfig.from_args(get_args()).asynchronous:
            engine.attach(get_args(), model_chunks, optimizer)
        return optimizer

    return get_megatron_optimizer


def _schedule(original: Any) -> Any:
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


def _own_value_if_deferring(original: Any) -> Any:
    @functools.wraps(original)
    def reduce_across_model_parallel_group(value: Any, *args: Any, **kwargs: Any) -> Any:
        from megatron_async import engine

        return value if engine.deferring() else original(value, *args, **kwargs)

    return reduce_across_model_parallel_group


def _embedding_gradients(original: Any) -> Any:
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


def _elapsed_without_barrier(original: Any) -> Any:
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


def _timed_receive(original: Any) -> Any:
    @functools.wraps(original)
    def communicate(self: Any, *, recv_prev: bool, recv_next: bool, **kwargs: Any) -> Any:
        from megatron_async import bubble

        if not (recv_prev or recv_next):
            return original(self, recv_prev=recv_prev, recv_next=recv_next, **kwargs)
        with bubble.waiting():
            return original(self, recv_prev=recv_prev, recv_next=recv_next, **kwargs)

    return communicate


def _log_scalars(original: Any) -> Any:
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


def _log_line(original: Any) -> Any:
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


def _decide_exit(original: Any) -> Any:
    @functools.wraps(original)
    def checkpoint_and_decide_exit(*args: Any, **kwargs: Any) -> Any:
        from megatron.training import get_args

        from megatron_async import engine

        running = engine.current()
        if running is None or not engine.deferring():
            return original(*args, **kwargs)
        # Megatron asks all ranks, by a blocking collective in every iteration. The answer is known
        # already; only in the iteration in which all ranks know that they stop is it asked for.
        settings = get_args()
        handler, minutes = settings.exit_signal_handler, settings.exit_duration_in_mins
        settings.exit_signal_handler = handler and running.agreed("signals")
        settings.exit_duration_in_mins = minutes if running.agreed("overtime") else None
        try:
            return original(*args, **kwargs)
        finally:
            settings.exit_signal_handler, settings.exit_duration_in_mins = handler, minutes

    return checkpoint_and_decide_exit


def _finalize_async_save(original: Any) -> Any:
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
            and (running.agreed("unfinished saves") or not running.sums)
        ):
            return None
        return original(blocking=blocking, terminate=terminate)

    return maybe_finalize_async_save


def _forward_pre_hook(original: Any) -> Any:
    @functools.wraps(original)
    def should_disable_forward_pre_hook(args: Any) -> Any:
        from megatron_async import engine

        return False if engine.current() is not None else original(args)

    return should_disable_forward_pre_hook


def _report_moe_metrics(original: Any) -> Any:
    @functools.wraps(original)
    def report(self: Any, loss_scale: float, *args: Any, **kwargs: Any) -> Any:
        from megatron_async import engine

        running = engine.current()
        if running is None or running.moe is None or not engine.deferring():
            return original(self, loss_scale, *args, **kwargs)
        if running.moe.totals is None:
            running.moe.sum_over_stages()
        running.moe.fill(self, round(1.0 / loss_scale))
        return original(self, loss_scale, *args, **kwargs)

    return report


def _sync_moe_metrics(original: Any) -> Any:
    @functools.wraps(original)
    def sync_metrics(self: Any, *args: Any, **kwargs: Any) -> Any:
        from megatron_async import engine

        return None if engine.deferring() else original(self, *args, **kwargs)

    return sync_metrics


def _checkpointing(name: str) -> Callable[[Any], Any]:
    """Let a function of our checkpointing stand in; it is called with the original first."""

    def make(original: Any) -> Any:
        @functools.wraps(original)
        def replacement(*args: Any, **kwargs: Any) -> Any:
            from megatron_async import checkpointing

            return getattr(checkpointing, name)(original, *args, **kwargs)

        return replacement

    return make


def _whole_tracker_file(original: Any) -> Any:
    from megatron_async.checkpointing import WholeTrackerFile

    return WholeTrackerFile(original)


class _Property(property):
    """A property that can be marked as replaced."""


def _optimizer_state_keys(original: Any) -> Any:
    def optimizer_state_keys(self: Any) -> tuple[str, ...]:
        from megatron_async import checkpointing

        return checkpointing.optimizer_state_keys(original.fget, self)

    return _Property(optimizer_state_keys, doc=original.__doc__)


def _keep_random_state(original: Any) -> Any:
    @functools.wraps(original)
    def evaluate(*args: Any, **kwargs: Any) -> Any:
        from megatron_async import engine, random_state

        if engine.current() is None:
            return original(*args, **kwargs)
        with random_state.preserved():
            return original(*args, **kwargs)

    return evaluate


_TRAINING = "megatron.training.training"
_CHECKPOINTING = "megatron.training.checkpointing"

HOOKS: tuple[Hook, ...] = (
    Hook(
        module="megatron.training.arguments",
        attribute="add_megatron_arguments",
        make=_add_arguments,
        why="the flags of this package",
    ),
    Hook(
        module="megatron.training.arguments",
        attribute="validate_args",
        make=_validate,
        why="the checks on the flags, before anything is built",
    ),
    Hook(
        module=_TRAINING,
        attribute="get_megatron_optimizer",
        make=_attach,
        why="weight versions, correction and deferred update, before a checkpoint is loaded",
    ),
    *(
        Hook(
            module=module,
            attribute="get_forward_backward_func",
            make=_schedule,
            why="the pipeline schedule",
        )
        for module in (
            "megatron.core.pipeline_parallel.schedules",
            "megatron.core.pipeline_parallel",
            _TRAINING,
        )
    ),
    Hook(
        module=_TRAINING,
        attribute="logical_and_across_model_parallel_group",
        make=_own_value_if_deferring,
        why="waits for all stages; the success of a deferred update is the same on all of them",
    ),
    Hook(
        module=_TRAINING,
        attribute="reduce_max_stat_across_model_parallel_group",
        make=_own_value_if_deferring,
        why="waits for all stages; every stage knows the gradient norm and the learning rate",
    ),
    Hook(
        module="megatron.core.distributed.finalize_model_grads",
        attribute="_allreduce_word_embedding_grads",
        make=_embedding_gradients,
        why="waits for the other end of the pipeline; the deferred update sums the copies",
    ),
    Hook(
        module="megatron.core.timers",
        attribute="Timer.elapsed",
        make=_elapsed_without_barrier,
        why="a barrier over all ranks at every log line",
    ),
    Hook(
        module=_TRAINING,
        attribute="training_log",
        make=_log_scalars,
        why="our scalars go to the same writers",
    ),
    Hook(
        module=_TRAINING,
        attribute="print_rank_last",
        make=_log_line,
        why="the bubble's share stands in the iteration's log line",
    ),
    Hook(
        module="megatron.core.pipeline_parallel.p2p_communication",
        attribute="P2PCommunicator._communicate",
        make=_timed_receive,
        why="the time spent in receives, for --log-pipeline-bubble",
    ),
    Hook(
        module=_TRAINING,
        attribute="checkpoint_and_decide_exit",
        make=_decide_exit,
        why="collectives over all ranks with --exit-signal-handler and --exit-duration-in-mins",
    ),
    Hook(
        module=_TRAINING,
        attribute="maybe_finalize_async_save",
        make=_finalize_async_save,
        why="a collective over all ranks while an asynchronous save is under way",
    ),
    Hook(
        module=_TRAINING,
        attribute="should_disable_forward_pre_hook",
        make=_forward_pre_hook,
        why="--overlap-param-gather works without Megatron's forward hooks, which do not know of "
        "weight versions",
    ),
    Hook(
        module="megatron.core.transformer.moe.moe_logging",
        attribute="MoEMetricsTracker.report",
        make=_report_moe_metrics,
        why="the metrics of the last completed batch, as soon as there is one",
    ),
    Hook(
        module="megatron.core.transformer.moe.moe_logging",
        attribute="MoEMetricsTracker._sync_metrics",
        make=_sync_moe_metrics,
        why="an all-reduce over the stages in every iteration; the sums travel with the update",
    ),
    *(
        Hook(
            module=module,
            attribute="save_checkpoint",
            make=_checkpointing("save_checkpoint"),
            why="the launched update is completed before anything is written",
        )
        for module in (_CHECKPOINTING, _TRAINING)
    ),
    *(
        Hook(
            module=module,
            attribute="load_checkpoint",
            make=_checkpointing("load_checkpoint"),
            why="the schedule goes on where the checkpoint was saved",
        )
        for module in (_CHECKPOINTING, _TRAINING)
    ),
    Hook(
        module=_CHECKPOINTING,
        attribute="_load_base_checkpoint",
        make=_checkpointing("load_base_checkpoint"),
        why="what a checkpoint holds is known before the model and the optimizer are loaded",
    ),
    Hook(
        module=_CHECKPOINTING,
        attribute="generate_state_dict",
        make=_checkpointing("generate_state_dict"),
        why="the previous weight version and the counters are saved, too",
    ),
    Hook(
        module=_CHECKPOINTING,
        attribute="get_rng_state",
        make=_checkpointing("get_rng_state"),
        why="stages that have forwarded microbatches ahead save the random state from before them",
    ),
    Hook(
        module=_CHECKPOINTING,
        attribute="maybe_msc",
        make=_whole_tracker_file,
        why="a job killed while the tracker file is written can be resumed",
    ),
    Hook(
        module="megatron.core.optimizer.distrib_optimizer",
        attribute="DistributedOptimizer.optimizer_state_keys",
        make=_optimizer_state_keys,
        why="some checkpoint formats drop a parameter's state that is not listed here",
    ),
    Hook(
        module=_TRAINING,
        attribute="evaluate",
        make=_keep_random_state,
        why="training goes on from the random state that it had before an evaluation",
    ),
)

_installed = False


def installed() -> bool:
    """Whether the hooks are in place."""
    return _installed


def install() -> None:
    """Replace the attributes of :data:`HOOKS`. A second call does nothing.

    Raises:
        RuntimeError: called too late, since a script bound a name of the table already or Megatron
            has parsed its arguments; or megatron-core is of a release that was not tested.
    """
    global _installed
    if _installed:
        return
    _refuse_if_too_late()
    _refuse_untested_release()
    # All imports first: a module imported later would bind another module's replacement.
    owners = [(hook, *_owner(hook)) for hook in HOOKS]
    for hook, owner, name in owners:
        if getattr(getattr(owner, name), "_megatron_async_hook", False):
            raise RuntimeError(f"{hook.module}.{hook.attribute} is replaced already")
    for hook, owner, name in owners:
        replacement = hook.make(getattr(owner, name))
        replacement._megatron_async_hook = True
        setattr(owner, name, replacement)
    _installed = True


def _owner(hook: Hook) -> tuple[Any, str]:
    """Return the object that has the attribute, and the attribute's name on it."""
    owner: Any = importlib.import_module(hook.module)
    *path, name = hook.attribute.split(".")
    for part in path:
        owner = getattr(owner, part)
    return owner, name


def _refuse_untested_release() -> None:
    from megatron.core.package_info import __version__ as release

    series = ".".join(release.split(".")[:2])
    tested = sorted({version for hook in HOOKS for version in hook.versions})
    if not all(series in hook.versions for hook in HOOKS):
        raise RuntimeError(
            f"megatron_async replaces parts of megatron-core {', '.join(tested)}; this is "
            f"{release}, for which that was not tested. Install megatron-core~={tested[-1]}.0."
        )


def _refuse_if_too_late() -> None:
    """A module outside of Megatron that has a name of the table bound it by value."""
    variables = sys.modules.get("megatron.training.global_vars")
    if variables is not None and variables._GLOBAL_ARGS is not None:
        raise RuntimeError(
            "megatron_async.install() was called too late: Megatron has parsed its arguments "
            "already. Call it ahead of all Megatron imports."
        )
    names = {hook.attribute for hook in HOOKS if "." not in hook.attribute}
    for name, module in list(sys.modules.items()):
        if module is None or name.partition(".")[0] in ("megatron", "megatron_async"):
            continue
        for attribute in names:
            bound = getattr(module, "__dict__", {}).get(attribute)
            if getattr(bound, "__module__", "").startswith("megatron."):
                raise RuntimeError(
                    f"megatron_async.install() was called too late: {name} has imported "
                    f"{attribute} from Megatron already. Call it ahead of all Megatron imports, or "
                    "start the script with `python -m megatron_async`."
                )
