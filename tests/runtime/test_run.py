"""What the hooks of one process share, and that it can be forgotten."""

import argparse
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_async.runtime import exit_flags
from megatron_async.runtime.run import Run, run


@pytest.fixture
def used() -> Run:
    """A run in which every attribute has another value than at its start."""
    found = Run()
    other: dict[str, Any] = {
        "engine": SimpleNamespace(deferring=True),
        "bubble": SimpleNamespace(),
        "fingerprints": SimpleNamespace(),
        "checkpoint": SimpleNamespace(),
        "chosen_checkpoint": (Path("tracker"), 3),
        "last_save": ("here", 4),
        "given_flags": {"exit_duration_in_mins": 5},
    }
    vars(found).update(other)
    return found


def test_a_reset_forgets_everything(used: Run) -> None:
    fresh = vars(Run())
    # A new attribute has to be forgotten, too.
    assert vars(used).keys() == fresh.keys()
    assert all(vars(used)[name] != value for name, value in fresh.items())
    used.reset()
    assert vars(used) == fresh


def test_a_reset_shares_nothing_with_another_run(used: Run) -> None:
    used.reset()
    used.given_flags["exit_interval"] = 3
    assert Run().given_flags == {}


def test_updates_are_deferred_only_if_the_engine_says_so(used: Run) -> None:
    assert used.deferring
    used.engine = None
    assert not used.deferring


def test_nothing_is_measured_without_a_measurement() -> None:
    for block in (Run().waiting(), Run().paused()):
        assert isinstance(block, nullcontext)


def test_a_process_has_one_run() -> None:
    """The hooks, the checkpoints and the flags look at the same one."""
    args = argparse.Namespace(exit_duration_in_mins=5, exit_signal_handler=True)
    assert run.given_flags == {}
    with exit_flags.replaced(args, exit_duration_in_mins=None):
        assert args.exit_duration_in_mins is None
        assert run.given_flags == {"exit_duration_in_mins": 5}
        with exit_flags.as_given(args):
            assert args.exit_duration_in_mins == 5
        assert args.exit_duration_in_mins is None
    assert args.exit_duration_in_mins == 5
    assert run.given_flags == {}
