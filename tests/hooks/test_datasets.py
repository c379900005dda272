"""Data files that end early are named before training."""

from pathlib import Path

import pytest

from megatron_async.hooks import datasets
from tests.support.datasets import write_data


def test_a_whole_data_set_passes(tmp_path: Path) -> None:
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    prefix = str(write_data(tmp_path))
    with datasets.named_in_errors(prefix):
        datasets.check(IndexedDataset(prefix))
        datasets.check(IndexedDataset(prefix, mmap=False))


@pytest.mark.parametrize("mmap", [True, False])
def test_a_short_data_file_is_named(tmp_path: Path, mmap: bool) -> None:
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    prefix = write_data(tmp_path)
    file = prefix.with_suffix(".bin")
    file.write_bytes(file.read_bytes()[:-1])
    dataset = IndexedDataset(str(prefix), mmap=mmap)
    with pytest.raises(RuntimeError, match=r"data\.bin has \d+ bytes, and data\.idx says"):
        datasets.check(dataset)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # Megatron's __del__
@pytest.mark.parametrize(("suffix", "keep"), [(".idx", 0.5), (".idx", 0.001), (".bin", 0.0)])
def test_files_that_megatron_cannot_open_are_named(
    tmp_path: Path, suffix: str, keep: float
) -> None:
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    prefix = write_data(tmp_path)
    file = prefix.with_suffix(suffix)
    content = file.read_bytes()
    file.write_bytes(content[: max(10 if keep else 0, int(len(content) * keep))])
    with (
        pytest.raises(RuntimeError, match=f"the data set {prefix} cannot be read"),
        datasets.named_in_errors(str(prefix)),
    ):
        IndexedDataset(str(prefix))
