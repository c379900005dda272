"""Text that every installation has."""

import pytest

from megatron_async.tools import corpora
from megatron_async.tools.data import DataError


def test_dataset_is_made_of_the_running_interpreters_library() -> None:
    files = corpora.standard_library()
    names = {file.path.name for file in files}
    assert {"argparse.py", "dataclasses.py"} <= names
    assert files == corpora.standard_library()  # the same order again
    assert [file.path for file in files] != sorted(file.path for file in files)
    assert not any("site-packages" in file.path.parts for file in files)


def test_sources_of_a_package_are_in_a_fixed_order() -> None:
    files = corpora.package_sources("pytest")
    assert files
    assert files == corpora.package_sources("pytest")
    assert {file.path.suffix for file in files} == {".py"}
    with pytest.raises(DataError, match="no installed package no_such_package"):
        corpora.package_sources("no_such_package")
