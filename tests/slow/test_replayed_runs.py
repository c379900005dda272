"""Recorded runs of four and eight stages on the model of the device, with one queue and with many.

pytest -m slow tests/slow/test_replayed_runs.py
"""

import atexit
import functools
import shutil
import tempfile
from pathlib import Path
from typing import Any

import pytest

from megatron_async.replay.device import run
from megatron_async.replay.races import find_races
from megatron_async.replay.steady import SteadyState, steady_state
from megatron_async.replay.trace import Trace, read_all
from megatron_async.schedules.simulator import Costs
from tests.support.gpt import gpt_args
from tests.support.torchrun import run_torchrun

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

LIMIT = 1.03
"""Of the ideal time, for what is to cost nothing."""
OVERLAPS = {
    "use_distributed_optimizer": True,
    "overlap_grad_reduce": True,
    "overlap_param_gather": True,
    "ddp_bucket_size": 3000,
}
SHAPES = [(4, 8, 1), (4, 8, 2), (8, 32, 1), (8, 32, 2)]
"""(stages, microbatches, replicas); with replicas, the distributed optimizer with both overlaps."""


@functools.cache
def _directory() -> Path:
    directory = Path(tempfile.mkdtemp(prefix="megatron-async-enqueues-"))
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    return directory


@functools.lru_cache(maxsize=1)
def _read(directory: Path) -> list[Trace]:
    return read_all(directory)


def recorded(
    schedule: str, stages: int, microbatches: int, replicas: int, **flags: Any
) -> list[Trace]:
    """The traces of a run, recorded once."""
    given = {**(OVERLAPS if replicas > 1 else {}), **flags}
    return _read(_record(schedule, stages, microbatches, replicas, tuple(sorted(given.items()))))


@functools.cache
def _record(
    schedule: str, stages: int, microbatches: int, replicas: int, flags: tuple[Any, ...]
) -> Path:
    directory = Path(tempfile.mkdtemp(dir=_directory()))
    run_torchrun(
        stages * replicas,
        gpt_args(
            **{
                "pipeline_model_parallel_size": stages,
                "num_layers": stages * replicas,
                "hidden_size": 16,
                "num_attention_heads": 2,
                "seq_length": 16,
                "max_position_embeddings": 16,
                "vocab_size": 64,
                "make_vocab_size_divisible_by": 64,
                "micro_batch_size": 1,
                "global_batch_size": microbatches * replicas,
                "train_iters": 7,
                "pipeline_schedule": schedule,
                "log_enqueues": directory,
                **dict(flags),
            }
        ),
        launcher="plugin",
        timeout=900,
    )
    return directory


def state(traces: list[Trace], connections: int, **costs: float) -> SteadyState:
    return steady_state(
        run(traces, Costs(forward=1.0, backward=2.0, **costs), connections=connections)
    )


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("schedule", ["pipedream-2bw", "fresh-2bw"])
def test_the_ideal_is_reached_without_a_race(schedule: str, shape: tuple[int, int, int]) -> None:
    traces = recorded(schedule, *shape)
    assert [str(race) for trace in traces for race in find_races(trace)] == []
    for connections in (1, 8, 32):
        assert state(traces, connections).ratio <= LIMIT


@pytest.mark.parametrize("shape", SHAPES[:3])
@pytest.mark.parametrize("schedule", ["pipedream-2bw", "fresh-2bw"])
def test_the_ideal_is_reached_with_a_second_gradient_buffer(
    schedule: str, shape: tuple[int, int, int]
) -> None:
    traces = recorded(schedule, *shape, second_grad_buffer=True, overlap_grad_reduce=True)
    for connections in (1, 32):
        assert state(traces, connections).ratio <= LIMIT
    # Of two replicas, a reduction of 2 of an iteration's 24 runs under the next batch.
    assert state(traces, 32, reduction=2.0).ratio <= LIMIT
    assert state(traces, 1, reduction=2.0).ratio < 1.05


@pytest.mark.parametrize("schedule", ["pipedream-2bw", "fresh-2bw"])
def test_gathers_of_parameters_cost_nothing_with_one_queue(schedule: str) -> None:
    traces = recorded(schedule, 4, 8, 2)
    without = state(traces, 1).time
    # A gather of 2 of an iteration's 24, with room for several slots of 3 each.
    assert state(traces, 1, gather=2.0).time <= without + 0.01


def test_buckets_on_every_stage_hide_most_of_the_reduction() -> None:
    at_once = state(recorded("pipedream-2bw", 4, 8, 2), 32, reduction=2.0)
    buckets = recorded("pipedream-2bw", 4, 8, 2, ddp_bucket_all_stages=True)
    assert state(buckets, 32, reduction=2.0).time < at_once.time - 0.5


def test_a_recorded_run_trains_the_same() -> None:
    flags = gpt_args(pipeline_model_parallel_size=2, num_layers=2, pipeline_schedule="fresh-2bw")
    plain = run_torchrun(2, flags, launcher="plugin")
    directory = tempfile.mkdtemp(dir=_directory())
    logged = run_torchrun(2, [*flags, "--log-enqueues", directory], launcher="plugin")
    assert logged.losses == plain.losses
    assert logged.grad_norms == plain.grad_norms
