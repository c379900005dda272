"""Megatron's parser with the flags of the package."""

import argparse
from collections.abc import Iterator
from dataclasses import replace

import pytest

from megatron_async.config.arguments import add_arguments
from megatron_async.optimizers import OPTIMIZERS, add_optimizer_arguments
from megatron_async.schedules import SCHEDULES
from tests.config.cases import AWKWARD


@pytest.fixture(scope="module")
def parser() -> argparse.ArgumentParser:
    from megatron.training.arguments import add_megatron_arguments

    parser = add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))
    return add_optimizer_arguments(add_arguments(parser))


@pytest.fixture
def awkward_schedule() -> Iterator[None]:
    """A schedule with something against its own flags."""
    SCHEDULES.register(AWKWARD)
    yield
    SCHEDULES.unregister(AWKWARD.name)


@pytest.fixture(params=[False])
def adaptive_muon_runs(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether adaptive Muon works with what is installed, whatever that is."""
    record = replace(OPTIMIZERS["adaptive_muon"], runs=lambda: request.param)
    monkeypatch.setitem(OPTIMIZERS._records, record.name, record)
