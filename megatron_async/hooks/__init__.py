"""The Megatron attributes that are replaced, in one table.

Each row names the attribute, what replaces it, why, and the releases of megatron-core it holds for;
it stands beside the function that makes the replacement, in the module of Megatron's area:
:mod:`.arguments`, :mod:`.schedule`, :mod:`.data_parallel`, :mod:`.optimizer`,
:mod:`.training_loop`, :mod:`.logs`, :mod:`.moe`, :mod:`.checkpoints`, :mod:`.datasets`. A
replacement is made from the original and calls it; with ``--pipeline-schedule default`` every one
of them does what the original does. Modules that need Megatron are imported when a replacement
runs: the table is made before Megatron is. :func:`install` refuses to work on modules that bound a
name before it was replaced.

A fork of Megatron may call the same functions from its source (``patches/``), as decorators where
the attributes are defined. :func:`install` finds them there and replaces nothing.
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
from megatron_async.hooks.row import called_by_source
from megatron_async.megatron import dataset_helpers, releases
from megatron_async.megatron.replaced import Replacement, apply, is_for, is_replaced, resolve
from megatron_async.megatron.training import arguments_are_parsed

__all__ = ["HOOKS", "check_source", "in_source", "install", "installed"]

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


_replaced: list[Replacement] = []
"""What :func:`install` has replaced in this process."""


def in_source() -> bool:
    """Whether the source of the Megatron that this process imports calls the hooks. Imports it."""
    resolve(HOOKS[0].target)
    return installed() and not _replaced


def installed() -> bool:
    """Whether the hooks are in place, installed or in Megatron's source."""
    return "megatron.training.arguments" in sys.modules and is_replaced(HOOKS[0])


def install() -> None:
    """Replace the attributes of :data:`HOOKS`. A second call does nothing.

    In a Megatron whose source calls the hooks nothing is replaced.

    Raises:
        RuntimeError: called too late, since a script bound a name of the table already or Megatron
            has parsed its arguments; or megatron-core is of a release that was not tested; or its
            source calls some of the hooks and lacks others.
    """
    if _replaced:
        return
    version = releases.current()
    if releases.is_supported(version) and in_source():
        check_source()
        return
    _refuse_if_too_late()
    if not releases.is_supported(version):
        raise RuntimeError(
            f"megatron_async replaces parts of megatron-core {', '.join(releases.SUPPORTED)}; this "
            f"is {version}, for which that was not tested. Install a megatron-core that is "
            f"{releases.VERSIONS}."
        )
    dataset_helpers.provide()
    _replaced.extend(apply(HOOKS, version, once=True))


def check_source() -> None:
    """Look whether a Megatron whose source calls the hooks calls all of them.

    Raises:
        RuntimeError: some are missing, as in a fork that was patched for another version.
    """
    dataset_helpers.provide()
    rows = [row for row in HOOKS if is_for(row, releases.current())]
    for row in rows:
        resolve(row.target)
    missing = [row.name for row in rows if not called_by_source(row)]
    if missing:
        raise RuntimeError(
            f"megatron_async: the source of this Megatron calls megatron_async, but not for "
            f"{', '.join(missing)}: it was patched for another release, or for another version of "
            "megatron_async. Apply the patch that belongs to both, see patches/README.md."
        )


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
