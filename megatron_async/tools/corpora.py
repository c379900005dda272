"""Text that every installation has: the source files of Python's library, or of a package."""

import importlib.util
import random
import sysconfig
from pathlib import Path

from megatron_async.tools.data import DataError, Input

__all__ = ["package_sources", "standard_library"]


def standard_library() -> list[Input]:
    """The source files of the running interpreter's standard library, in a fixed random order.

    Raises:
        DataError: there are none.
    """
    left_out = {"site-packages", "dist-packages", "test", "tests", "idle_test"}
    return _sources(Path(sysconfig.get_paths()["stdlib"]), left_out, of="this Python's library")


def package_sources(name: str) -> list[Input]:
    """The Python source files of an installed package, in a fixed random order. Those of torch are
    some 50 MB.

    Raises:
        DataError: the package is not installed, or has no source files.
    """
    spec = importlib.util.find_spec(name)
    if spec is None or not spec.submodule_search_locations:
        raise DataError(f"there is no installed package {name} whose sources could be the text.")
    return _sources(Path(next(iter(spec.submodule_search_locations))), set(), of=name)


def _sources(root: Path, left_out: set[str], *, of: str) -> list[Input]:
    """The order makes the end of the dataset, which the validation reads, a sample of all of it."""
    files = [
        Input(path=path, size=path.stat().st_size, named=False)
        for path in sorted(root.rglob("*.py"))
        if not left_out & set(path.relative_to(root).parts)
    ]
    files = [file for file in files if file.size]
    if not files:
        raise DataError(f"there are no source files of {of} in {root}.")
    random.Random(0).shuffle(files)
    return files
