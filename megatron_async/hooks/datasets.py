"""A .bin or .idx file that ends early is named before training.

Megatron looks at the data when a sample is read: minutes or days into a run, by an error of NumPy
that names no file, or with ``--no-mmap-bin-files`` by training on whatever was in memory
(megatron/core/datasets/indexed_dataset.py).
"""

import contextlib
import functools
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megatron_async.config.startup import flags_are_used
from megatron_async.hooks.row import hook, row
from megatron_async.megatron import dataset_helpers

__all__ = ["ROWS", "check", "compile_unless_found", "named_in_errors", "whole_data_file"]

_REMEDY = "Copy or make the data set again; `megatron-async data` writes both files."


@contextlib.contextmanager
def named_in_errors(prefix: str) -> Iterator[None]:
    """Name the data set in what goes wrong while its index is read.

    Args:
        prefix: path of the .bin and .idx files without their suffix.

    Raises:
        RuntimeError: the index ends early, or a file is empty.
    """
    try:
        yield
    except (ValueError, struct.error) as error:
        raise RuntimeError(
            f"megatron_async: the data set {prefix} cannot be read: {error}. Its .idx or .bin file "
            f"ends early, or is something else. {_REMEDY}"
        ) from error


def check(dataset: Any) -> None:
    """Compare the size of a .bin file with what its index says.

    Data in object storage is not looked at, nor with ``--dataloader-fast-cache-load``, which is
    there to spare file systems such questions.

    Args:
        dataset: Megatron's ``IndexedDataset``, initialized.

    Raises:
        RuntimeError: the .bin file is shorter.
    """
    from megatron.core.datasets.indexed_dataset import get_bin_path
    from megatron.core.msc_utils import MultiStorageClientFeature

    index = dataset.index
    if (
        dataset.fast_cache_load
        or dataset.object_storage_config is not None
        or MultiStorageClientFeature.is_enabled()
        or len(index) == 0
    ):
        return
    needed = int(index.sequence_pointers[-1])
    needed += int(index.sequence_lengths[-1]) * int(index.dtype_size)
    path = Path(get_bin_path(dataset.path_prefix))
    found = path.stat().st_size
    if found < needed:
        raise RuntimeError(
            f"megatron_async: {path} has {found} bytes, and {path.with_suffix('.idx').name} says "
            f"that there are {needed}: the file ends early. {_REMEDY}"
        )


@hook
def whole_data_file(original: Any) -> Any:
    @functools.wraps(original)
    def initialize(self: Any, path_prefix: str, *args: Any, **kwargs: Any) -> None:
        if not flags_are_used():
            original(self, path_prefix, *args, **kwargs)
            return
        with named_in_errors(path_prefix):
            original(self, path_prefix, *args, **kwargs)
        check(self)

    return initialize


@hook
def compile_unless_found(original: Any) -> Any:
    compile_if_missing = dataset_helpers.compile_if_missing(original)

    @functools.wraps(original)
    def compile_helpers() -> None:
        if flags_are_used():
            compile_if_missing()
        else:
            original()

    return compile_helpers


ROWS = (
    row(
        "megatron.core.datasets.utils",
        "compile_helpers",
        compile_unless_found,
        "a fresh checkout compiles its helpers with whatever python3 and pybind11 there are; the "
        "installed wheel has them",
    ),
    row(
        "megatron.core.datasets.indexed_dataset:IndexedDataset",
        "initialize",
        whole_data_file,
        "a data file that ends early is named before training, not when its end is read",
    ),
)
