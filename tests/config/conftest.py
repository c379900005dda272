"""Megatron's parser with the flags of the package."""

import argparse
from dataclasses import replace

import pytest

from megatron_async.config.arguments import add_arguments
from megatron_async.optimizers import OPTIMIZERS, add_optimizer_arguments


@pytest.fixture(scope="module")
def parser() -> argparse.ArgumentParser:
    from megatron.training.arguments import add_megatron_arguments

    parser = add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))
    return add_optimizer_arguments(add_arguments(parser))


@pytest.fixture(params=[False])
def adaptive_muon_runs(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether adaptive Muon works with what is installed, whatever that is."""
    record = replace(OPTIMIZERS["adaptive_muon"], runs=lambda: request.param)
    monkeypatch.setitem(OPTIMIZERS._records, record.name, record)
