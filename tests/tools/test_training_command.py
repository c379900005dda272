"""Training commands are read as a shell, torchrun and the launcher read them."""

import pytest

from megatron_async.tools.training_command import CommandError, TrainingCommand, read_command

SCRIPT = "pretrain_gpt.py"
ARGUMENTS = ("--num-layers", "8", "--pipeline-schedule", "fresh-2bw")
LAUNCHED = ["-m", "megatron_async", SCRIPT, *ARGUMENTS]


def read(*words: str, **options: object) -> TrainingCommand:
    return read_command(words, **{"environment": {}, **options})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("words", "ranks"),
    [
        (["torchrun", "--nproc-per-node", "8"], 8),
        (["torchrun", "--nproc_per_node=4", "--nnodes=2"], 8),
        (["/opt/venv/bin/torchrun", "--nproc-per-node", "2", "--standalone"], 2),
        (["torchrun"], 1),
        (["torchrun", "--nnodes", "1:3", "--nproc-per-node", "8", "--max-restarts", "3"], 24),
        (["python", "-u", "-m", "torch.distributed.run", "--nproc-per-node", "4"], 4),
        (["python3.12", "-X", "faulthandler", "-m", "torch.distributed.run"], 1),
        (["srun", "-N", "4", "--export=ALL", "torchrun", "--nnodes=4", "--nproc-per-node=8"], 32),
        (["env", "A=1", "nohup", "torchrun", "--nproc-per-node", "2"], 2),
        (["srun", "-n", "16", "python"], 16),
        (["srun", "-N2", "--ntasks-per-node=8", "python"], 16),
        (["python"], 1),
    ],
)
def test_world_size(words: list[str], ranks: int) -> None:
    command = read(*words, *LAUNCHED)
    assert command.ranks == ranks
    assert command.script == SCRIPT
    assert command.arguments == ARGUMENTS
    assert command.launched is True
    assert not command.cpu


def test_elastic_sizes_are_said() -> None:
    (note,) = read("torchrun", "--nnodes", "2:4", *LAUNCHED).notes
    assert "2 to 4 nodes" in note


def test_the_script_alone() -> None:
    assert read(SCRIPT, *ARGUMENTS) == TrainingCommand(script=SCRIPT, arguments=ARGUMENTS)
    assert read(SCRIPT, *ARGUMENTS, world_size=8).ranks == 8
    assert read(SCRIPT, *ARGUMENTS, environment={"WORLD_SIZE": "4"}).ranks == 4


def test_world_size_takes_precedence() -> None:
    assert read("torchrun", "--nproc-per-node", "2", *LAUNCHED, world_size=16).ranks == 16


@pytest.mark.parametrize("place", [2, 3, 5])
def test_cpu_may_stand_anywhere(place: int) -> None:
    words = [*LAUNCHED[:place], "--cpu", *LAUNCHED[place:]]
    command = read("torchrun", "--nproc-per-node", "2", *words)
    assert command.cpu
    assert command.script == SCRIPT
    assert command.arguments == ARGUMENTS


@pytest.mark.parametrize(
    "words",
    [["torchrun", "--nproc-per-node", "2", SCRIPT], ["python", SCRIPT], ["python", "-m", "train"]],
)
def test_without_the_launcher(words: list[str]) -> None:
    assert read(*words, *ARGUMENTS).launched is False


def test_variables_of_the_command() -> None:
    command = read("CUDA_DEVICE_MAX_CONNECTIONS=1", "env", "B=x=y", "torchrun", *LAUNCHED)
    assert command.variables == {"CUDA_DEVICE_MAX_CONNECTIONS": "1", "B": "x=y"}
    alone = read("CUDA_DEVICE_MAX_CONNECTIONS=1", SCRIPT, *ARGUMENTS, world_size=64)
    assert alone.variables == {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    started = read("srun", "--export=ALL,A=1,B=2", "docker", "run", "--env=C=x,y", "-e", "D=4",
                   "image", "torchrun", *LAUNCHED)  # fmt: skip
    assert started.variables == {"A": "1", "B": "2", "C": "x,y", "D": "4"}


TEXT = """\
# a launch script
set -e
export GPUS=8 CUDA_DEVICE_MAX_CONNECTIONS=1
echo start; mkdir -p logs && cd work
MODEL="--num-layers 8"
torchrun --nproc-per-node $GPUS --nnodes ${SLURM_NNODES} \\
    -m megatron_async pretrain_gpt.py $MODEL \\
    --pipeline-schedule 'fresh-2bw' 2>&1 | tee logs/run.log
"""


@pytest.mark.parametrize(
    "words", [[TEXT], ["bash", "-c", TEXT], ["srun", "-N2", "bash", "-lc", TEXT]]
)
def test_a_text_of_several_commands(words: list[str]) -> None:
    command = read(*words, environment={"SLURM_NNODES": "2"})
    assert command.ranks == 16
    assert command.script == SCRIPT
    assert command.arguments == ARGUMENTS
    assert command.variables["CUDA_DEVICE_MAX_CONNECTIONS"] == "1"


def test_quoted_values_stay_whole() -> None:
    text = "torchrun -m megatron_async my\\ run/train.py --title 'a  b' --layout \"Et|t|tL\" > log"
    command = read(text)
    assert command.script == "my run/train.py"
    assert command.arguments == ("--title", "a  b", "--layout", "Et|t|tL")


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["make", "train"], "is no training command"),
        (["torchrun", "--nproc-per-node"], "torchrun cannot read its part"),
        (["torchrun", "--no-such-flag", *LAUNCHED], "torchrun cannot read its part"),
        (["torchrun", "--nproc-per-node", "", *LAUNCHED], "--nproc-per-node is ''"),
        (["torchrun", "--nnodes=0", *LAUNCHED], "--nnodes is '0'"),
        (["torchrun", "-m", "megatron_async"], "followed by no script"),
        (["torchrun", "-m", "megatron_async", "--lr", "1"], "the script comes first, and --lr"),
        (["bash", "launch.sh"], "launch.sh is a shell script"),
        (["python", "-c", "pass"], "runs a text"),
        (["python", "-m"], "has no module"),
        (["python"], "runs no script"),
        (["bash", "-c"], "-c has no text"),
        (["bash", "-c", "torchrun -m megatron_async 'x.py"], "quotes do not match"),
        (["bash", "-c", "torchrun --nnodes $NODES -m megatron_async x.py"], "variable NODES"),
        (
            ["bash", "-c", "torchrun --nnodes $(wc -l hosts) -m megatron_async x.py"],
            r"\$\( \) behind torchrun --nnodes",
        ),
    ],
)
def test_what_cannot_be_read(words: list[str], why: str) -> None:
    with pytest.raises(CommandError, match=why):
        read(*words)


def test_world_size_of_none() -> None:
    with pytest.raises(CommandError, match="0 is no number of ranks"):
        read(SCRIPT, world_size=0)
