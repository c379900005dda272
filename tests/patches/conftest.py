"""A copy of the installed Megatron, patched."""

import importlib.util
import os
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest

from megatron_async.megatron import releases
from tests.support.gpt import REPOSITORY


@pytest.fixture(scope="session")
def site_packages() -> Path:
    """The folder that holds the installed ``megatron``."""
    spec = importlib.util.find_spec("megatron.core")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parents[2]


@pytest.fixture(scope="session")
def patch() -> Path:
    """The patch for the installed release."""
    series = releases.series(releases.current())
    return REPOSITORY / "patches" / f"megatron-core-{series}.patch"


@pytest.fixture(scope="session")
def patched(
    site_packages: Path, patch: Path, tmp_path_factory: pytest.TempPathFactory
) -> Mapping[str, str]:
    """The environment of jobs that run on the patched copy."""
    folder = tmp_path_factory.mktemp("patched")
    shutil.copytree(
        site_packages / "megatron",
        folder / "megatron",
        ignore=shutil.ignore_patterns("__pycache__"),
    )
    # Inside of a git repository `git apply` would leave out what is not of that.
    subprocess.run(
        ["git", "apply", str(patch)],
        cwd=folder,
        env={**os.environ, "GIT_CEILING_DIRECTORIES": str(folder.parent)},
        check=True,
    )
    path = [str(folder), str(REPOSITORY), os.environ.get("PYTHONPATH", "")]
    return {"PYTHONPATH": os.pathsep.join(filter(None, path)), "PATCHED": str(folder)}
