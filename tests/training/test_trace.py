"""In the steady state no rank waits for another stage, but for its activations and gradients."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.support.gpt import gpt_args
from tests.support.torchrun import run_torchrun

STEADY = range(2, 5)
"""Iterations (0 is the first) that neither fill nor drain the pipeline."""

LOGGING = {
    "tensorboard_log_interval": 1,
    "exit_signal_handler": True,
    "exit_duration_in_mins": 60,
    "log_pipeline_bubble": True,
    "log_num_zeros_in_grad": True,
    "log_params_norm": True,
    "log_throughput": True,
    "log_timers_to_tensorboard": True,
    "delay_correction": "error-feedback",
}
MOE = {
    "num_experts": 4,
    "moe_router_topk": 2,
    "moe_router_load_balancing_type": "aux_loss",
    "moe_aux_loss_coeff": 0.01,
    "moe_token_dispatcher_type": "alltoall",
    "expert_model_parallel_size": 2,
    "swiglu": True,
    "disable_bias_linear": True,
    "no_bias_swiglu_fusion": True,
}
DISTRIBUTED = {
    "use_distributed_optimizer": True,
    "overlap_grad_reduce": True,
    "overlap_param_gather": True,
}


def trace(
    directory: Path, *, env: Mapping[str, str] | None = None, **flags: Any
) -> list[list[dict[str, Any]]]:
    """The events of the steady state, rank by rank, of four ranks: PP 2 x DP 2 by default."""
    argv = gpt_args(
        **{
            "pipeline_model_parallel_size": 2,
            "num_layers": 4,
            "train_iters": 6,
            "pipeline_schedule": "pipedream-2bw",
            "tensorboard_dir": directory / "tensorboard",
            **LOGGING,
            **flags,
        }
    )
    run_torchrun(
        4,
        argv,
        launcher=("-m", "tests.support.launchers.traced", "--cpu"),
        env={"TRACE_DIR": str(directory), **(env or {})},
    )
    return [
        [
            event
            for event in json.loads((directory / f"rank{rank}.json").read_text())
            if event["iteration"] in STEADY
        ]
        for rank in range(4)
    ]


def stage_of(rank: int, stages: int) -> int:
    return rank * stages // 4


EXCHANGE = "StageExchange._serve"
"""What the thread runs that exchanges an update's numbers. Nobody waits for it but
``DeferredUpdate.complete``."""


def names(stack: list[str]) -> list[str]:
    return [name.split(":")[1] for name in stack]


def is_the_updates(event: dict[str, Any]) -> bool:
    """Whether a launch made the call: the exchange, or the sum of the tied gradient. Nothing else
    that crosses stages belongs to an update, whatever the optimizer does in it."""
    made_by = names(event["callers"])
    if EXCHANGE in made_by:
        return event["call"] in {"send", "recv"}
    ours = next((name for name in made_by if name.startswith("DeferredUpdate.")), None)
    return event["call"] == "allreduce" and ours == "DeferredUpdate.launch"


def is_allowed(event: dict[str, Any], wait: list[str], *, stage: int) -> bool:
    """Whether a wait on something that spans stages stands where it costs nothing."""
    functions = names(wait)
    if "P2PCommunicator._communicate" in functions:
        return True  # its activations and gradients
    if not is_the_updates(event):
        return False
    if EXCHANGE in functions:
        return True  # a thread of its own
    if "DeferredUpdate.complete" in functions:
        return True  # the tied gradient's sum, which has been there for long
    # The first stage finishes last: whatever it waits for has been posted.
    return stage == 0 and "DeferredUpdate.launch" in functions


def offences(traced: list[list[dict[str, Any]]], *, stages: int = 2) -> list[str]:
    found = []
    for rank, events in enumerate(traced):
        for event in events:
            if len({stage_of(other, stages) for other in event["ranks"]}) < 2:
                continue
            if not event["waits"] and event["call"] == "barrier":
                found.append(f"rank {rank}: {event['call']} from {event['callers'][:4]}")
            found += [
                f"rank {rank}, iteration {event['iteration']}: waits for {event['call']} over "
                f"{event['ranks']} in {wait[:6]}"
                for wait in event["waits"]
                if not is_allowed(event, wait, stage=stage_of(rank, stages))
            ]
    return found


@pytest.mark.parametrize(
    "flags",
    [
        pytest.param({}, id="tied"),
        pytest.param(DISTRIBUTED, id="distributed-optimizer"),
        pytest.param(
            {"pipeline_model_parallel_size": 4, "global_batch_size": 6},
            id="four-stages-least-microbatches",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            {"tensor_model_parallel_size": 2, "sequence_parallel": True},
            id="tensor-parallel",
            marks=pytest.mark.slow,
        ),
        pytest.param(MOE, id="moe", marks=pytest.mark.slow),
        pytest.param(
            {**DISTRIBUTED, "second_grad_buffer": True},
            id="second-gradient-buffer",
            marks=pytest.mark.slow,
        ),
        pytest.param({"calculate_per_token_loss": True}, id="per-token", marks=pytest.mark.slow),
        pytest.param(
            {"optimizer": "dist_muon", "bf16": True}, id="layer-wise", marks=pytest.mark.slow
        ),
    ],
)
def test_no_rank_waits_for_another_stage(tmp_path: Path, flags: dict[str, Any]) -> None:
    traced = trace(tmp_path, **flags)
    calls = {event["call"] for events in traced for event in events}
    # The trace sees the pipeline's P2P and the update's exchange, or it would prove nothing.
    assert {"send", "recv", "allreduce"} <= calls
    assert any(EXCHANGE in names(event["callers"]) for events in traced for event in events)
    if "use_distributed_optimizer" in flags:
        assert any("reduce_scatter" in call for call in calls)
        assert any("all_gather" in call or "allgather" in call for call in calls)
    assert not offences(traced, stages=flags.get("pipeline_model_parallel_size", 2))


def test_a_collective_in_the_optimizers_step_is_caught(tmp_path: Path) -> None:
    found = offences(trace(tmp_path, env={"TRACE_COLLECTIVE_IN_STEP": "1"}))
    for rank in range(4):
        assert any(line.startswith(f"rank {rank}, ") and "._step" in line for line in found)


@pytest.mark.slow
def test_the_undeferred_update_is_caught(tmp_path: Path) -> None:
    traced = trace(tmp_path, no_deferred_update=True)
    functions = "".join(offences(traced))
    for expected in (
        "get_grad_norm_fp32",
        "_allreduce_embedding_grad",
        "calc_params_l2_norm",
        "Timer",
    ):
        assert expected in functions
