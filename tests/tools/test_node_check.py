"""What the check of a job's nodes makes of ranks' reports, and the check itself on CPU ranks."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from megatron_async.tools.node_check import Report, notes_on, problems_of
from tests.support.torchrun import run_torchrun

GIB = 2**30
GOOD = Report(
    rank=0,
    node="n1",
    device="GPU-0",
    model="H100",
    free_share=0.99,
    versions={"torch": "2.14.1", "driver": "580"},
    import_s=12.0,
    output_bytes=100 * GIB,
    temporary_bytes=5 * GIB,
    shared=True,
)


def reports(**of_last: Any) -> list[Report]:
    """Of four ranks on two nodes; the last one is as told."""
    ranks = [
        dataclasses.replace(GOOD, rank=rank, node=f"n{1 + rank // 2}", device=f"GPU-{rank}")
        for rank in range(4)
    ]
    return [*ranks[:3], dataclasses.replace(ranks[3], **of_last)]


def problems(found: list[Report], *, cpu: bool = False) -> list[str]:
    return problems_of(found, cpu=cpu, output_gib=10, temporary_gib=1)


def test_good_nodes() -> None:
    assert problems(reports()) == []
    assert notes_on(reports()) == []


@pytest.mark.parametrize(
    ("of_last", "text"),
    [
        ({"device": None, "model": None}, "n2, rank 3: no GPU."),
        ({"device": "GPU-2"}, "n2: several ranks share the GPU GPU-2."),
        ({"free_share": 0.5}, "n2, rank 3: 50% of the GPU's memory are free; another process is"),
        ({"model": "A100"}, "the GPU is H100 on most ranks, and A100 on n2."),
        (
            {"versions": {"torch": "2.14.0", "driver": "580"}},
            "torch is 2.14.1 on most ranks, and 2.14.0 on n2.",
        ),
        ({"versions": {"torch": "2.14.1"}}, "driver is 580 on most ranks, and none on n2."),
        ({"trouble": "the GPU fails: ECC"}, "n2, rank 3: the GPU fails: ECC"),
    ],
)
def test_what_is_wrong_names_the_node(of_last: dict[str, Any], text: str) -> None:
    (problem,) = problems(reports(**of_last))
    assert problem.startswith(text)


@pytest.mark.parametrize(
    ("of_node", "text"),
    [
        ({"shared": False}, "n2 does not see what rank 0 wrote"),
        ({"output_bytes": 4 * GIB}, "n2 has 4.0 GiB free in the output folder, of 10 that"),
        ({"temporary_bytes": 0}, "n2 has 0.0 GiB free in the temporary folder, of 1 that"),
    ],
)
def test_what_is_wrong_with_a_node_is_said_once(of_node: dict[str, Any], text: str) -> None:
    found = [
        dataclasses.replace(each, **of_node) if each.node == "n2" else each for each in reports()
    ]
    (problem,) = problems(found)
    assert problem.startswith(text)


def test_cpu_ranks_need_no_gpu() -> None:
    found = [dataclasses.replace(each, device=None, model=None) for each in reports()]
    assert problems(found, cpu=True) == []
    assert len(problems(found)) == 4


def test_slow_imports_are_a_note() -> None:
    (note,) = notes_on(reports(import_s=200.0))
    assert note.startswith("importing took 200 s on n2")


@pytest.mark.slow
@pytest.mark.parametrize(("wanted", "code"), [("0.001", 0), ("1e9", 1)])
def test_the_check_itself(wanted: str, code: int, tmp_path: Path) -> None:
    result = run_torchrun(
        2,
        ["--cpu", "--output", str(tmp_path / "run"), "--output-gib", wanted],
        launcher=("-m", "megatron_async.tools.node_check"),
        script=None,
        check=False,
    )
    assert result.returncode == code, result.describe()
    assert "2 ranks on 1 nodes, no GPU each" in result.stdout
    assert ("The nodes are fit." in result.stdout) == (code == 0)
    assert ("all-reduce: 64 MiB over gloo in" in result.stdout) == (code == 0)
    assert list((tmp_path / "run").iterdir()) == []
