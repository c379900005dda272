"""What an engine sets up, looked at in real runs of two ranks.

Each of these is for GPUs: on CPU ranks a run without it trains the same.
"""

from pathlib import Path
from typing import Any

import pytest

from tests.support.gpt import ASYNC
from tests.support.steps import Outcome, Step, run_steps

# Every group that the package makes is warmed up by one collective.
_NOTED = """
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.training import training
from megatron_async.runtime.counters.correction_ratio import CorrectionRatio
from megatron_async.runtime.run import run
from megatron_async.update import deferred, process_groups

few, make, train_step = [], process_groups.new_groups, training.train_step

def noted(wanted, **options):
    reductions, all_reduce = [], dist.all_reduce
    dist.all_reduce = lambda *args, **kwargs: reductions.append(all_reduce(*args, **kwargs))
    try:
        made = make(wanted, **options)
    finally:
        dist.all_reduce = all_reduce
    groups = [group for group in made if group is not None]
    assert len(reductions) == len(groups), "a group is not warmed up"
    few.extend(group for group in groups if options.get("few_blocks"))
    return made

def checked(*args, **kwargs):
    result = train_step(*args, **kwargs)
    engine = run.engine
    measured = any(isinstance(each, CorrectionRatio) for each in engine.counters._counters)
    {check}
    return result

process_groups.new_groups = deferred.new_groups = noted
training.train_step = checked
"""


def _checking(statement: str) -> str:
    return _NOTED.replace("{check}", statement)


STAGES_2: dict[str, Any] = {**ASYNC, "pipeline_model_parallel_size": 2}
CORRECTED: dict[str, Any] = {**STAGES_2, "delay_correction": "error-feedback"}
BUFFERS_2: dict[str, Any] = {
    **ASYNC,
    "use_distributed_optimizer": True,
    "overlap_grad_reduce": True,
    "second_grad_buffer": True,
}
STEPS = [
    Step(
        "a kernel that may spin for long takes few blocks",
        STAGES_2,
        _checking("assert [dist.get_process_group_ranks(group) for group in few] == [[0, 1]]"),
    ),
    Step(
        "a correction is not measured where nobody looks",
        CORRECTED,
        _checking("assert not measured"),
    ),
    Step(
        "a correction is measured for TensorBoard",
        {**CORRECTED, "tensorboard_dir": "{dir}/tensorboard"},
        _checking("assert measured"),
    ),
    Step(
        "the loss has a group beside that of the reductions",
        BUFFERS_2,
        _checking(
            "replicas = parallel_state.get_data_parallel_group(with_context_parallel=True);"
            " assert engine.loss_group is not None and engine.loss_group is not replicas"
        ),
    ),
]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Outcome]:
    directory: Path = tmp_path_factory.mktemp("engine")
    return run_steps(2, STEPS, directory, may_fail=True)


@pytest.mark.parametrize("name", [step.name for step in STEPS])
def test_what_is_set_up(outcomes: dict[str, Outcome], name: str) -> None:
    assert not outcomes[name].failed, outcomes[name].log
