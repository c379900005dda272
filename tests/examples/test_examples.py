"""The launch scripts, and the training script for those without a checkout of Megatron-LM."""

import argparse
import dataclasses
import functools
import json
import math
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from megatron_async.planning import plan
from megatron_async.tools.training_command import read_command
from megatron_async.tools.verdict import Verdict, judge
from tests.support.gpt import REPOSITORY, gpt_args
from tests.support.torchrun import environment, run_torchrun

pytestmark = pytest.mark.filterwarnings("ignore")  # Megatron's, about libraries it lacks

EXAMPLES = REPOSITORY / "examples"
MODELS = sorted(path.stem for path in (EXAMPLES / "models").glob("*.conf"))
SCHEDULES = ("fresh-2bw", "pipedream-2bw", "default")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    parameters: int
    shape: tuple[int, ...]
    learning_rate: float
    batch: int
    layout: tuple[int, ...]
    layers: tuple[int, ...]
    gpus: int
    delay: str
    gib: str


# The table of examples/README.md.
TABLE = {
    cells[1].strip(" `"): Row(
        parameters=int(cells[2]),
        shape=tuple(int(part) for part in cells[3].split("/")),
        learning_rate=float(cells[4]),
        batch=int(cells[5]),
        layout=tuple(int(part) for part in cells[6].split("x")),
        layers=tuple(int(part) for part in cells[7].split(",")),
        gpus=int(cells[8]),
        delay=cells[9].strip(),
        gib=cells[10].strip(),
    )
    for line in (EXAMPLES / "README.md").read_text().splitlines()
    if line.startswith("| `")
    for cells in [line.split("|")]
}
# What the names promise, of the models whose size is published or round.
PARAMETERS = {
    "gpt-125m": 125e6,
    "gpt-350m": 350e6,
    "gpt-760m": 760e6,
    "gpt-1.3b": 1.3e9,
    "gpt-2.7b": 2.7e9,
    "gpt-6.7b": 6.7e9,
    "gpt-10b": 9.9e9,
    "moe-10b": 10e9,
    "smollm2-135m": 134_515_008,
    "smollm2-360m": 361_821_120,
}
TOKENS = {"moe-10b": 200e9}
"""Of those that do not train on 20 tokens a parameter."""

MEMORY = "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"


def command(model: str, *flags: str, **env: str) -> list[str]:
    """The command that gpt.sh would run."""
    result = subprocess.run(
        ["bash", EXAMPLES / "gpt.sh", model, *flags],
        env={"PATH": os.environ["PATH"], "DRY_RUN": "1", **env},
        capture_output=True,
        text=True,
        check=True,
    )
    return result.stdout.splitlines()


def flags_of(line: list[str]) -> list[str]:
    """What the training script gets."""
    return line[line.index("megatron_async") + 2 :]


@functools.cache
def verdict(model: str, schedule: str) -> Verdict:
    """What `megatron-async doctor -- COMMAND` says of the dry run's command."""
    row = TABLE[model]
    nodes = max(row.gpus // 8, 1)
    several = {"NODES": str(nodes), "NODE_RANK": "0", "HEAD": "n1"} if nodes > 1 else {}
    words = command(model, SCHEDULE=schedule, GPUS=str(min(row.gpus, 8)), **several)
    return judge(read_command(words, environment={}))


def test_the_table_has_every_model() -> None:
    assert sorted(TABLE) == MODELS == sorted([*PARAMETERS, "tiny"])


@pytest.mark.parametrize("path", sorted(EXAMPLES.rglob("*.*")), ids=lambda path: path.name)
def test_shell_syntax(path: Path) -> None:
    if path.suffix in (".sh", ".sbatch", ".conf"):
        subprocess.run(["bash", "-n", path], check=True)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("model", MODELS)
def test_doctor_accepts_the_dry_run_which_means_what_the_table_says(
    model: str, schedule: str
) -> None:
    found = verdict(model, schedule)
    assert found.problems == ()
    assert found.subject is not None
    args, row = found.subject.args, TABLE[model]
    assert (args.num_layers, args.hidden_size, args.num_attention_heads) == row.shape
    assert args.lr == row.learning_rate
    assert args.min_lr == pytest.approx(row.learning_rate / 10)
    assert args.global_batch_size == row.batch
    assert row.layout == (
        args.pipeline_model_parallel_size,
        args.tensor_model_parallel_size,
        args.expert_model_parallel_size,
    )
    assert layers_of(args) == row.layers
    assert args.world_size == row.gpus
    assert row.gpus % math.prod(row.layout) == 0
    assert args.lr_warmup_samples == args.train_samples // 10
    assert args.optimizer == "muon"
    assert args.bf16
    assert args.pipeline_schedule == schedule
    correction = "none" if schedule == "default" else "error-feedback"
    assert args.delay_correction == correction


def layers_of(args: argparse.Namespace) -> tuple[int, ...]:
    """Of each stage, as Megatron reads the layout."""
    stages = args.pipeline_model_parallel_size
    if args.pipeline_model_parallel_layout is None:
        return (args.num_layers // stages,) * stages
    from megatron.core.transformer.pipeline_parallel_layer_layout import (
        PipelineParallelLayerLayout,
    )

    layout = PipelineParallelLayerLayout.from_str(args.pipeline_model_parallel_layout, stages)
    return tuple(
        layout.get_num_layers_to_build(vp_stage=0, pp_rank=stage) for stage in range(stages)
    )


@pytest.mark.parametrize("model", PARAMETERS)
def test_plan_gives_the_layout_by_the_command_in_the_file(
    model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    text = (EXAMPLES / "models" / f"{model}.conf").read_text()
    found = re.search(r"^# Layout:\n((?:#     .*\n)+)", text, re.MULTILINE)
    assert found is not None
    words = shlex.split(re.sub(r"\\?\n?^# *", " ", found.group(1), flags=re.MULTILINE))
    assert words[:2] == ["megatron-async", "plan"]
    assert plan.main(words[2:]) == 0
    out = capsys.readouterr().out
    titles, best = (re.split(r" {2,}", line) for line in out.splitlines()[2:5:2])
    row = dict(zip(titles, best, strict=True))
    assert (row["delay"], row["GiB"]) == (TABLE[model].delay, TABLE[model].gib)
    # The command is on the model of the file, and what it says is what gpt.sh gives.
    args = model_of(words[2:])
    line = command(model)
    for flag, value in args.items():
        assert line[line.index(flag) + 1] == value
    chosen = shlex.split(out.partition("The first: ")[2])
    for flag, value in zip(chosen[::2], chosen[1::2], strict=True):
        if (flag, value) != ("--expert-model-parallel-size", "1"):
            assert line[line.index(flag) + 1] == value


def model_of(words: list[str]) -> dict[str, str]:
    """What of plan's flags the run has as well."""
    names = ("num-layers", "hidden-size", "num-attention-heads", "num-query-groups",
             "ffn-hidden-size", "num-experts", "moe-router-topk", "seq-length",
             "global-batch-size")  # fmt: skip
    flags = [f"--{name}" for name in names]
    return {flag: words[words.index(flag) + 1] for flag in flags if flag in words}


@pytest.mark.parametrize("model", PARAMETERS)
def test_size_is_that_of_the_name_and_training_as_long_as_it_says(model: str) -> None:
    assert TABLE[model].parameters == pytest.approx(PARAMETERS[model], rel=0.02)
    subject = verdict(model, "default").subject
    assert subject is not None
    tokens = subject.args.train_samples * subject.args.seq_length
    assert tokens == pytest.approx(TOKENS.get(model, 20 * PARAMETERS[model]), rel=0.03)


def test_megatron_builds_as_many_parameters_as_the_table_says() -> None:
    """The models themselves, on the meta device."""
    jobs = [{"argv": flags_of(command(model)), "world_size": TABLE[model].gpus} for model in MODELS]
    result = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.examples.megatron_counts"],
        env=environment(),
        input=json.dumps(jobs),
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    built = dict(zip(MODELS, json.loads(result.stdout.splitlines()[-1]), strict=True))
    assert built == {model: TABLE[model].parameters for model in MODELS}


def test_settings_reach_the_command() -> None:
    line = command(
        "gpt-125m",
        *("--seed", "7"),
        SCHEDULE="default",
        OPTIMIZER="adam",
        PIPELINE="2",
        MICRO_BATCH="1",
        GPUS="2",
        DATA="--data-path d --tokenizer-type NullTokenizer --vocab-size 256",
        OUTPUT="elsewhere",
        SCRIPT="mine.py",
    )
    text = " ".join(line)
    start = f"env CUDA_DEVICE_MAX_CONNECTIONS=32 {MEMORY} torchrun --standalone --nproc-per-node 2"
    assert text.startswith(f"{start} -m megatron_async mine.py ")
    for part in (
        *("--optimizer adam", "--pipeline-model-parallel-size 2", "--micro-batch-size 1"),
        *("--data-path d --tokenizer-type NullTokenizer --vocab-size 256", "--load elsewhere/"),
    ):
        assert part in text
    assert "--muon" not in text
    assert "--pipeline-schedule" not in text
    assert line[-2:] == ["--seed", "7"]


def test_several_nodes() -> None:
    text = " ".join(
        command("gpt-10b", TENSOR="2", NODES="4", NODE_RANK="2", HEAD="n1", PORT="29511")
    )
    address = "--nnodes 4 --node-rank 2 --master-addr n1 --master-port 29511"
    assert text.startswith(f"env CUDA_DEVICE_MAX_CONNECTIONS=1 {MEMORY} torchrun {address} ")


def slurm_job(
    folder: Path, *arguments: str, srun: str, **env: str
) -> subprocess.CompletedProcess[str]:
    """Run gpt.sbatch with stand-ins for Slurm's commands; tests/slow/slurm has the real ones."""
    bodies = {
        "scontrol": f"[ $1 = show ] && printf 'n1\\nn2\\n' || echo $@ >>{folder}/asked",
        "srun": f"while [[ $1 == --* ]]; do echo $1; shift; done; {srun}",
    }
    for name, body in bodies.items():
        (folder / name).write_text(f"#!/usr/bin/env bash\n{body}\n")
        (folder / name).chmod(0o755)
    return subprocess.run(
        ["bash", EXAMPLES / "gpt.sbatch", *arguments],
        env={
            "PATH": f"{folder}:{os.environ['PATH']}",
            "SLURM_SUBMIT_DIR": str(EXAMPLES.parent),
            "SLURM_JOB_NUM_NODES": "2",
            "SLURM_JOB_NODELIST": "n[1-2]",
            "SLURM_JOB_ID": "123",
            "SLURM_GPUS_ON_NODE": "8",
            "OUTPUT": str(folder / "run"),
            "DRY_RUN": "1",
            **env,
        },
        capture_output=True,
        text=True,
        check=False,
    )


ON_TWO_NODES = 'for i in 0 1; do SLURM_NODEID=$i SLURMD_NODENAME=n$((i + 1)) "$@"; echo END; done'


def test_slurm_job_gives_each_node_its_rank(tmp_path: Path) -> None:
    result = slurm_job(tmp_path, "gpt-6.7b", "--seed", "7", srun=ON_TWO_NODES)
    assert result.returncode == 0, result.stderr
    *check, first, second = [" ".join(part.split()) for part in result.stdout.split("END\n")][:4]
    for rank, text in enumerate((first, second)):
        assert f"--nnodes 2 --node-rank {rank} --master-addr n1 --master-port 20246" in text
        assert "--nproc-per-node 8" in text
        assert f"--log-dir {tmp_path}/run/logs/123.0/n{rank + 1} --tee 3" in text
        assert text.endswith("--seed 7 --exit-signal-handler")
    for rank, text in enumerate(check):
        assert f"--node-rank {rank} --master-addr n1 --master-port 20247" in text
        assert text.endswith(f"-m megatron_async.tools.node_check --output {tmp_path}/run")
    assert "job 123.0: is done" in result.stdout
    assert not (tmp_path / "asked").exists()


def test_slurm_job_that_fails_is_requeued_until_it_makes_no_progress(tmp_path: Path) -> None:
    tracker = tmp_path / "run" / "checkpoints" / "latest_checkpointed_iteration.txt"
    tracker.parent.mkdir(parents=True)

    def attempt(number: int, srun: str = "exit 1") -> str:
        (tmp_path / "asked").unlink(missing_ok=True)
        found = slurm_job(
            *(tmp_path, "tiny"), srun=srun, SLURM_RESTART_COUNT=str(number), REQUEUE_LIMIT="2"
        )
        requeued = (tmp_path / "asked").exists()
        assert requeued == (found.returncode == 0)
        return "requeued" if requeued else found.stdout.splitlines()[-1].partition(": ")[2]

    assert attempt(0) == "requeued"
    # A newer checkpoint starts the count again.
    assert attempt(1, srun=f"echo 5 >{tracker}; exit 1") == "requeued"
    assert attempt(2) == "requeued"
    assert attempt(3).startswith("gives up after 2 attempts without a newer checkpoint than 5")
    # Attempts that Slurm itself ends and repeats count as well: nothing is started any more.
    assert attempt(0) == "requeued"
    assert attempt(1, srun="kill -TERM $PPID; exit 0").startswith("was ended by Slurm")
    assert attempt(2, srun="echo started").startswith("gives up after 2 attempts")


def test_slurm_job_in_a_container(tmp_path: Path) -> None:
    result = slurm_job(tmp_path, "tiny", srun="true", CONTAINER="nvcr.io#nvidia/pytorch:25.10-py3")
    for option in (
        "--container-image=nvcr.io#nvidia/pytorch:25.10-py3",
        f"--container-mounts={Path.cwd()}:{Path.cwd()}",
        "--no-container-mount-home",
    ):
        assert option in result.stdout.splitlines()


@pytest.mark.parametrize("argv", [[], ["gpt-1t"]])
def test_unknown_model_lists_the_models(argv: list[str]) -> None:
    result = subprocess.run(
        ["bash", EXAMPLES / "gpt.sh", *argv], capture_output=True, text=True, check=False
    )
    assert result.returncode == 2
    assert f"one of: {' '.join(MODELS)}" in result.stderr


def test_script_refuses_what_it_does_not_do() -> None:
    result = run_torchrun(
        1,
        gpt_args(logits_load_dir="x", inprocess_restart=True),
        script=EXAMPLES / "pretrain_gpt.py",
        check=False,
    )
    assert result.returncode != 0
    assert (
        "--logits-load-dir, --inprocess-restart: this pretrain_gpt.py trains plain GPT models"
        in result.ranks[0].stderr
    )


@pytest.mark.slow
def test_script_trains_on_files_per_split_with_full_validation(tmp_path: Path) -> None:
    """Two validation sets, each read from end to end, and the loss per token."""
    from megatron_async.tools.data import ByteTokenizer, Input, write_dataset

    source = Path(__file__)
    for name in ("train", "valid-a", "valid-b"):
        one = Input(path=source, size=source.stat().st_size, named=True)
        write_dataset([one], tmp_path / name, tokenizer=ByteTokenizer())
    argv = gpt_args(
        mock_data=None,
        train_data_path=tmp_path / "train",
        valid_data_path=[tmp_path / "valid-a", tmp_path / "valid-b"],
        data_cache_path=tmp_path / "cache",
        multiple_validation_sets=True,
        full_validation=True,
        validation_set_names=["a", "b"],
        eval_iters=1,
        eval_interval=2,
        train_iters=2,
        # Stages exchange whole microbatches only, and a full validation ends with what is left.
        micro_batch_size=1,
        global_batch_size=4,
        pipeline_model_parallel_size=2,
        calculate_per_token_loss=True,
        untie_embeddings_and_output_weights=True,
        check_for_spiky_loss=True,
    )
    result = run_torchrun(2, argv, script=EXAMPLES / "pretrain_gpt.py")
    losses = dict(
        re.findall(
            r"validation-([ab]) loss at iteration 2 \| lm loss value: (\S+)",
            result.ranks[-1].stdout,
        )
    )
    assert sorted(losses) == ["a", "b"]
    assert losses["a"] == losses["b"]  # the same text
    assert float(losses["a"]) < float(result.losses[0][1])


@pytest.mark.slow
@pytest.mark.parametrize(
    "flags",
    [
        {"pipeline_model_parallel_size": 2},
        {
            "pipeline_model_parallel_size": 2,
            "bf16": True,
            "untie_embeddings_and_output_weights": True,
            "calculate_per_token_loss": True,
            "check_for_spiky_loss": True,
            "normalization": "RMSNorm",
            "swiglu": True,
        },
        {
            "tensor_model_parallel_size": 2,
            "sequence_parallel": True,
            "reset_position_ids": True,
            "eod_mask_loss": True,
        },
        {
            "pipeline_model_parallel_size": 2,
            "num_experts": 4,
            "moe_router_topk": 2,
            "moe_aux_loss_coeff": "1e-2",
            "swiglu": True,
            "disable_bias_linear": True,
        },
    ],
    ids=["pp", "bf16-untied", "tp-sp", "moe"],
)
def test_same_losses_as_the_script_of_megatron_lm(flags: dict[str, Any], tmp_path: Path) -> None:
    """To the last printed digit. MEGATRON_LM_CHECKOUT names a checkout of core_v0.19.0."""
    checkout = os.environ.get("MEGATRON_LM_CHECKOUT")
    if not checkout:
        pytest.skip("set MEGATRON_LM_CHECKOUT to a checkout of Megatron-LM, core_v0.19.0")
    # Copied, so that both scripts run on the installed Megatron.
    for name in ("pretrain_gpt.py", "gpt_builders.py", "model_provider.py"):
        shutil.copy(Path(checkout) / name, tmp_path)
    argv = gpt_args(**flags, train_iters=4, eval_iters=2, eval_interval=2)
    theirs, ours = (
        run_torchrun(2, argv, script=script)
        for script in (tmp_path / "pretrain_gpt.py", EXAMPLES / "pretrain_gpt.py")
    )
    assert len(theirs.losses) == 4
    assert ours.losses == theirs.losses
    assert ours.grad_norms == theirs.grad_norms
    assert ours.validation_losses == theirs.validation_losses


def test_study_job_runs_its_part_and_goes_on_behind_the_time_limit(tmp_path: Path) -> None:
    """With stand-ins for Slurm and the study."""
    stopped = "trap 'exit 143' TERM; kill -USR1 $PPID; sleep 30 & wait"

    def attempt(index: int, body: str) -> tuple[int, str]:
        for name, text in (("megatron-async", f"echo $@; {body}"), ("scontrol", "echo $@")):
            (tmp_path / name).write_text(f"#!/usr/bin/env bash\n{text}\n")
            (tmp_path / name).chmod(0o755)
        found = subprocess.run(
            [
                *("bash", EXAMPLES / "study.sbatch", "quick"),
                *("seeds=[1]", "seeds=[2] flags.train-iters=50"),
            ],
            env={
                "PATH": f"{tmp_path}:{os.environ['PATH']}",
                "SLURM_JOB_ID": "8",
                "SLURM_ARRAY_JOB_ID": "7",
                "SLURM_ARRAY_TASK_ID": str(index),
            },
            capture_output=True,
            text=True,
            check=False,
        )
        return found.returncode, found.stdout + found.stderr

    command = "study quick --set=seeds=[2] --set=flags.train-iters=50 --output runs/study/quick-1\n"
    assert attempt(1, "exit 0") == (0, command)
    assert attempt(1, "exit 3") == (3, command)
    code, said = attempt(1, stopped)
    assert (code, said.splitlines()[-1]) == (0, "requeue 7_1")
    code, said = attempt(2, "exit 0")
    assert code == 2
    assert "Give --array 0-1." in said
