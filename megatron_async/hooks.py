"""The Megatron attributes that are replaced, in one table.

Each row names the attribute, what replaces it (see :mod:`megatron_async.replacements`), why, and
the releases of megatron-core it holds for. A replacement is made from the original and calls it;
with ``--pipeline-schedule default`` every one of them does what the original does. :func:`install`
refuses to work on modules that bound a name before it was replaced.
"""

import importlib
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from megatron_async import replacements

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


_TRAINING = "megatron.training.training"
_CHECKPOINTING = "megatron.training.checkpointing"

HOOKS: tuple[Hook, ...] = (
    Hook(
        module="megatron.training.arguments",
        attribute="add_megatron_arguments",
        make=replacements.add_arguments,
        why="the flags of this package",
    ),
    Hook(
        module="megatron.training.arguments",
        attribute="validate_args",
        make=replacements.validate,
        why="the checks on the flags, before anything is built",
    ),
    Hook(
        module=_TRAINING,
        attribute="get_megatron_optimizer",
        make=replacements.attach,
        why="weight versions, correction and deferred update, before a checkpoint is loaded",
    ),
    *(
        Hook(
            module=module,
            attribute="get_forward_backward_func",
            make=replacements.schedule,
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
        make=replacements.own_value_if_deferring,
        why="waits for all stages; the success of a deferred update is the same on all of them",
    ),
    Hook(
        module=_TRAINING,
        attribute="reduce_max_stat_across_model_parallel_group",
        make=replacements.own_value_if_deferring,
        why="waits for all stages; every stage knows the gradient norm and the learning rate",
    ),
    Hook(
        module="megatron.core.distributed.finalize_model_grads",
        attribute="_allreduce_word_embedding_grads",
        make=replacements.embedding_gradients,
        why="waits for the other end of the pipeline; the deferred update sums the copies",
    ),
    Hook(
        module="megatron.core.timers",
        attribute="Timer.elapsed",
        make=replacements.elapsed_without_barrier,
        why="a barrier over all ranks at every log line",
    ),
    Hook(
        module=_TRAINING,
        attribute="training_log",
        make=replacements.log_scalars,
        why="our scalars go to the same writers",
    ),
    Hook(
        module=_TRAINING,
        attribute="print_rank_last",
        make=replacements.log_line,
        why="the bubble's share stands in the iteration's log line",
    ),
    Hook(
        module="megatron.core.pipeline_parallel.p2p_communication",
        attribute="P2PCommunicator._communicate",
        make=replacements.timed_receive,
        why="the time spent in receives, for --log-pipeline-bubble",
    ),
    Hook(
        module=_TRAINING,
        attribute="checkpoint_and_decide_exit",
        make=replacements.decide_exit,
        why="collectives over all ranks with --exit-signal-handler and --exit-duration-in-mins",
    ),
    Hook(
        module=_TRAINING,
        attribute="maybe_finalize_async_save",
        make=replacements.finalize_async_save,
        why="a collective over all ranks while an asynchronous save is under way",
    ),
    Hook(
        module=_TRAINING,
        attribute="should_disable_forward_pre_hook",
        make=replacements.forward_pre_hook,
        why="--overlap-param-gather works without Megatron's forward hooks, which do not know of "
        "weight versions",
    ),
    Hook(
        module="megatron.core.transformer.moe.moe_logging",
        attribute="MoEMetricsTracker.report",
        make=replacements.report_moe_metrics,
        why="the metrics of the last completed batch, as soon as there is one",
    ),
    Hook(
        module="megatron.core.transformer.moe.moe_logging",
        attribute="MoEMetricsTracker._sync_metrics",
        make=replacements.sync_moe_metrics,
        why="an all-reduce over the stages in every iteration; the sums travel with the update",
    ),
    *(
        Hook(
            module=module,
            attribute="save_checkpoint",
            make=replacements.checkpointing("save_checkpoint"),
            why="the launched update is completed before anything is written",
        )
        for module in (_CHECKPOINTING, _TRAINING)
    ),
    *(
        Hook(
            module=module,
            attribute="load_checkpoint",
            make=replacements.checkpointing("load_checkpoint"),
            why="the schedule goes on where the checkpoint was saved",
        )
        for module in (_CHECKPOINTING, _TRAINING)
    ),
    Hook(
        module=_CHECKPOINTING,
        attribute="_load_base_checkpoint",
        make=replacements.checkpointing("load_base_checkpoint"),
        why="what a checkpoint holds is known before the model and the optimizer are loaded",
    ),
    Hook(
        module=_CHECKPOINTING,
        attribute="read_metadata",
        make=replacements.checkpointing("read_metadata"),
        why="--ckpt-step does not reach the distributed optimizer's state in a torch checkpoint, "
        "and loses to a later non-persistent checkpoint",
    ),
    Hook(
        module=_CHECKPOINTING,
        attribute="generate_state_dict",
        make=replacements.checkpointing("generate_state_dict"),
        why="the previous weight version and the counters are saved, too",
    ),
    Hook(
        module=_CHECKPOINTING,
        attribute="get_rng_state",
        make=replacements.checkpointing("get_rng_state"),
        why="stages that have forwarded microbatches ahead save the random state from before them",
    ),
    Hook(
        module=_CHECKPOINTING,
        attribute="maybe_msc",
        make=replacements.whole_tracker_file,
        why="a job killed while the tracker file is written can be resumed",
    ),
    Hook(
        module="megatron.core.optimizer.distrib_optimizer",
        attribute="DistributedOptimizer.optimizer_state_keys",
        make=replacements.optimizer_state_keys,
        why="some checkpoint formats drop a parameter's state that is not listed here",
    ),
    Hook(
        module="megatron.core.datasets.indexed_dataset",
        attribute="IndexedDataset.initialize",
        make=replacements.whole_data_file,
        why="a data file that ends early is named before training, not when its end is read",
    ),
    Hook(
        module=_TRAINING,
        attribute="evaluate",
        make=replacements.keep_random_state,
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
        if name.partition(".")[0] in ("megatron", "megatron_async"):
            continue
        for attribute in names:
            bound = getattr(module, "__dict__", {}).get(attribute)
            if getattr(bound, "__module__", "").startswith("megatron."):
                raise RuntimeError(
                    f"megatron_async.install() was called too late: {name} has imported "
                    f"{attribute} from Megatron already. Call it ahead of all Megatron imports, or "
                    "start the script with `python -m megatron_async`."
                )
