"""The lengths of packed sequences, on their way to Megatron's count of operations."""

import pytest
import torch
from megatron.training import training

from megatron_async.megatron.packed_sequences import have_all_ranks_sum, take_sums
from megatron_async.runtime.counters.packed_sequences import PackedSequences


@pytest.fixture(autouse=True)
def nothing_added(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training, "_seqlen_stats_in_iteration", None)
    monkeypatch.setattr(training, "_seqlen_stats_active", False)


def add(*ends: int) -> None:
    """What a forward of one microbatch does."""
    training.update_seqlen_stats_from_cu_seqlens(torch.tensor(ends, dtype=torch.int32))


def test_what_forwards_add_is_taken_once() -> None:
    counter = PackedSequences(copies=2)
    assert counter.collect() == {}
    add(0, 3, 8)
    add(0, 4)
    numbers = counter.collect()
    assert [float(numbers[name]) for name in counter.names] == [12.0, 9 + 25 + 16]
    assert counter.collect() == {}
    add(0, 2)
    assert [float(value) for value in counter.collect().values()] == [2.0, 4.0]


def test_sums_of_several_updates_add_up_and_are_saved() -> None:
    counter = PackedSequences(copies=2)
    assert counter.take() == (0.0, 0.0)
    for tokens, squares in ((24.0, 100.0), (4.0, 8.0)):
        counter.receive(dict(zip(counter.names, (tokens, squares), strict=True)))
    # Those of other counters, of an update with none of these.
    counter.receive({"signals": 1.0})
    resumed = PackedSequences(copies=2)
    resumed.load_state_dict(counter.state_dict())
    for each in (counter, resumed):
        assert each.take() == (14.0, 54.0)
        assert each.take() == (0.0, 0.0)


def test_a_rank_that_ran_nothing_takes_part_in_megatrons_sum(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: "cpu")
    assert training.consume_seqlen_stats_in_iteration() == (None, None)
    have_all_ranks_sum()
    assert training.consume_seqlen_stats_in_iteration() == (0.0, 0.0)
    assert take_sums() is None
