"""The surroundings of rank 0 of a run, as far as this machine does not have them.

A command is mostly looked at where it will not run: on a login node or a laptop, without a GPU and
without what is installed for GPUs. There the checks see a GPU and a Transformer Engine that are not
there. Where a GPU is, the run could start, and nothing is assumed.
"""

import argparse
import contextlib
import enum
import importlib.util
import io
import logging
import os
import sys
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Final
from unittest import mock

from packaging.version import Version

from megatron_async.megatron import releases
from megatron_async.megatron.replaced import Replacement, applies, resolve
from megatron_async.tools.named_files import exists
from megatron_async.tools.training_command import TrainingCommand

__all__ = ["Engine", "pretended", "without_engine"]

_HOPPER: Final = 9
"""Compute capability that checks on the GPU see where there is none."""
_RECENT: Final = Version("2.10")
"""Transformer Engine's version that checks see where it is assumed."""


class Engine(enum.Enum):
    """Transformer Engine on this machine."""

    THERE = "installed, or not used by CPU ranks"
    ASSUMED = "neither it nor a GPU is here"
    MISSING = "a GPU is here, and it is not"


# Put back once the command has been looked at.
_ASSUMED: Final = (
    Replacement(
        target="megatron.core.utils",
        attribute="_te_version",
        make=lambda original: _RECENT,
        why="Megatron compares it with what a flag needs.",
        versions=releases.VERSIONS,
    ),
    Replacement(
        target="megatron.core.models.common.embeddings.rope_utils",
        attribute="fused_apply_rotary_pos_emb",
        make=lambda original: original or object(),
        why="Megatron refuses to fuse rotary embeddings if it is None.",
        versions=releases.VERSIONS,
    ),
)


def without_engine(args: argparse.Namespace, engine: Engine) -> str | None:
    """Return what is to be said of a run that needs Transformer Engine; None if nothing is.

    Args:
        args: as Megatron's ``validate_args`` leaves them.
        engine: see :func:`pretended`.
    """
    if engine is Engine.THERE:
        return None
    # A --spec has layers of its own.
    layers = args.transformer_impl == "transformer_engine" and not getattr(args, "spec", None)
    if not layers and not args.apply_rope_fusion:
        return None
    use = "--transformer-impl transformer_engine (the default)" if layers else "--rope-fusion"
    instead = " ".join(
        [
            *(["--transformer-impl local"] if layers else []),
            *(["--no-rope-fusion"] if args.apply_rope_fusion else []),
        ]
    )
    if engine is Engine.ASSUMED:
        return (
            f"{use} needs Transformer Engine, which this machine lacks, as it lacks a GPU: the "
            "machines that train must have it, and were taken to have a recent one. Without it "
            f"give {instead}."
        )
    return (
        f"{use}: it needs Transformer Engine, which is not installed. pip install "
        f"'megatron-async[gpu]', or give {instead}."
    )


@contextlib.contextmanager
def pretended(command: TrainingCommand) -> Iterator[Engine]:
    """The surroundings of rank 0 of the run, and silence."""
    variables: dict[str, str] = {
        **_without_ranks(os.environ),
        **command.variables,
        "WORLD_SIZE": str(command.ranks),
        "RANK": "0",
        "LOCAL_RANK": "0",
    }
    script = Path(command.script)
    path = [*([str(script.resolve().parent)] if exists(script) else []), *sys.path]
    quiet = io.StringIO()
    with contextlib.ExitStack() as stack:
        before = logging.root.manager.disable
        logging.disable(logging.WARNING)
        stack.callback(logging.disable, before)
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        stack.enter_context(contextlib.redirect_stdout(quiet))
        stack.enter_context(contextlib.redirect_stderr(quiet))
        stack.enter_context(mock.patch.dict(os.environ, variables, clear=True))
        stack.enter_context(mock.patch.object(sys, "path", path))
        import torch

        gpu = torch.cuda.is_available()
        if command.cpu or not gpu:
            properties = SimpleNamespace(major=_HOPPER, minor=0)
            for name, value in (
                ("get_device_properties", properties),
                ("get_device_capability", (_HOPPER, 0)),
            ):
                stack.enter_context(
                    mock.patch.object(torch.cuda, name, lambda device=None, value=value: value)
                )
        engine = Engine.THERE
        if not command.cpu and importlib.util.find_spec("transformer_engine") is None:
            engine = Engine.MISSING if gpu else Engine.ASSUMED
        if engine is Engine.ASSUMED:
            for row in _ASSUMED:
                if applies(row, releases.current()):
                    holder = resolve(row.target)
                    value = row.make(getattr(holder, row.attribute))
                    stack.enter_context(mock.patch.object(holder, row.attribute, value))
        yield engine


def _without_ranks(environment: Mapping[str, str]) -> dict[str, str]:
    """Whoever looks at a command inside of a job is not to see its ranks."""
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK")
    return {name: value for name, value in environment.items() if name not in names}
