"""Fixtures that several folders share."""

import os
from collections.abc import Iterator

import pytest

from tests.support.gpt import REPOSITORY
from tests.support.shared_jobs import Results, results_of

# Processes that tests start find this package, and not one that is installed.
os.environ["PYTHONPATH"] = os.pathsep.join(
    filter(None, [str(REPOSITORY), os.environ.get("PYTHONPATH")])
)

# Whoever looks up a shared job first waits for all of them.
_SECONDS_FOR_SHARED_JOBS = 3000


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "results" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.timeout(_SECONDS_FOR_SHARED_JOBS))


@pytest.fixture(scope="session")
def results(request: pytest.FixtureRequest) -> Iterator[Results]:
    """The results of the jobs of all selected tests, see :mod:`tests.support.shared_jobs`."""
    found = results_of(request.session)
    yield found
    found.close()
