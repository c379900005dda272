"""The Megatron attributes that are replaced, in one table.

Each row names the attribute, what replaces it, why, and the releases of megatron-core it holds for;
it stands beside the function that makes the replacement, in the module of Megatron's area:
:mod:`.arguments`, :mod:`.schedule`, :mod:`.data_parallel`, :mod:`.optimizer`,
:mod:`.training_loop`, :mod:`.logs`, :mod:`.moe`, :mod:`.checkpoints`, :mod:`.datasets`. A
replacement is made from the original and calls it; with ``--pipeline-schedule default`` every one
of them does what the original does. Modules that need Megatron are imported when a replacement
runs: the table is made before Megatron is. :func:`install` refuses to work on modules that bound a
name before it was replaced.
"""

import sys

from megatron_async.hooks import (
    arguments,
    checkpoints,
    data_parallel,
    datasets,
    logs,
    moe,
    optimizer,
    schedule,
    training_loop,
)
from megatron_async.megatron import dataset_helpers, releases
from megatron_async.megatron.replaced import Replacement, apply, is_replaced
from megatron_async.megatron.training import arguments_are_parsed

__all__ = ["HOOKS", "install", "installed"]

HOOKS: tuple[Replacement, ...] = (
    *arguments.ROWS,
    *data_parallel.ROWS,
    *optimizer.ROWS,
    *schedule.ROWS,
    *training_loop.ROWS,
    *logs.ROWS,
    *moe.ROWS,
    *checkpoints.ROWS,
    *datasets.ROWS,
)


def installed() -> bool:
    """Whether the hooks are in place."""
    return "megatron.training.arguments" in sys.modules and is_replaced(HOOKS[0])


def install() -> None:
    """Replace the attributes of :data:`HOOKS`. A second call does nothing.

    Raises:
        RuntimeError: called too late, since a script bound a name of the table already or Megatron
            has parsed its arguments; or megatron-core is of a release that was not tested.
    """
    if installed():
        return
    _refuse_if_too_late()
    version = releases.current()
    if not releases.is_supported(version):
        raise RuntimeError(
            f"megatron_async replaces parts of megatron-core {', '.join(releases.SUPPORTED)}; this "
            f"is {version}, for which that was not tested. Install a megatron-core that is "
            f"{releases.VERSIONS}."
        )
    dataset_helpers.provide()
    apply(HOOKS, version, mark=True)


def _refuse_if_too_late() -> None:
    """A module outside of Megatron that has a name of the table bound it by value."""
    if arguments_are_parsed():
        raise RuntimeError(
            "megatron_async.install() was called too late: Megatron has parsed its arguments "
            "already. Call it ahead of all Megatron imports."
        )
    names = {hook.attribute for hook in HOOKS if ":" not in hook.target}
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
