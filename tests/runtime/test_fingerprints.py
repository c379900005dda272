"""``--log-fingerprints``, in real runs, as ``megatron-async compare`` reads them."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_async.runtime.fingerprints import digest
from megatron_async.tools import compare
from tests.support.gpt import ASYNC, Value
from tests.support.steps import Outcome, Step, loads, run_steps, saves


def test_a_digest_is_of_dtype_shape_and_bytes() -> None:
    tensor = torch.arange(6.0).view(2, 3)
    assert digest(tensor) == digest(tensor.clone())
    assert digest(tensor) == digest(torch.arange(12.0).view(4, 3)[:2])
    assert len(digest(tensor)) == 16
    others = [
        tensor.view(3, 2),
        tensor.t(),
        tensor.double(),
        tensor.bfloat16(),
        tensor + torch.tensor([0.0, 0.0, 1e-6]),
        -tensor,  # another zero
        tensor.view(torch.int32),
    ]
    assert len({digest(tensor), *map(digest, others)}) == 8
    assert digest(torch.zeros(0)) != digest(torch.zeros(0, 1))


# Another learning rate from iteration 3 on.
FASTER = """
from megatron.training import get_args, training
train_step = training.train_step
def faster(forward_step_func, data_iterator, model, optimizer, *args, **kwargs):
    if get_args().curr_iteration >= 2:
        for group in optimizer.param_groups:
            group["lr"] *= 2
    return train_step(forward_step_func, data_iterator, model, optimizer, *args, **kwargs)
training.train_step = faster
"""
CORRECTED: dict[str, Value] = {
    **ASYNC,
    "delay_correction": "error-feedback",
    "ckpt_format": "torch_dist",
}
STAGES_2: dict[str, Value] = {"pipeline_model_parallel_size": 2}


def prints(name: str) -> dict[str, Value]:
    return {"log_fingerprints": f"{{dir}}/{name}"}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fingerprints")


@pytest.fixture(scope="module")
def outcomes(directory: Path) -> dict[str, Outcome]:
    resumable: dict[str, Value] = {**CORRECTED, **STAGES_2}
    start: dict[str, Value] = {
        **loads("start"),
        "finetune": True,
        "no_load_optim": True,
        "no_load_rng": True,
        "hidden_dropout": 0,
        "attention_dropout": 0,
    }
    begin: dict[str, Value] = {"ckpt_format": "torch_dist", "optimizer": "sgd", "train_iters": 1}
    # The first update is to change the weights.
    plain: dict[str, Value] = {**STAGES_2, **start, "lr_warmup_iters": 0}
    one = [
        Step("start", {**begin, **saves("start", 1), "lr_warmup_iters": 0}),
        Step("one stage", {**CORRECTED, **start, **prints("one")}),
    ]
    two = [
        Step("uninterrupted", {**resumable, **prints("whole")}),
        Step("saved", {**resumable, **prints("resumed"), **saves("saved", exit_interval=3)}),
        Step("resumed", {**resumable, **prints("resumed"), **loads("saved")}),
        Step("faster", {**resumable, **prints("faster")}, prelude=FASTER),
        Step("two stages", {**resumable, **start, **prints("two")}),
        Step("synchronous", {**plain, **prints("synchronous")}),
        Step("delayed", {**ASYNC, **plain, **prints("delayed")}),
    ]
    return run_steps(1, one, directory) | run_steps(2, two, directory)


@pytest.fixture
def compared(
    outcomes: dict[str, Outcome], directory: Path, capsys: pytest.CaptureFixture[str]
) -> Any:
    """Compare two folders; return the exit code and the lines."""

    def run(a: str, b: str, *argv: str) -> tuple[int, list[str]]:
        assert not any(outcome.failed for outcome in outcomes.values())
        code = compare.main([str(directory / a), str(directory / b), *argv])
        return code, capsys.readouterr().out.splitlines()

    return run


def test_logging_changes_nothing(outcomes: dict[str, Outcome]) -> None:
    whole, saved, resumed = (outcomes[name] for name in ("uninterrupted", "saved", "resumed"))
    assert saved.losses + resumed.losses == whole.losses
    assert len(whole.losses) == 7


def test_every_update_of_every_rank_is_there(outcomes: dict[str, Outcome], directory: Path) -> None:
    assert not outcomes["uninterrupted"].failed
    for rank in (0, 1):
        lines = [
            json.loads(line)
            for line in (directory / "whole" / f"rank{rank:05d}.jsonl").read_text().splitlines()
        ]
        assert lines[0] == {
            "rank": rank,
            "world": 2,
            "stage": rank,
            "stages": 2,
            "tensor_rank": 0,
            "data_rank": 0,
        }
        assert {line["iteration"] for line in lines[1:]} == set(range(1, 8))
        assert all(line["version"] == line["iteration"] for line in lines[1:])
        of = {
            what: {line["name"] for line in lines[1:] if line["what"] == what}
            for what in ("gradient", "weight", "state", "random")
        }
        # Layers have the numbers of the whole model.
        layers = {name.split(".")[2] for name in of["weight"] if name.startswith("decoder.layers")}
        assert layers == ({"0", "1"} if rank == 0 else {"2", "3"})
        assert of["gradient"] == of["weight"]
        keys = {name.rpartition(":")[2] for name in of["state"]}
        assert {"exp_avg", "exp_avg_sq", "delay_correction_update"} <= keys
        assert {"cpu", "device"} <= of["random"]


def test_a_resumed_run_is_the_uninterrupted_one(compared: Any) -> None:
    """To the last bit, in every gradient, weight, buffer and generator."""
    code, lines = compared("whole", "resumed")
    assert code == 0, lines
    assert lines[-1].startswith("equal: ")
    assert lines[-1].endswith("tensors, bytes")


def test_another_learning_rate_is_named_where_it_first_acts(compared: Any) -> None:
    code, lines = compared("whole", "faster")
    assert code == 1
    assert lines[0].startswith("first difference: iteration 3, stage 0, rank 0: weight ")
    # The gradient of iteration 4 is of weights that were made before.
    differing = [line for line in lines if "gradient" in line]
    assert differing == []


def test_one_stage_and_two_agree_to_rounding(compared: Any) -> None:
    code, lines = compared("one", "two")
    assert code == 1
    code, lines = compared("one", "two", "--tolerance", "1e-4")
    assert code == 0, lines
    # The last stage has its own copy of the tied embedding.
    assert "output_layer.weight" in lines[0]
    assert lines[-1].endswith("norms to 0.0001")


def test_a_delay_is_named_where_it_first_shows(compared: Any) -> None:
    """The second batch runs on the initial weights with one and on the first update with the
    other."""
    code, lines = compared("synchronous", "delayed")
    assert code == 1
    assert lines[-1]
    first = next(line for line in lines if line.startswith("first difference"))
    assert "iteration 2, stage 0, rank 0: " in first
    assert "gradient" in first
