"""The configurations for GPUs, through the parser and the checks of Megatron and of the plugin."""

import subprocess
from pathlib import Path

import pytest

from megatron_async.study import config
from megatron_async.study.cells import Cell, plan
from tests.study.test_config import IDENTITY, run_all
from tests.support.parsed_flags import parse

NAMES = [name for name in config.shipped() if config.load(name).device == "gpu"]

# Parameters.
SIZES = {"paper-135m": 134.5e6, "paper-360m": 361.8e6, "momentum": 134.5e6}


def cells_of(name: str) -> list[Cell]:
    """One cell for each optimizer, delay and correction."""
    study = config.load(name)
    found: dict[tuple[str, str, str], Cell] = {}
    results = run_all(study, lambda cell: cell.learning_rate)
    for cell in plan(study, results, identity=IDENTITY):
        found.setdefault((cell.optimizer, cell.delay, cell.correction), cell)
    return list(found.values())


def test_flags_pass_the_checks() -> None:
    cases = [(name, cell) for name in NAMES for cell in cells_of(name)]
    # The optimizers of the two tables are the same.
    cases = [
        (name, cell) for name, cell in cases if name != "paper-360m" or cell.optimizer == "muon"
    ]
    answers = parse(
        [(["--data-path", "data", *cell.words], config.load(name).ranks) for name, cell in cases]
    )
    for (name, cell), args in zip(cases, answers, strict=True):
        schedule = {
            "none": "default",
            "one-step": "pipedream-2bw",
            "half": "fresh-2bw",
            "pipedream-16": "pipedream",
        }
        if cell.delay == "half":
            microbatches = number(cell, "global-batch-size") / number(cell, "micro-batch-size")
            assert number(cell, "delayed-microbatches") == microbatches / 2, name
        assert args["pipeline_schedule"] == schedule[cell.delay], name
        assert args["delay_correction"] == cell.correction
        assert args["optimizer"] == cell.optimizer
        assert args["lr"] == cell.learning_rate
        assert args["min_lr"] == pytest.approx(cell.learning_rate / 10)
        assert args["bf16"]


def number(cell: Cell, flag: str) -> float:
    return float(cell.flags[flag][0])


def size_of(cell: Cell, *, experts: float) -> float:
    """Parameters of a model with gated MLPs, of which so many experts count."""
    hidden, layers = number(cell, "hidden-size"), number(cell, "num-layers")
    groups = number(cell, "num-query-groups") / number(cell, "num-attention-heads")
    layer = hidden * hidden * (2 + 2 * groups) + experts * 3 * hidden * number(
        cell, "ffn-hidden-size"
    )
    tables = 2 if "untie-embeddings-and-output-weights" in cell.flags else 1
    return layers * layer + tables * 49152 * hidden


def tokens_of(cell: Cell) -> float:
    return (
        number(cell, "train-iters") * number(cell, "global-batch-size") * number(cell, "seq-length")
    )


@pytest.mark.parametrize("name", ["paper-135m", "paper-360m", "momentum"])
def test_sizes_and_tokens_are_the_papers(name: str) -> None:
    cell = cells_of(name)[0]
    size = size_of(cell, experts=1)
    assert size == pytest.approx(SIZES[name], rel=0.002)
    assert tokens_of(cell) == pytest.approx(20 * size, rel=0.01)
    assert 180_000 <= tokens_of(cell) / number(cell, "train-iters") <= 360_000


def test_mixture_of_experts_has_the_papers_size_and_tokens() -> None:
    cell = cells_of("moe-10b")[0]
    assert size_of(cell, experts=64) == pytest.approx(10.2e9, rel=0.01)
    assert size_of(cell, experts=8) == pytest.approx(1.7e9, rel=0.02)
    assert tokens_of(cell) == pytest.approx(200e9, rel=0.001)
    assert 1e6 <= tokens_of(cell) / number(cell, "train-iters") <= 4e6


@pytest.mark.parametrize("name", NAMES)
def test_schedule_is_the_papers(name: str) -> None:
    study = config.load(name)
    flags = study.flags
    assert flags["lr-decay-style"] == ("cosine",)
    assert flags["lr-warmup-fraction"] == ("0.1",)
    assert (flags["clip-grad"], flags["weight-decay"]) == (("1.0",), ("0.1",))
    assert study.min_lr_ratio == 0.1
    assert study.checkpoint_interval is not None


def test_launcher_of_the_mixture_passes_on_its_words(tmp_path: Path) -> None:
    """The shell between srun and torchrun gets all words of a cell, spaces included."""
    import shlex

    launcher = config.load("moe-10b").launcher
    assert launcher is not None
    words = shlex.split(launcher)
    for name, body in (
        ("srun", 'while [ "$1" != bash ]; do shift; done; exec "$@"'),
        ("scontrol", "echo node1; echo node2"),
        ("torchrun", 'printf "%s\\n" "$@"'),
    ):
        (tmp_path / name).write_text(f"#!/usr/bin/env bash\n{body}\n")
        (tmp_path / name).chmod(0o755)
    shown = subprocess.run(
        [*words, "-m", "megatron_async", "a b"],
        env={"PATH": f"{tmp_path}:/usr/bin:/bin", "SLURM_NODEID": "3", "SLURM_JOB_NODELIST": "x"},
        capture_output=True,
        text=True,
        check=True,
    ).stdout.splitlines()
    assert shown == [
        *("--nnodes", "4", "--nproc-per-node", "8", "--node-rank", "3"),
        *("--master-addr", "node1", "--master-port", "29500", "-m", "megatron_async", "a b"),
    ]
