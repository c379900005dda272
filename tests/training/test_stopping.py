"""Runs that stop before their end: at a signal, at a time limit, at the last iteration.

All ranks stop in the same iteration, with a whole checkpoint and Megatron's exit code, and a
resumed run goes on to the last digit.
"""

import re
import signal
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.gpt import ASYNC, gpt_args
from tests.support.preludes import late, signalled
from tests.support.steps import (
    COMMON_FLAGS,
    Outcome,
    Step,
    assert_continues,
    loads,
    run_steps,
    saves,
    tracked,
)
from tests.support.torchrun import run_torchrun, wait_for_iteration

CORRECTED: Mapping[str, Any] = {**ASYNC, "delay_correction": "error-feedback"}
STAGES_2: Mapping[str, Any] = {"pipeline_model_parallel_size": 2}
PLAIN: Mapping[str, Any] = {**ASYNC, **STAGES_2, "ckpt_format": "torch"}
SHARDED: Mapping[str, Any] = {**CORRECTED, **STAGES_2, "ckpt_format": "torch_dist"}
EVALUATED: Mapping[str, Any] = {"eval_interval": 3, "eval_iters": 2}


# Prints which signals the process that a save needs blocks, at the beginning of iteration 4.
HELPER = """
from pathlib import Path
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.training import get_args, training
next_step = training.train_step
def look(*args, **kwargs):
    if get_args().curr_iteration == 3:
        helper = filesystem_async._results_queue._manager._process
        status = Path(f"/proc/{helper.pid}/status").read_text()
        print("the helper blocks", status.split("SigBlk:")[1].split()[0])
    return next_step(*args, **kwargs)
training.train_step = look
"""


def growing() -> dict[str, Any]:
    """Three batches of 8 sequences, then batches of 12; the threshold is in tokens."""
    schedule = f"0:8 {3 * 8 * int(str(COMMON_FLAGS['seq_length']))}:12"
    return {"global_batch_size": None, "step_batch_size_schedule": schedule}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("stopping")


@pytest.fixture(scope="module")
def outcomes(directory: Path) -> dict[str, Outcome]:
    handled: dict[str, Any] = {**PLAIN, "exit_signal_handler": True}
    limited: dict[str, Any] = {**PLAIN, "exit_duration_in_mins": 1}
    both: dict[str, Any] = {**limited, "exit_signal_handler": True}
    # What depends on the number of iterations does not, so that it can be raised at the resume.
    extensible: dict[str, Any] = {**PLAIN, "lr_decay_iters": 7, "start_weight_decay": 0.1}
    more: dict[str, Any] = {"override_opt_param_scheduler": True}
    background: dict[str, Any] = {
        **SHARDED,
        **EVALUATED,
        "async_save": True,
        "use_persistent_ckpt_worker": True,
    }
    stopped = {**background, **saves("background", 3), "exit_signal_handler": True}
    watched = {**SHARDED, **saves("watched", 3), "exit_signal_handler": True, "train_iters": 4}
    steps: dict[str, Any] = {**CORRECTED, **STAGES_2, "ckpt_format": "torch", **growing()}
    return run_steps(
        2,
        [
            Step("uninterrupted", PLAIN),
            Step(
                "signal",
                {**handled, **saves("signal", 100), "exit_signal": "SIGUSR1"},
                prelude=signalled("SIGUSR1", iteration=3, rank=0),
            ),
            Step("signal resumed", {**PLAIN, **loads("signal")}),
            Step("time", {**both, **saves("time", 2)}, prelude=late(iteration=3, rank=1)),
            Step("time resumed", {**PLAIN, **loads("time")}),
            Step(
                "time in an evaluation",
                {**limited, **EVALUATED, **saves("evaluation", 100)},
                prelude=late(iteration=3, rank=1),
            ),
            Step("time in an evaluation resumed", {**PLAIN, **loads("evaluation")}),
            Step("longer", extensible),
            Step("end", {**extensible, **saves("end", 100), "train_iters": 5}),
            Step("end resumed", {**extensible, **more, **loads("end")}),
            Step("background uninterrupted", SHARDED),
            Step("background", stopped, prelude=signalled("SIGTERM", iteration=4, rank=1)),
            Step("watched", watched, prelude=HELPER),
            Step("background resumed from 3", {**background, **loads("background", 3)}),
            Step("background resumed", {**SHARDED, **loads("background")}),
            Step("growing", {**steps, **saves("growing", 100)}),
            Step("growing resumed", {**steps, **loads("growing", 3)}),
        ],
        directory,
    )


@pytest.mark.parametrize(
    ("name", "like", "earliest", "latest"),
    [
        ("signal", "uninterrupted", 3, 5),
        ("time", "uninterrupted", 3, 5),
        ("time in an evaluation", "uninterrupted", 3, 3),
        ("end", "longer", 5, 5),
        ("background", "background uninterrupted", 4, 6),
    ],
)
def test_a_stopped_run_goes_on_to_the_last_digit(
    outcomes: dict[str, Outcome],
    directory: Path,
    name: str,
    like: str,
    earliest: int,
    latest: int,
) -> None:
    stopped = outcomes[name]
    assert stopped.codes == [0, 0]
    done = stopped.ran[0]
    assert stopped.ran == [done, done]
    assert earliest <= done <= latest
    assert tracked(directory / name.rpartition(" ")[2]) == done
    expected = outcomes[like].by_iteration
    assert stopped.by_iteration == {i: expected[i] for i in range(1, done + 1)}
    assert_continues(outcomes[f"{name} resumed"], outcomes[like], done=done)


def test_why_a_run_stopped_is_logged(outcomes: dict[str, Outcome]) -> None:
    # Megatron's words, whatever the signal was.
    assert "exiting program after receiving SIGTERM." in outcomes["signal"].log
    assert re.search(r"exiting program after \S+ minutes", outcomes["time"].log)
    assert "Exiting during evaluation, timelimit reached" in outcomes["time in an evaluation"].log
    assert outcomes["time in an evaluation"].validation == []


def test_a_checkpoint_written_in_the_background_goes_on_behind_an_evaluation(
    outcomes: dict[str, Outcome],
) -> None:
    assert [done for done, _ in outcomes["background"].validation] == [3]
    resumed = outcomes["background resumed from 3"]
    assert_continues(resumed, outcomes["background uninterrupted"], done=3)


def test_a_run_goes_on_where_the_batch_grows(outcomes: dict[str, Outcome]) -> None:
    """Megatron saves there by itself; microbatches of the larger batch were in flight."""
    assert "saving checkpoint at iteration       3" in outcomes["growing"].log
    assert list(outcomes["growing"].by_iteration) == [1, 2, 3, 4, 5, 6, 7]
    assert "global batch size:    12" in outcomes["growing"].log
    assert_continues(outcomes["growing resumed"], outcomes["growing"], done=3)


def test_an_ordinary_save_sees_the_flags_that_were_given(
    outcomes: dict[str, Outcome], directory: Path
) -> None:
    """They are off around it while the ranks know that nobody wants to stop."""
    file = directory / "time" / "iter_0000002" / "mp_rank_00_000" / "model_optim_rng.pt"
    saved = torch.load(file, weights_only=False)["args"]
    assert saved.exit_signal_handler is True
    assert saved.exit_duration_in_mins == 1
    log = outcomes["watched"].log
    [blocked] = set(re.findall(r"^the helper blocks (\S+)$", log, flags=re.MULTILINE))
    assert int(blocked, 16) >> (signal.SIGTERM - 1) & 1


def test_torchrun_passes_sigterm_on(tmp_path: Path) -> None:
    """All ranks end by themselves, in the same iteration, with a whole checkpoint."""
    argv = gpt_args(
        **{
            **COMMON_FLAGS,
            **PLAIN,
            "save": tmp_path,
            "save_interval": 100000,
            "train_iters": 100000,
            "exit_signal_handler": True,
        }
    )

    def terminate(torchrun: subprocess.Popen[str], logs: Path) -> None:
        wait_for_iteration(logs, rank=1, number=3)
        torchrun.send_signal(signal.SIGTERM)

    result = run_torchrun(2, argv, launcher="plugin", check=False, during=terminate)
    # torchrun's own code for a signal that it passed on, whatever its ranks say.
    assert result.returncode == 1, result.describe()
    assert result.crashed == [], result.describe()
    assert "Unable to shutdown process" not in result.launcher_output
    assert "exiting program after receiving SIGTERM." in result.stdout
    done = result.iterations[-1].number
    assert tracked(tmp_path) == done
    parts = sorted(tmp_path.glob(f"iter_{done:07d}/mp_rank_*/model_optim_rng.pt"))
    saved = [torch.load(part, weights_only=False) for part in parts]
    assert [part["iteration"] for part in saved] == [done, done]
