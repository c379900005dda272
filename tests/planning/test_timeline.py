"""Drawings of schedules, and the command `megatron-async timeline`."""

import csv
import io
import re
from pathlib import Path

import pytest
from matplotlib.figure import Figure

from megatron_async.planning import timeline
from megatron_async.planning.candidates import candidate, candidates
from megatron_async.schedules.simulator import Costs, simulate
from tests.schedules.lists import Lists


def lists_of(name: str, *, iterations: int) -> Lists:
    """Two stages, two microbatches."""
    planned = candidate(name)
    return planned.lists(planned.pipeline(stages=2), microbatches=2, iterations=iterations)


def test_timeline_text() -> None:
    lists = lists_of("pipedream-2bw", iterations=3)
    run = simulate(lists, Costs(forward=1, backward=2, optimizer=1))
    out = io.StringIO()
    timeline.draw_text(run, out, width=200, colour=False)
    assert out.getvalue().splitlines() == [
        "stage 0 F0-F1-......B0====F0-B1====F1-B0====U==F0-B1====F1-B0====U==...B1====U==",
        "stage 1 ...F0-B0====F1-B1====F0-B0====F1-B1====U==F0-B0====F1-B1====U==......U==",
    ]
    panels = io.StringIO()
    timeline.draw_text(run, panels, width=48, colour=False)
    rows = panels.getvalue().split("\n\n")
    joined = ["".join(panel.splitlines()[stage][8:] for panel in rows) for stage in (0, 1)]
    assert joined == [line[8:] for line in out.getvalue().splitlines()]


def test_timeline_colours_do_not_change_the_text() -> None:
    lists = lists_of("interleaved", iterations=2)
    run = simulate(lists, Costs(forward=1, backward=2))
    plain, coloured = io.StringIO(), io.StringIO()
    timeline.draw_text(run, plain, width=60, colour=False)
    timeline.draw_text(run, coloured, width=60, colour=True)
    assert re.sub(r"\x1b\[[0-9;]*m", "", coloured.getvalue()) == plain.getvalue()
    assert "\x1b[" in coloured.getvalue()
    assert "f0-" in plain.getvalue()


def test_timeline_command(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    picture, table = tmp_path / "timeline.png", tmp_path / "timeline.csv"
    flags = (
        "--stages 4 --microbatches 4 --forward-ms 60 --backward-ms 120 --optimizer-ms 36 "
        f"--schedule all --iterations 2 --width 100 --png {picture} --csv {table}"
    )
    assert timeline.main(flags.split()) == 0
    out = capsys.readouterr().out
    assert "PipeDream-2BW, deferred update: 756 ms per iteration" in out
    assert all(len(line) <= 100 for line in out.splitlines() if line.startswith("stage "))
    assert picture.read_bytes().startswith(b"\x89PNG")
    with table.open() as file:
        rows = list(csv.DictReader(file))
    assert {row["schedule"] for row in rows} == {each.name for each in candidates()}
    first = rows[1]
    assert (first["kind"], first["started"], first["stopped"]) == ("forward", "0.0", "60.0")


@pytest.mark.parametrize("optimizer", [0, 1])
def test_the_legend_names_what_is_drawn(
    optimizer: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    labels: list[str] = []

    def saved(figure: Figure, *_: object, **__: object) -> None:
        labels.append(figure.axes[-1].get_xlabel())

    monkeypatch.setattr(Figure, "savefig", saved)
    run = simulate(
        lists_of("fresh-2bw", iterations=2), Costs(forward=1, backward=2, optimizer=optimizer)
    )
    timeline.draw_png([run], [""], tmp_path / "timeline.png")
    (label,) = labels
    assert label.endswith(", black: optimizer step" if optimizer else ", dark: backward")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--stages 4 --microbatches 2", "at least 3 microbatches in every batch, got 2"),
        ("--stages 4 --microbatches 3 --schedule all", "leave it out with --schedule"),
        ("--stages 4 --microbatches 4 --forward-ms 0", "must be positive"),
        ("--stages 4 --microbatches 4 --iterations 0", "--iterations must be at least 1"),
        ("--stages 4 --microbatches 4 --optimizer-ms -1", "must not be negative"),
        ("--stages 4 --microbatches 4 --width 0", "--width must be at least 1, got 0"),
    ],
)
def test_timeline_refuses(flags: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        timeline.main(flags.split())
    assert message in capsys.readouterr().err
