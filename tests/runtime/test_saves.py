"""When ranks know that a save is written."""

import collections
from types import SimpleNamespace

import pytest
from megatron.training import async_utils

from megatron_async.runtime.counters.saves import SaveWatch, is_running


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> collections.deque[SimpleNamespace]:
    """Megatron's queue of saves under way."""
    queue = SimpleNamespace(async_calls=collections.deque())
    monkeypatch.setattr(async_utils, "_async_calls_queue", queue)
    return queue.async_calls


def save(index: int, *, alive: bool = True) -> SimpleNamespace:
    process = SimpleNamespace(is_alive=lambda: alive)
    return SimpleNamespace(idx=index, async_caller=SimpleNamespace(process=process))


def test_a_new_save_is_covered_two_batches_later(
    calls: collections.deque[SimpleNamespace],
) -> None:
    watch = SaveWatch()
    assert watch.covers(told=3, running=5)
    calls.append(save(1))  # at the end of batch 5's iteration
    assert [watch.covers(told=running - 2, running=running) for running in (6, 7, 8, 9)] == [
        False,
        False,
        True,
        True,
    ]
    calls.append(save(2))
    assert not watch.covers(told=8, running=10)
    calls.popleft()
    assert watch.covers(told=10, running=12)
    calls.popleft()
    assert watch.covers(told=11, running=13)


def test_the_oldest_save_counts(calls: collections.deque[SimpleNamespace]) -> None:
    assert not is_running()
    calls.append(save(1, alive=False))
    calls.append(save(2))
    assert not is_running()
    calls.popleft()
    assert is_running()
