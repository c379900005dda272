"""The Megatron attributes that are replaced, in one table.

Each row names the attribute, what replaces it, why, and the releases of megatron-core it holds for.
A replacement is made from the original and calls it; with ``--pipeline-schedule default`` every one
of them does what the original does. :func:`install` refuses to work on modules that bound a name
before it was replaced.
"""

import functools
import importlib
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

        synchronous = original(*args, **kwargs)
        running = engine.current()
        if running is None:
            return synchronous
        return functools.partial(running.forward_backward, synchronous)

    return get_forward_backward_func


def _own_value_if_deferring(original: Any) -> Any:
    @functools.wraps(original)
    def reduce_across_model_parallel_group(value: Any, *args: Any, **kwargs: Any) -> Any:
        from megatron_async import engine

        return value if engine.deferring() else original(value, *args, **kwargs)

    return reduce_across_model_parallel_group


def _skip_if_deferring(original: Any) -> Any:
    @functools.wraps(original)
    def allreduce_word_embedding_grads(*args: Any, **kwargs: Any) -> Any:
        from megatron_async import engine

        return None if engine.deferring() else original(*args, **kwargs)

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


_TRAINING = "megatron.training.training"

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
        make=_skip_if_deferring,
        why="waits for the other end of the pipeline; the deferred update sums the copies",
    ),
    Hook(
        module="megatron.core.timers",
        attribute="Timer.elapsed",
        make=_elapsed_without_barrier,
        why="a barrier over all ranks at every log line",
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
