"""The launch scripts, and the training script for those without a checkout of Megatron-LM."""

import functools
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.support.gpt import REPOSITORY, gpt_args
from tests.support.parsed_flags import parse
from tests.support.torchrun import run_torchrun

EXAMPLES = REPOSITORY / "examples"
MODELS = sorted(path.stem for path in (EXAMPLES / "models").glob("*.conf"))

# Layers, hidden size, heads, peak learning rate, batch and GPUs: the table of examples/README.md.
TABLE = {
    match[1]: match.groups()[1:]
    for match in re.finditer(
        r"^\| `(.+?)` \| (\d+) / (\d+) / (\d+) \| (\S+) \| (\d+) \| .*? \| (\d+) \|$",
        (EXAMPLES / "README.md").read_text(),
        flags=re.MULTILINE,
    )
}
# Parameters without the embeddings' padding, from the models' names.
PARAMETERS = {
    "gpt-125m": 125e6,
    "gpt-350m": 350e6,
    "gpt-760m": 760e6,
    "gpt-1.3b": 1.3e9,
    "gpt-2.7b": 2.7e9,
    "gpt-6.7b": 6.7e9,
    "gpt-10b": 9.9e9,
    "smollm2-135m": 135e6,
    "smollm2-360m": 360e6,
}


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
def parsed() -> dict[tuple[str, str], dict[str, Any]]:
    """Every model and schedule, through the parser and the checks of Megatron and of the plugin."""
    cases = [(model, schedule) for model in MODELS for schedule in ("fresh-2bw", "default")]
    answers = parse(
        [
            (flags_of(command(model, SCHEDULE=schedule)), int(TABLE[model][-1]))
            for model, schedule in cases
        ]
    )
    return dict(zip(cases, answers, strict=True))


def test_the_table_has_every_model() -> None:
    assert sorted(TABLE) == MODELS == sorted(PARAMETERS)


@pytest.mark.parametrize("path", sorted(EXAMPLES.rglob("*.*")), ids=lambda path: path.name)
def test_shell_syntax(path: Path) -> None:
    if path.suffix in (".sh", ".sbatch", ".conf"):
        subprocess.run(["bash", "-n", path], check=True)


@pytest.mark.parametrize("model", MODELS)
def test_flags_pass_the_checks_and_mean_what_the_table_says(model: str) -> None:
    layers, hidden, heads, rate, batch, _ = TABLE[model]
    asynchronous, synchronous = (parsed()[model, s] for s in ("fresh-2bw", "default"))
    for args in (asynchronous, synchronous):
        assert args["num_layers"] == int(layers)
        assert args["hidden_size"] == int(hidden)
        assert args["num_attention_heads"] == int(heads)
        assert args["lr"] == float(rate)
        assert args["min_lr"] == pytest.approx(float(rate) / 10)
        assert args["global_batch_size"] == int(batch)
        assert args["data_parallel_size"] == 1  # the smallest number of GPUs that it runs on
        assert args["lr_warmup_samples"] == args["train_samples"] // 10
        assert args["optimizer"] == "muon"
        assert args["bf16"]
    assert asynchronous["pipeline_schedule"] == "fresh-2bw"
    assert asynchronous["delay_correction"] == "error-feedback"
    assert synchronous["pipeline_schedule"] == "default"
    assert synchronous["delay_correction"] == "none"


@pytest.mark.parametrize("model", MODELS)
def test_shape_has_the_size_of_its_name_and_20_tokens_a_parameter(model: str) -> None:
    args = parsed()[model, "default"]
    hidden, ffn, layers = args["hidden_size"], args["ffn_hidden_size"], args["num_layers"]
    is_smollm2 = model.startswith("smollm2")
    queries = args["num_query_groups"] / args["num_attention_heads"] if is_smollm2 else 1
    attention = hidden * hidden * (2 + 2 * queries)
    mlp = (3 if is_smollm2 else 2) * hidden * ffn
    vocabulary, positions = (49152, 0) if is_smollm2 else (50257, 2048)
    count = layers * (attention + mlp) + (vocabulary + positions) * hidden
    assert count == pytest.approx(PARAMETERS[model], rel=0.04)
    tokens = args["train_samples"] * args["seq_length"]
    assert tokens == pytest.approx(20 * PARAMETERS[model], rel=0.01)
    assert not args["untie_embeddings_and_output_weights"]


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
    assert text.startswith("torchrun --standalone --nproc-per-node 2 -m megatron_async mine.py ")
    for part in (
        *("--optimizer adam", "--pipeline-model-parallel-size 2", "--micro-batch-size 1"),
        *("--data-path d --tokenizer-type NullTokenizer --vocab-size 256", "--load elsewhere/"),
    ):
        assert part in text
    assert "--muon" not in text
    assert "--pipeline-schedule" not in text
    assert line[-2:] == ["--seed", "7"]


def test_several_nodes() -> None:
    text = " ".join(command("gpt-10b", NODES="4", NODE_RANK="2", HEAD="n1", PORT="29511"))
    address = "--nnodes 4 --node-rank 2 --master-addr n1 --master-port 29511"
    assert text.startswith(f"torchrun {address} ")


def test_slurm_job_gives_each_node_its_rank(tmp_path: Path) -> None:
    """With stand-ins for scontrol and srun."""
    for name, body in (
        ("scontrol", "printf 'n1\\nn2\\n'"),
        ("srun", 'shift; for i in 0 1; do SLURM_NODEID=$i "$@"; echo END; done'),
    ):
        (tmp_path / name).write_text(f"#!/usr/bin/env bash\n{body}\n")
        (tmp_path / name).chmod(0o755)
    result = subprocess.run(
        ["bash", EXAMPLES / "gpt.sbatch", "gpt-6.7b", "--seed", "7"],
        env={
            "PATH": f"{tmp_path}:{os.environ['PATH']}",
            "SLURM_SUBMIT_DIR": str(EXAMPLES.parent),
            "SLURM_JOB_NUM_NODES": "2",
            "SLURM_JOB_NODELIST": "n[1-2]",
            "SLURM_JOB_ID": "123",
            "SLURM_GPUS_ON_NODE": "8",
            "DRY_RUN": "1",
        },
        capture_output=True,
        text=True,
        check=True,
    )
    nodes = result.stdout.split("END\n")[:2]
    for rank, node in enumerate(nodes):
        text = " ".join(node.splitlines())
        assert f"--nnodes 2 --node-rank {rank} --master-addr n1 --master-port 20123" in text
        assert "--nproc-per-node 8" in text
        assert text.endswith("--seed 7 --exit-signal-handler")


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
