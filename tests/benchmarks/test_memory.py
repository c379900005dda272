"""Memory of an asynchronous run on one rank, counted over storages, against arithmetic."""

import csv
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.gpt import REPOSITORY

LAYERS, HIDDEN, SEQUENCE, VOCABULARY = 2, 64, 32, 128

PARAMETERS = (
    VOCABULARY * HIDDEN  # tied embedding
    + SEQUENCE * HIDDEN  # positions
    + LAYERS * (12 * HIDDEN**2 + 13 * HIDDEN)
    + 2 * HIDDEN  # final norm
)


NUMBER_OF_TOKENS = 4  # of the last batch, an int32
SCALARS = 32  # bytes of numbers on their way to the log or to other stages when tensors are counted


@pytest.mark.parametrize(
    ("precision", "bytes_of_a_weight", "modes"),
    [
        pytest.param((), 4, ("2bw", "2bw-corrected"), id="fp32"),
        pytest.param(
            ("--bf16",),
            2,
            ("2bw", "2bw-corrected", "2bw-second-buffer"),
            id="bf16",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_what_is_added_is_to_the_byte_what_arithmetic_says(
    precision: tuple[str, ...], bytes_of_a_weight: int, modes: tuple[str, ...], tmp_path: Path
) -> None:
    """A version of the weights, the gradients' copy or second buffer in fp32, and the correction's
    fp32 buffer."""
    table = tmp_path / "overhead.csv"
    command = [
        *(sys.executable, str(REPOSITORY / "benchmarks" / "overhead.py"), *precision),
        *("--layers", str(LAYERS), "--hidden-size", str(HIDDEN), "--seq-length", str(SEQUENCE)),
        *("--vocab-size", str(VOCABULARY), "--microbatches", "2"),
        *("--iterations", "1", "--repeats", "1", "--csv", str(table)),
        *("--modes", *modes),
    ]
    run = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    with table.open(newline="", encoding="utf-8") as file:
        added = {row["mode"]: int(row["added_bytes"]) for row in csv.DictReader(file)}
    uncorrected = PARAMETERS * (bytes_of_a_weight + 4) + NUMBER_OF_TOKENS
    for mode in set(modes) - {"2bw-corrected"}:
        assert 0 <= added[mode] - uncorrected <= SCALARS
    assert 0 <= added["2bw-corrected"] - (uncorrected + 4 * PARAMETERS) <= SCALARS
