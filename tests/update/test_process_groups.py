"""The update's process groups: which are Megatron's, and which run few blocks."""

from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_async.megatron import groups
from megatron_async.update import process_groups
from megatron_async.update.process_groups import new_groups, shared_or_new_groups


class Group:
    """One of NCCL or gloo."""

    def __init__(self, ranks: list[int], **settings: Any) -> None:
        self.ranks = ranks
        self.settings = settings


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[Group]:
    """The groups that rank 0 of two makes."""
    found: list[Group] = []

    def new_group(ranks: list[int], **settings: Any) -> Group:
        found.append(Group(ranks, **settings))
        return found[-1]

    def all_gather_object(sets: list[Any], mine: Any, **_: Any) -> None:
        sets[:] = [mine] * len(sets)

    monkeypatch.setattr(dist, "get_world_size", lambda *_: 2)
    monkeypatch.setattr(dist, "get_rank", lambda *_: 0)
    monkeypatch.setattr(dist, "new_group", new_group)
    monkeypatch.setattr(dist, "all_gather_object", all_gather_object)
    monkeypatch.setattr(dist, "all_reduce", lambda *_, **__: None)
    monkeypatch.setattr(torch, "zeros", lambda *_, **__: None)
    return found


def test_a_group_of_megatrons_is_shared(made: list[Group], monkeypatch: pytest.MonkeyPatch) -> None:
    megatrons = Group([0, 1])
    monkeypatch.setattr(process_groups, "ordered_group", lambda ranks: megatrons)
    shared: list[Any] = [megatrons, megatrons, None]
    assert shared_or_new_groups([(0, 1), (0, 1), (0,)]) == shared
    assert made == []
    monkeypatch.setattr(process_groups, "ordered_group", lambda ranks: None)
    own: list[Any] = made
    assert shared_or_new_groups([(0, 1)]) == own
    assert own


def test_kernels_that_may_spin_for_long_take_few_blocks(
    made: list[Group], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Config:
        min_ctas = max_ctas = 0

    class Options:
        def __init__(self) -> None:
            self.config = Config()

    class ProcessGroupNCCL:
        pass

    ProcessGroupNCCL.Options = Options  # type: ignore[attr-defined]
    monkeypatch.setattr(dist, "ProcessGroupNCCL", ProcessGroupNCCL, raising=False)
    monkeypatch.setattr(dist, "get_backend", lambda *_: "nccl")
    new_groups([(0, 1)], few_blocks=True)
    new_groups([(0, 1)])
    options = [group.settings["pg_options"] for group in made]
    assert options[0].config.max_ctas == 2
    assert options[1] is None
    monkeypatch.setattr(dist, "get_backend", lambda *_: "gloo")
    assert groups.few_block_options() is None


def test_numbers_for_the_host_have_a_group_of_gloo(made: list[Group]) -> None:
    new_groups([(0, 1)], on_host=True)
    assert made[0].settings["backend"] == "gloo"
