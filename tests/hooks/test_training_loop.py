"""What Megatron's training loop is given."""

from types import SimpleNamespace
from typing import Any

import pytest

from megatron_async.hooks.training_loop import ROWS
from megatron_async.runtime.run import run


def test_the_loss_is_averaged_beside_the_reduction_in_flight(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (row,) = [row for row in ROWS if row.attribute == "get_attr_wrapped_model"]
    groups = SimpleNamespace(mp="mp", pp="pp", dp_cp="replicas", dp_cp_gtp_remat="replicas")
    read = row.make(lambda _, attribute: groups if attribute == "pg_collection" else attribute)
    assert read(None, "pg_collection") is groups  # Megatron's own schedule
    engine: Any = SimpleNamespace(deferring=True, loss_group="beside")
    monkeypatch.setattr(run, "engine", engine)
    found = read(None, "pg_collection")
    assert vars(found) == {**vars(groups), "dp_cp_gtp_remat": "beside"}
    assert groups.dp_cp_gtp_remat == "replicas"
    assert read(None, "other") == "other"
    engine.loss_group = None  # no reduction in flight
    assert read(None, "pg_collection") is groups
    engine.loss_group, engine.deferring = "beside", False  # a synchronous iteration
    assert read(None, "pg_collection") is groups
