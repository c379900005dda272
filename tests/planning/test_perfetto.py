"""Trace files for Perfetto, against the Trace Event Format."""

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from megatron_async.planning import timeline
from megatron_async.planning.candidates import candidate, candidates
from megatron_async.planning.perfetto import slices
from megatron_async.replay.trace import write
from megatron_async.schedules.actions import Kind
from megatron_async.schedules.simulator import Costs, simulate
from tests.support.traces import by_lists

NUMBER = (int, float)


def check_format(trace: dict[str, Any]) -> list[dict[str, Any]]:
    """Check what every viewer asks for; returns the complete events."""
    complete = []
    for event in trace["traceEvents"]:
        assert event["ph"] in ("X", "M")
        assert isinstance(event["name"], str)
        assert isinstance(event["pid"], int)
        assert isinstance(event["tid"], int)
        assert isinstance(event["ts"], NUMBER)
        assert isinstance(event["args"], dict)
        if event["ph"] == "M":
            known = ("process_name", "thread_name", "thread_sort_index")
            assert event["name"] in known
            key = "sort_index" if event["name"] == "thread_sort_index" else "name"
            assert list(event["args"]) == [key]
            continue
        assert isinstance(event["dur"], NUMBER)
        assert event["ts"] >= 0
        assert event["dur"] > 0
        complete.append(event)
    tracks: dict[tuple[int, int], list[dict[str, Any]]] = {}
    for event in complete:
        tracks.setdefault((event["pid"], event["tid"]), []).append(event)
    named = {
        (event["pid"], event["tid"])
        for event in trace["traceEvents"]
        if event["ph"] == "M" and event["name"] == "thread_name"
    }
    assert named == set(tracks)
    # Slices of a thread that overlap without nesting are dropped.
    for track in tracks.values():
        for before, after in pairwise(track):
            assert after["ts"] >= before["ts"] + before["dur"] - 1e-6
    return complete


def written(path: Path, flags: str) -> list[dict[str, Any]]:
    assert timeline.main([*flags.split(), "--perfetto", str(path)]) == 0
    return check_format(json.loads(path.read_text(encoding="utf-8")))


def test_simulated_schedules(tmp_path: Path) -> None:
    flags = (
        "--stages 4 --microbatches 4 --forward-ms 10 --backward-ms 20 --optimizer-ms 5 "
        "--latency-ms 1 --schedule all"
    )
    events = written(tmp_path / "trace.json", flags)
    assert len({event["pid"] for event in events}) == len(candidates())
    assert {event["cat"] for event in events} == {"compute", "wait", "update"}


def test_versions_have_colours(tmp_path: Path) -> None:
    flags = "--stages 2 --microbatches 4 --iterations 3 --schedule fresh-2bw"
    events = [e for e in written(tmp_path / "trace.json", flags) if e["cat"] == "compute"]
    versions = {event["args"]["version"] for event in events}
    assert versions == {0, 1, 2}
    colours = {(event["args"]["version"], event["cname"]) for event in events}
    assert len(colours) == len({colour for _, colour in colours}) == 3
    # Perfetto leaves the digits out of a name when it chooses a colour.
    letters = {(event["args"]["version"], event["name"].split()[1]) for event in events}
    assert letters == {(0, "a"), (1, "b"), (2, "c")}
    forward = next(event for event in events if event["name"] == "F1 a")
    assert (forward["ts"], forward["dur"]) == (1000.0, 1000.0)
    assert forward["args"] == {"batch": 0, "microbatch": 1, "version": 0}


def test_waits_are_shown(tmp_path: Path) -> None:
    events = written(tmp_path / "trace.json", "--stages 2 --microbatches 2 --schedule 1f1b")
    waited = sum(e["dur"] for e in events if e["cat"] == "wait" and e["tid"] == 1)
    worked = sum(e["dur"] for e in events if e["cat"] == "compute" and e["tid"] == 1)
    assert worked == pytest.approx(3 * 2 * 3 * 1e3)
    assert waited == pytest.approx(3 * 3 * 1e3)


def test_a_recorded_run_takes_the_times_of_its_lists(tmp_path: Path) -> None:
    planned = candidate("fresh-2bw")
    lists = planned.lists(planned.pipeline(stages=3), microbatches=4, iterations=6)
    for trace in by_lists(lists):
        write(trace, tmp_path / "run")
    flags = f"--trace {tmp_path / 'run'} --forward-ms 1 --backward-ms 2 --optimizer-ms 1"
    replayed = written(tmp_path / "replayed.json", flags)
    simulated = slices(simulate(lists, Costs(forward=1, backward=2, optimizer=1)))
    expected = {
        (each.stage, each.batch, each.microbatch): each.started
        for each in simulated
        if not each.waits and each.kind is Kind.FORWARD
    }
    found = {
        (e["tid"], e["args"]["batch"], e["args"]["microbatch"]): e["ts"] / 1e3
        for e in replayed
        if e["name"].startswith("F")
    }
    assert found == pytest.approx(expected)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--stages 2", "--stages and --microbatches are needed, or --trace"),
        ("--trace nowhere", "--trace needs --perfetto"),
        ("--trace nowhere --perfetto x.json", "write them with --cpu --log-enqueues"),
    ],
)
def test_refused(flags: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        timeline.main(flags.split())
    assert message in capsys.readouterr().err
