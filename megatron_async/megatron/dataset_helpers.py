"""Megatron's compiled dataset helpers, for a checkout that has not compiled them.

A checkout compiles them at the first start, with ``python3`` of the PATH and its pybind11. The
wheel of megatron-core that is installed beside it has them compiled, for this very interpreter.

Source: megatron/core/datasets/utils.py, ``compile_helpers``, and the Makefile beside it.
"""

import functools
import importlib.metadata
import importlib.util
import sys
from collections.abc import Callable
from importlib.machinery import EXTENSION_SUFFIXES, ModuleSpec
from pathlib import Path
from typing import Any

from megatron_async.megatron import releases

__all__ = ["compile_if_missing", "provide"]

_MODULE = "megatron.core.datasets.helpers_cpp"


class _FromWheel:
    """A finder behind all others: finds the helpers in the wheel, and nothing else."""

    @staticmethod
    def find_spec(name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name != _MODULE:
            return None
        file = _in_wheel()
        return None if file is None else importlib.util.spec_from_file_location(name, file)


def _in_wheel() -> Path | None:
    """The helpers' file in the installed distribution, if it is of the release that runs."""
    try:
        wheel = importlib.metadata.distribution("megatron-core")
    except importlib.metadata.PackageNotFoundError:
        return None
    if releases.series(wheel.version) != releases.series(releases.current()):
        return None
    stem = _MODULE.replace(".", "/")
    for suffix in EXTENSION_SUFFIXES:
        for file in wheel.files or ():
            if str(file) == stem + suffix:
                found = Path(str(wheel.locate_file(file)))
                return found if found.exists() else None
    return None


def provide() -> None:
    """Let the helpers be found in the wheel where the Megatron that runs lacks them. A second call
    does nothing."""
    if not any(isinstance(finder, _FromWheel) for finder in sys.meta_path):
        sys.meta_path.append(_FromWheel())


def compile_if_missing(original: Callable[[], None]) -> Callable[[], None]:
    """Make a ``compile_helpers`` that does nothing where the helpers can be imported."""

    @functools.wraps(original)
    def compile_helpers() -> None:
        if importlib.util.find_spec(_MODULE) is None:
            original()

    return compile_helpers
