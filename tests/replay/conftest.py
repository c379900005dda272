"""The recorded run, which is run once."""

import pytest

from megatron_async.replay.trace import Trace
from tests.replay.recorded import record


@pytest.fixture(scope="package")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> list[Trace]:
    return record(tmp_path_factory.mktemp("enqueues"))
