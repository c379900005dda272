"""Predicted times against jobs whose stages slept instead of computing."""

import csv
from pathlib import Path

import pytest

from megatron_async.planning.candidates import candidate
from megatron_async.planning.plan import predict
from megatron_async.schedules.fresh_2bw import DELAYED_MICROBATCHES
from megatron_async.schedules.simulator import Costs
from tests.support.gpt import REPOSITORY

NAMES = {
    "1f1b": "1f1b",
    "interleaved": "interleaved",
    "2bw-undeferred": "pipedream-2bw-undeferred",
    "2bw": "pipedream-2bw",
    "fresh-2bw": "fresh-2bw",
    "paci": "paci",
}
"""What the planner calls the modes of benchmarks/paced.py."""


def measured(table: str) -> list[dict[str, str]]:
    path = Path(REPOSITORY) / "docs" / "benchmarks" / table
    with path.open(newline="", encoding="utf-8") as file:
        return [row for row in csv.DictReader(file) if row["mode"] in NAMES]


ROWS = [*measured("schedules.csv"), *measured("paced.csv")]


def test_all_schedules_were_measured() -> None:
    assert {row["mode"] for row in ROWS} == set(NAMES)
    assert len(ROWS) > 40


@pytest.mark.parametrize(
    "row", ROWS, ids=lambda r: f"{r['mode']}-p{r['stages']}-m{r['microbatches']}"
)
def test_time_is_within_5_percent_of_the_measured_one(row: dict[str, str]) -> None:
    planned = candidate(NAMES[row["mode"]])
    delayed = row.get("delayed_microbatches", DELAYED_MICROBATCHES.default)
    pipeline = planned.pipeline(
        stages=int(row["stages"]),
        extra_warmup=int(row.get("extra_warmup", 0)),
        flags={DELAYED_MICROBATCHES.dest: DELAYED_MICROBATCHES.parse(delayed)},
    )
    costs = Costs(
        forward=float(row["forward_ms"]),
        backward=float(row["backward_ms"]),
        optimizer=float(row["optimizer_ms"]),
        latency=float(row.get("latency_ms", 0.0)),
    )
    prediction = predict(
        planned, pipeline=pipeline, microbatches=int(row["microbatches"]), costs=costs
    )
    assert prediction.time == pytest.approx(float(row["iteration_ms"]), rel=0.05)
    assert prediction.time < float(row["iteration_ms"])
