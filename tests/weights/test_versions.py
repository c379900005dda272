"""Two weight versions: which tensor is where, and that a mix-up does not go unnoticed."""

import dataclasses
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_async.weights.versions import WeightVersions
from tests.support.gpt import ASYNC
from tests.support.shared_jobs import Job, Results, job


def _plain() -> tuple[Any, Any]:
    """A model whose parameters have a storage each; one of them is frozen."""
    model: Any = torch.nn.Linear(3, 2)
    with torch.no_grad():
        model.weight.copy_(torch.arange(6.0).view(2, 3))
        model.bias.copy_(torch.tensor([10.0, 20.0]))
    model.frozen = torch.nn.Parameter(torch.ones(4), requires_grad=False)
    optimizer = torch.optim.SGD([model.weight, model.bias], lr=1.0)
    return model, SimpleNamespace(optimizer=optimizer)


class _Flat(torch.nn.Module):
    """What Megatron's DDP looks like with the distributed optimizer: views of one flat buffer.

    ``data`` is 6 weights, 2 biases and 4 elements of padding; this rank's shard is the second half.
    """

    def __init__(self) -> None:
        super().__init__()
        flat = torch.arange(12.0)
        self.linear = torch.nn.Linear(3, 2)
        self.linear.weight.data = flat[:6].view(2, 3)
        self.linear.bias.data = flat[6:8]
        bucket = SimpleNamespace(param_data=flat[:12])
        buffer = SimpleNamespace(param_data=flat, buckets=[bucket])
        object.__setattr__(self, "buffers", [buffer])
        object.__setattr__(self, "expert_parallel_buffers", [])
        self.bucket_groups = [
            SimpleNamespace(buckets=[bucket], cached_param_buffer_shard_list=["cached"])
        ]


def _flat() -> tuple[Any, Any, torch.nn.Parameter]:
    model = _Flat()
    shard = torch.nn.Parameter(model.linear.bias.data[:2])
    leaf = SimpleNamespace(shard_fp32_groups=[[shard]], shard_float16_groups=[[None]])
    return model, SimpleNamespace(chained_optimizers=[leaf]), shard


def _values(model: torch.nn.Module) -> list[list[float]]:
    return [p.detach().flatten().tolist() for p in model.parameters() if p.requires_grad]


def test_new_version_is_made_from_the_newest() -> None:
    model, optimizer = _plain()
    weights = WeightVersions(model, optimizer)
    start = _values(model)
    for version in range(1, 6):
        with weights.next_version() as making:
            assert making == version
            assert _values(model) == [[x + version - 1 for x in row] for row in start]
            assert weights.newest == version - 1
            with torch.no_grad():
                for p in weights.parameters:
                    p.add_(1.0)
        assert weights.newest == weights.selected == version
        for selected in (version, version - 1):
            weights.select(selected)
            assert _values(model) == [[x + selected for x in row] for row in start]


def test_versions_that_are_gone_or_not_there_are_refused() -> None:
    model, optimizer = _plain()
    weights = WeightVersions(model, optimizer)
    with pytest.raises(ValueError, match="version -1"):
        weights.select(-1)
    for _ in range(2):
        with weights.next_version():
            pass
    for version in (0, 3):
        with pytest.raises(ValueError, match=f"version {version} is gone or not there yet"):
            weights.select(version)


def test_a_single_version_stands_for_the_one_before_and_no_older_one() -> None:
    """An update completed early is one; two would be a fault of the schedule."""
    weights = WeightVersions(*_plain(), count=1)
    for _ in range(3):
        with weights.next_version():
            pass
    for version in (3, 2):
        weights.compute_on(version)
    for version in (1, 4):
        with pytest.raises(ValueError, match=f"version {version} is gone or not there yet"):
            weights.compute_on(version)


@pytest.mark.parametrize("build", [lambda: _plain(), lambda: _flat()[:2]], ids=["plain", "flat"])
@pytest.mark.parametrize("count", [1, 3, 4])
def test_as_many_versions_as_are_asked_for(build: Any, count: int) -> None:
    model, optimizer = build()
    weights = WeightVersions(model, optimizer, count=count)
    assert weights.count == count
    start = _values(model)
    for version in range(1, 10):
        with weights.next_version(), torch.no_grad():
            for p in weights.parameters:
                p.add_(1.0)
        oldest = max(version - count + 1, 0)
        for kept in range(oldest, version + 1):
            weights.compute_on(kept)
            assert _values(model) == [[x + kept for x in row] for row in start]
        if oldest:
            with pytest.raises(ValueError, match=f"version {oldest - 1} is gone"):
                weights.select(oldest - 1)
        weights.select(version)
    weights.restart(newest=2)
    with weights.next_version():
        pass
    assert _values(model) == [[x + 9 for x in row] for row in start]
    storages = {s.data_ptr() for v in range(4 - count, 4) for s in weights.storages(v)}
    assert len(storages) == count * len(weights.storages(0))


def test_a_version_before_the_newest_needs_a_place() -> None:
    weights = WeightVersions(*_plain(), count=1)
    with pytest.raises(ValueError, match="no version before"):
        weights.set_previous([])
    with pytest.raises(ValueError, match="at least one weight version, got 0"):
        WeightVersions(*_plain(), count=0)


def test_failed_update_is_not_published() -> None:
    model, optimizer = _plain()
    weights = WeightVersions(model, optimizer)
    start = _values(model)

    def fail() -> None:
        with weights.next_version(), torch.no_grad():
            model.weight.fill_(torch.nan)
            raise RuntimeError("the norm is NaN")

    with pytest.raises(RuntimeError, match="the norm is NaN"):
        fail()
    assert weights.newest == weights.selected == 0
    assert _values(model) == start


def test_live_graph_keeps_its_version() -> None:
    """Updates between forward and backward: the gradient is that of the forward's weights."""
    model: Any = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1))
    twin: Any = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1))
    twin.load_state_dict(model.state_dict())
    weights = WeightVersions(model, SimpleNamespace())
    data = torch.randn(8, 4, generator=torch.Generator().manual_seed(0))
    loss = model(data).square().sum()
    with weights.next_version(), torch.no_grad():
        for p in model.parameters():
            p.mul_(3.0)
    # As the runtime does it: select the version of the batch, then run backward.
    weights.select(0)
    loss.backward()
    twin(data).square().sum().backward()
    for mine, its in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(mine.grad, its.grad)


def test_tied_parameter_moves_once_and_frozen_ones_are_shared() -> None:
    model, optimizer = _plain()
    model.tied = model.weight
    weights = WeightVersions(model, optimizer)
    assert len(weights.parameters) == 2
    frozen = model.frozen.data_ptr()
    with weights.next_version():
        pass
    assert model.tied is model.weight
    assert model.frozen.data_ptr() == frozen


def test_everything_that_views_the_flat_buffer_moves_together() -> None:
    model, optimizer, shard = _flat()
    (buffer,), (group,) = model.buffers, model.bucket_groups
    weights = WeightVersions(model, optimizer)
    first = buffer.param_data.untyped_storage().data_ptr()

    def storages() -> set[int]:
        views = [*model.parameters(), shard, buffer.param_data, buffer.buckets[0].param_data]
        return {view.untyped_storage().data_ptr() for view in views}

    assert storages() == {first}
    with weights.next_version():
        (second,) = storages()
        assert second != first
        # Megatron made these from the first buffer.
        assert group.cached_param_buffer_shard_list == [None]
        with torch.no_grad():
            shard.add_(100.0)
    assert model.linear.bias.tolist() == [106.0, 107.0]
    # Padding is part of the buffer that is gathered and saved.
    assert buffer.param_data[8:].tolist() == [8.0, 9.0, 10.0, 11.0]
    group.cached_param_buffer_shard_list = ["cached"]
    weights.select(0)
    assert storages() == {first}
    assert group.cached_param_buffer_shard_list == [None]
    assert model.linear.bias.tolist() == [6.0, 7.0]


def _moved(
    monkeypatch: pytest.MonkeyPatch, switch: Callable[[WeightVersions, int], None]
) -> list[str]:
    """What is repointed when four microbatches take turns with two versions."""
    model, optimizer, _ = _flat()
    weights = WeightVersions(model, optimizer)
    with weights.next_version():
        pass
    moved: list[str] = []
    for what in ("parameters", "flat_buffers", "shards"):
        name = f"_repoint_{what}"
        original = getattr(WeightVersions, name)

        def repoint(
            self: WeightVersions, side: int, what: str = what, original: Any = original
        ) -> None:
            moved.append(what)
            original(self, side)

        monkeypatch.setattr(WeightVersions, name, repoint)
    for version in (0, 1, 1, 0):
        switch(weights, version)
    return moved


def test_a_microbatch_repoints_what_forward_and_backward_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert _moved(monkeypatch, WeightVersions.compute_on) == ["parameters"] * 3
    # What it would cost to move all of it at each switch.
    assert sorted(_moved(monkeypatch, WeightVersions.select)) == [
        *["flat_buffers"] * 3,
        *["parameters"] * 3,
        *["shards"] * 3,
    ]


def test_a_microbatch_moves_the_parameters_alone() -> None:
    model, optimizer, shard = _flat()
    weights = WeightVersions(model, optimizer)
    with weights.next_version(), torch.no_grad():
        for p in weights.parameters:
            p.add_(1.0)
    buffer, newest = model.buffers[0], _values(model)
    pointers = buffer.param_data.data_ptr(), shard.data_ptr()
    weights.compute_on(0)
    assert _values(model) != newest
    assert (buffer.param_data.data_ptr(), shard.data_ptr()) == pointers
    weights.compute_on(1)
    assert _values(model) == newest
    weights.compute_on(0)
    weights.select(1)  # what reads the model next finds all of it on one version
    assert _values(model) == newest
    assert (buffer.param_data.data_ptr(), shard.data_ptr()) == pointers


@pytest.mark.parametrize(("count", "stale"), [(1, [False] * 4), (2, [True, False, True, False])])
def test_handles_of_the_newest_version_are_good_for_one_save(count: int, stale: list[bool]) -> None:
    """Why a worker that keeps the handles it saw at the first save is refused: it would write the
    version before the newest. With a single version nothing moves."""
    model, optimizer = _plain()
    weights = WeightVersions(model, optimizer, count=count)
    handles = [parameter.data for parameter in weights.parameters]
    found = []
    for _ in stale:
        with weights.next_version(), torch.no_grad():
            for parameter in weights.parameters:
                parameter.add_(1.0)
        found.append([handle.flatten().tolist() for handle in handles] != _values(model))
    assert found == stale


def test_view_outside_of_the_buffers_is_refused() -> None:
    model, optimizer, _ = _flat()
    optimizer.chained_optimizers[0].shard_float16_groups[0][0] = torch.zeros(2)
    with pytest.raises(RuntimeError, match="lies outside of the parameter buffers"):
        WeightVersions(model, optimizer)


@pytest.mark.parametrize("updates", [0, 1, 2])
def test_restart_numbers_what_the_model_points_to(updates: int) -> None:
    model, optimizer = _plain()
    weights = WeightVersions(model, optimizer)
    for _ in range(updates):
        with weights.next_version(), torch.no_grad():
            model.weight.add_(1.0)
    here = _values(model)
    weights.restart(newest=7)
    assert weights.newest == weights.selected == 7
    assert _values(model) == here
    with weights.next_version(), torch.no_grad():
        model.weight.add_(1.0)
    weights.select(7)
    assert _values(model) == here


def test_previous_version_can_be_set() -> None:
    model, optimizer = _plain()
    weights = WeightVersions(model, optimizer)
    weights.restart(newest=3)
    newest = _values(model)
    weights.set_previous([torch.full_like(p, 5.0) for p in weights.parameters])
    assert _values(model) == newest
    assert all(bool((t == 5.0).all()) for t in weights.tensors(2))
    weights.select(2)
    assert _values(model) == [[5.0] * 6, [5.0] * 2]
    with pytest.raises(ValueError, match="expected 2 tensors, got 1"):
        weights.set_previous([torch.zeros(2, 3)])
    with pytest.raises(ValueError, match="expected shape"):
        weights.set_previous([torch.zeros(3, 2), torch.zeros(2)])


def test_one_more_copy_of_the_weights() -> None:
    """Counted over unique storages."""
    model, optimizer = _plain()
    weights = WeightVersions(model, optimizer)
    flat_model, flat_optimizer, _ = _flat()
    flat_weights = WeightVersions(flat_model, flat_optimizer)
    for versions, elements in ((weights, 8), (flat_weights, 12)):
        with versions.next_version():
            pass
        each = [{s.data_ptr(): s.nbytes() for s in versions.storages(v)} for v in (0, 1)]
        assert not each[0].keys() & each[1].keys()
        assert [sum(sizes.values()) for sizes in each] == [4 * elements] * 2


# Mutations: each leaves out one thing that has to be repointed.

DROP = """
from megatron_async.weights.versions import WeightVersions
assert callable(WeightVersions.{name})
WeightVersions.{name} = lambda self, side: None
"""
MUTATIONS = {
    "parameters": DROP.format(name="_repoint_parameters"),
    "flat buffers": DROP.format(name="_repoint_flat_buffers"),
    "optimizer's shards": DROP.format(name="_repoint_shards"),
    "cached shards": """
from megatron_async.weights.versions import WeightVersions
original = WeightVersions._repoint_flat_buffers
def repoint(self, side):
    kept = [group.cached_param_buffer_shard_list for group in self._bucket_groups]
    original(self, side)
    for group, shards in zip(self._bucket_groups, kept, strict=True):
        group.cached_param_buffer_shard_list = shards
WeightVersions._repoint_flat_buffers = repoint
""",
}
PIPELINE: dict[str, Any] = {"pipeline_model_parallel_size": 2}
DISTRIBUTED: dict[str, Any] = {"use_distributed_optimizer": True}


@dataclasses.dataclass(frozen=True)
class MixUp:
    broken: str
    ranks: int
    flags: tuple[tuple[str, Any], ...]

    def job(self, prelude: str) -> Job:
        # Where nothing is broken, a job of tests/training/test_equality.py.
        return job(self.ranks, prelude=prelude, **{**ASYNC, "clip_grad": 0.5, **dict(self.flags)})

    @property
    def jobs(self) -> tuple[Job, Job]:
        return self.job(""), self.job(MUTATIONS[self.broken])


def _mix_up(broken: str, ranks: int, *, slow: bool = False, **flags: Any) -> object:
    case = MixUp(broken, ranks, tuple(flags.items()))
    marks = [pytest.mark.slow] if slow else []
    return pytest.param(case, id=f"{broken}-{'-'.join(flags) or 'plain'}", marks=marks)


@pytest.mark.parametrize(
    "case",
    [
        _mix_up("parameters", 1),
        _mix_up("parameters", 2, **PIPELINE),
        _mix_up("parameters", 2, slow=True, **DISTRIBUTED),
        _mix_up("flat buffers", 2, **DISTRIBUTED),
        _mix_up("flat buffers", 2, slow=True, **DISTRIBUTED, bf16=True),
        _mix_up("cached shards", 2, **DISTRIBUTED),
        # The optimizer writes the new weights into the buffer that microbatches in flight use.
        _mix_up("optimizer's shards", 2, **PIPELINE, **DISTRIBUTED),
    ],
)
def test_mix_up_changes_the_losses(results: Results, case: MixUp) -> None:
    right, wrong = (results[each].losses for each in case.jobs)
    # Batches 0 and 1 are both on version 0, before anything can be mixed up.
    assert right[0] == wrong[0]
    worst = max(abs(a - b) / a for a, b in zip(right, wrong, strict=True))
    print(f"losses differ by up to {worst:.1e}")
    # Well above what test_equality.py allows.
    assert not worst < 5 * (2e-4 if dict(case.flags).get("bf16") else 1e-6)
