"""NVIDIA's functional-test configurations: what is accepted trains, and the page says so.

MEGATRON_CHECKOUT names a checkout of Megatron-LM (core_v0.19.0); without it nothing runs here.
"""

import os
from pathlib import Path

import pytest

from tests.slow.nvidia_cases import load, outcomes, render
from tests.support.gpt import REPOSITORY

CHECKOUT = os.environ.get("MEGATRON_CHECKOUT")


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.skipif(CHECKOUT is None, reason="MEGATRON_CHECKOUT is not set")
def test_configurations_of_nvidia() -> None:
    assert CHECKOUT is not None
    found = outcomes(load(Path(CHECKOUT)))
    failed = "\n\n".join(f"{each.case.name}\n{each.failed}" for each in found if each.failed)
    assert not failed, failed
    assert sum(bool(each.losses) for each in found) > 30
    page = REPOSITORY / "docs" / "nvidia_cases.md"
    assert render(found) == page.read_text()
