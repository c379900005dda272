"""Recording on CPU ranks, the traces' files, and the command that replays them."""

import argparse
import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megatron_async.config.validation import ArgumentError, Facts, check
from megatron_async.replay.command import main
from megatron_async.replay.counts import host_waits, launches
from megatron_async.replay.device import run
from megatron_async.replay.races import find_races
from megatron_async.replay.record import directory_in
from megatron_async.replay.steady import steady_state
from megatron_async.replay.trace import (
    Allocate,
    Begin,
    Communication,
    End,
    Free,
    HostAccess,
    Item,
    Iteration,
    RecordEvent,
    Synchronize,
    Trace,
    TraceError,
    UseStream,
    Wait,
    WaitEvent,
    read,
    read_all,
    write,
)
from megatron_async.schedules import SCHEDULES
from megatron_async.schedules.schedule import Pipeline, action_lists
from megatron_async.schedules.simulator import Costs, simulate
from tests.replay.recorded import ITERATIONS, MICROBATCHES, REPLICAS, STAGES
from tests.support.torchrun import run_python
from tests.support.traces import collective, drop, kernel, message, trace, traces

# ------------------------------------------------------------------------------------- one process


@functools.cache
def recorded_operations() -> list[dict[str, Any]]:
    """What a process records of operators and of its streams."""
    found: list[dict[str, Any]] = run_python(
        """
        import json, sys, tempfile
        from pathlib import Path
        from megatron_async import cpu_backend
        cpu_backend.install()
        import torch
        from megatron_async.replay import record

        directory = Path(tempfile.mkdtemp())
        recorder = record.install(directory)
        torch.cuda.current_stream().wait_stream(torch.cuda.Stream())  # set-up: not recorded
        recorder.begin_iteration(0, stage=0, stages=1)

        def step(name, function):
            from megatron_async.replay.trace import Begin, End
            recorder.add(Begin(action=name))
            result = function()
            recorder.add(End())
            return result

        host = step("host", lambda: torch.ones(4) * 2)
        device = step("factory", lambda: torch.ones(4, device="cuda"))
        step("empty", lambda: torch.empty(4, device=torch.cuda.current_device()))
        step("view", lambda: device.view(2, 2)[1:].t())
        step("read and write", lambda: torch.add(device, device[:2].sum()))
        step("in place", lambda: device[1:3].mul_(2))
        step("several", lambda: torch._foreach_mul_([device[:1], device[2:]], 2.0))
        copied = step("to the device", lambda: host.cuda())
        assert copied.data_ptr() != host.data_ptr()
        pinned = host.pin_memory()
        step("pinned", lambda: pinned.to("cuda", non_blocking=True))
        step("pinned is overwritten", lambda: pinned.zero_())
        step("data", lambda: torch.tensor([1.0], device="cuda"))
        step("item", lambda: device[0].item())
        step("list", lambda: device.tolist())
        step("to the host", lambda: device.cpu())
        step("no copy", lambda: (device.cuda(), device.to("cuda"), host.cpu()))
        step("mask", lambda: device[device > 0])
        step("masked assignment", lambda: device.__setitem__(device > 0, 0.0))
        weight = torch.nn.Parameter(torch.ones(2, 2, device="cuda"))
        loss = step("forward", lambda: (weight @ weight).sum())
        step("backward", lambda: loss.backward())

        def on_side():
            side, event = torch.cuda.Stream(), torch.cuda.Event()
            event.record()
            side.wait_event(event)
            with torch.cuda.stream(side):
                device.add_(1)
                device.record_stream(side)
                assert torch.cuda.current_stream() is side
            with side:
                device.add_(1)
            torch.cuda.current_stream().wait_stream(side)
            event.synchronize()
            side.synchronize()
            torch.cuda.synchronize()
            torch.cuda.Event().wait()
        step("streams", on_side)

        def freeing():
            temporary = device * 2
            view = temporary[1:]
            del temporary
            device.add_(1)
            del view
            device.add_(1)
        step("freeing", freeing)
        recorder.end()
        step("behind the end", lambda: device.add_(1))
        print(json.dumps([json.loads(l) for l in (directory / "rank00000.jsonl").open()]))
        """
    )
    return found


def step(name: str) -> list[dict[str, Any]]:
    """The items of one step, but for its begin and its end."""
    items = recorded_operations()
    begin = next(i for i, item in enumerate(items) if item.get("action") == name)
    end = next(i for i in range(begin, len(items)) if items[i]["is"] == "end")
    return items[begin + 1 : end]


def kinds(name: str) -> list[str]:
    return [item["is"] for item in step(name) if item["is"] not in ("free", "allocate")]


def test_the_header_says_who_recorded() -> None:
    assert recorded_operations()[0] == {
        "format": 1,
        "rank": 0,
        "world": 1,
        "stage": 0,
        "stages": 1,
        "streams": [],
    }
    assert not any(item.get("action") == "behind the end" for item in recorded_operations())


def test_only_what_is_on_the_device_is_a_kernel() -> None:
    assert step("host") == []
    (allocated, made) = step("factory")
    assert allocated["is"] == "allocate"
    assert allocated["size"] == 16
    assert made["writes"] == [[allocated["storage"], 0, 16]]
    assert made["name"] == "ones"
    assert [item["is"] for item in step("empty")] == ["allocate"]
    assert step("view") == []


def test_kernels_have_the_bytes_that_they_read_and_write() -> None:
    storage = step("factory")[0]["storage"]
    by_name = {item["name"]: item for item in step("read and write") if item["is"] == "kernel"}
    assert list(by_name) == ["sum", "add"]
    assert by_name["sum"]["reads"] == [[storage, 0, 8]]
    assert [storage, 0, 16] in by_name["add"]["reads"]
    assert by_name["sum"]["writes"][0] in by_name["add"]["reads"]
    (in_place,) = step("in place")
    assert in_place["writes"] == [[storage, 4, 12]]
    (several,) = step("several")
    assert several["writes"] == [[storage, 0, 4], [storage, 8, 16]]


def test_the_host_waits_for_copies_unless_their_memory_is_pinned() -> None:
    assert kinds("to the device") == ["kernel", "synchronize"]
    assert kinds("pinned") == ["kernel"]
    assert kinds("pinned is overwritten") == ["host_access"]
    (copy,) = [item for item in step("pinned") if item["is"] == "kernel"]
    assert step("pinned is overwritten")[0]["writes"] == copy["reads"]
    assert kinds("data") == ["kernel", "synchronize"]
    assert kinds("to the host") == ["kernel", "synchronize"]
    assert kinds("no copy") == []


def test_the_host_waits_for_what_it_wants_to_know() -> None:
    assert kinds("item") == ["kernel", "synchronize"]
    assert step("item")[-1]["why"] == "item"
    assert kinds("list")[:2] == ["kernel", "synchronize"]
    assert kinds("mask") == ["kernel", "kernel", "synchronize"]
    # Becomes masked_fill on a GPU.
    assert kinds("masked assignment") == ["kernel", "kernel"]


def test_the_backward_pass_is_recorded() -> None:
    assert [item["name"] for item in step("forward") if item["is"] == "kernel"] == ["mm", "sum"]
    names = [item["name"] for item in step("backward") if item["is"] == "kernel"]
    assert names.count("mm") == 2


def test_streams_and_events_are_recorded() -> None:
    items = [item for item in step("streams") if item["is"] not in ("free", "allocate")]
    assert [item["is"] for item in items] == [
        *("record", "wait_event", "kernel", "use_stream", "kernel"),
        *("record", "wait_event"),
        *("synchronize", "synchronize", "synchronize"),
    ]
    record, wait, inside, used, with_side, back, wait_back, event, stream, device = items
    side = wait["stream"]
    assert side > 0
    assert record["event"] == wait["event"] == event["event"]
    assert inside["stream"] == used["stream"] == with_side["stream"] == side
    assert back["stream"] == side
    assert "stream" not in wait_back  # the default one
    assert wait_back["event"] == back["event"] != record["event"]
    assert stream["stream"] == side
    assert device["why"] == "device"


def test_memory_is_freed_with_its_last_view() -> None:
    items = step("freeing")
    made = next(item for item in items if item["is"] == "allocate")
    order = [
        item.get("name", "freed")
        for item in items
        if item["is"] == "kernel" or item == {"is": "free", "storage": made["storage"]}
    ]
    assert order == ["mul", "add_", "freed", "add_"]


# ----------------------------------------------------------------------------------------- a run


def actions(stage: int) -> list[tuple[str, int, int]]:
    """What the lists of the run have."""
    pipeline = Pipeline(stages=STAGES, gather_ahead=True, replicas=REPLICAS)
    lists = action_lists(SCHEDULES["pipedream-2bw"], pipeline, [MICROBATCHES] * ITERATIONS)
    return [(action.kind.value, action.batch, action.microbatch) for action in lists[stage]]


def test_the_trace_has_the_actions_of_the_lists(recorded: list[Trace]) -> None:
    for each in recorded:
        begun = [item for item in each.items if isinstance(item, Begin)]
        found = [(item.action, item.batch, item.microbatch) for item in begun]
        assert found == actions(each.stage)
        numbers = [item.number for item in each.items if isinstance(item, Iteration)]
        assert numbers == list(range(ITERATIONS))
        assert (each.stages, each.world) == (STAGES, STAGES * REPLICAS)


def test_all_ranks_of_a_group_enqueue_the_same_collectives(recorded: list[Trace]) -> None:
    by_group: dict[str, list[list[str]]] = {}
    for each in recorded:
        mine: dict[str, list[str]] = {}
        for item in each.items:
            if isinstance(item, Communication) and item.operations[0].name not in ("send", "recv"):
                mine.setdefault(item.group, []).append(item.operations[0].name)
        for group, names in mine.items():
            by_group.setdefault(group, []).append(names)
    assert all(names == of_group[0] for of_group in by_group.values() for names in of_group)
    everything = {name for of_group in by_group.values() for names in of_group for name in names}
    assert {"all_reduce", "reduce_scatter", "all_gather"} <= everything


def test_a_run_has_no_race(recorded: list[Trace]) -> None:
    assert [str(race) for each in recorded for race in find_races(each)] == []


WAITS: dict[str, Callable[[Communication], bool]] = {
    "messages between stages": lambda item: item.operations[0].name in ("send", "recv"),
    "reductions": lambda item: item.operations[0].name == "reduce_scatter",
    "gathers": lambda item: item.operations[0].name == "all_gather",
    "tied embedding": lambda item: (
        item.operations[0].name == "all_reduce" and item.where.endswith("DeferredUpdate.launch")
    ),
}


@pytest.mark.parametrize("which", WAITS)
def test_a_wait_that_is_left_out_is_found(recorded: list[Trace], which: str) -> None:
    found = []
    for each in (recorded[0], recorded[-1]):
        works = {
            item.work
            for item in each.items
            if isinstance(item, Communication) and item.asynchronous and WAITS[which](item)
        }

        def of_these(item: Item, works: set[int] = works) -> bool:
            return isinstance(item, Wait) and item.work in works

        found.append(bool(find_races(drop(each, of_these))))
    # The last stage's gathers are waited for by its next reduction, on the same communicator.
    assert found == [True, which != "gathers"]


@pytest.mark.parametrize(
    "costs",
    [
        Costs(forward=1.0, backward=2.0),
        Costs(forward=[1.0, 1.3], backward=[2.0, 2.2], optimizer=0.5),
    ],
)
def test_the_replayed_run_takes_what_the_list_simulation_takes(
    recorded: list[Trace], costs: Costs
) -> None:
    pipeline = Pipeline(stages=STAGES)
    lists = action_lists(SCHEDULES["pipedream-2bw"], pipeline, [MICROBATCHES] * 8)
    expected = simulate(lists, costs, rendezvous=True)
    state = steady_state(run(recorded, costs, connections=32))
    assert state.time == pytest.approx(expected.iteration_time)
    assert state.ideal == pytest.approx(expected.ideal_time)


def test_host_waits_and_launches_are_counted(recorded: list[Trace]) -> None:
    waits = {(each.stage, each.text): each.number for each in host_waits(recorded)}
    assert waits[STAGES - 1, "item in training_log"] == 1  # the loss of the log line
    counted = {(each.stage, each.text): each.number for each in launches(recorded)}
    assert counted[0, "backward"] > counted[0, "forward"] > counted[0, "complete_update"] > 0


# --------------------------------------------------------------------------------------- the file


ITEMS: tuple[Item, ...] = (
    Iteration(number=0),
    Begin(action="forward", batch=0, microbatch=1, version=2),
    Allocate(storage=1, size=8),
    kernel(reads=[(1, 0, 4)], writes=[(1, 4, 8)]),
    message((0, 1), work=0, send=[1], recv=[1], reads=[1], writes=[2], batched=False),
    collective("reduce", (0, 1), work=1, root=1, label="GROUP", on_host=True),
    Wait(work=0, where="file.py:function"),
    RecordEvent(event=1, stream=3),
    WaitEvent(event=1),
    Synchronize(why="item", stream=0),
    UseStream(storage=1, stream=2),
    HostAccess(name="add", reads=((1, 0, 4),)),
    Free(storage=1),
    End(),
)


def test_a_trace_is_read_as_it_was_written(tmp_path: Path) -> None:
    written = [
        dataclasses.replace(each, streams=("0", "nccl:7")) for each in traces(ITEMS, ITEMS[:3])
    ]
    for each in written:
        write(each, tmp_path)
    assert read_all(tmp_path) == written


def test_broken_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="no rank"):
        read_all(tmp_path)
    path = write(trace(*ITEMS, world=2), tmp_path)
    with pytest.raises(TraceError, match="1 files of a run of 2 ranks"):
        read_all(tmp_path)
    lines = path.read_text().splitlines()
    for text, message_ in (
        ("", "is empty"),
        (lines[0].replace('"format":1', '"format":0'), "another version"),
        (lines[0] + "\nno json", "line 2"),
        (lines[0] + '\n{"is":"unknown"}', "line 2"),
        (lines[0] + '\n{"is":"kernel"}', "line 2"),
    ):
        path.write_text(text)
        with pytest.raises(TraceError, match=message_):
            read(path)


# ------------------------------------------------------------------------------------ the command


def training(*broken: Item) -> list[Item]:
    """Five iterations of one rank."""
    return [
        item
        for batch in range(5)
        for item in (
            Iteration(number=batch),
            *(
                each
                for action in ("forward", "backward")
                for each in (Begin(action=action, batch=batch, microbatch=0), kernel(), End())
            ),
            *broken,
        )
    ]


def test_the_command_prints_the_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(trace(*training(Synchronize(why="item", stream=0, where="a.py:f"))), tmp_path)
    assert main([str(tmp_path), "--forward-ms", "2", "--connections", "1", "32"]) == 0
    output = capsys.readouterr().out
    assert "no race on 1 ranks" in output
    assert "item in f" in output
    for connections in (1, 32):
        line = f"CUDA_DEVICE_MAX_CONNECTIONS={connections}: 4 ms per iteration"
        assert line in output
    assert "1.000 of the ideal 4" in output


def test_the_command_fails_after_a_race_or_a_deadlock(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    racing = kernel("beside", stream=1, writes=[1]), kernel("main", writes=[1])
    write(trace(*training(*racing)), tmp_path / "race")
    assert main([str(tmp_path / "race"), "--most", "1"]) == 1
    output = capsys.readouterr().out
    assert "RACES" in output
    assert "beside writes on stream 1" in output
    assert "and 1 more (--most)" in output
    alone = collective("all_reduce", (0, 1), work=0)
    for each in traces(training(alone), training()):
        write(each, tmp_path / "deadlock")
    assert main([str(tmp_path / "deadlock")]) == 1
    assert "DEADLOCK" in capsys.readouterr().out
    assert main([str(tmp_path / "nothing")]) == 2
    assert "no rank*.jsonl" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main([str(tmp_path / "race"), "--connections", "0"])


# -------------------------------------------------------------------------------------- the flag


def test_the_flag_is_for_cpu_ranks() -> None:
    facts = Facts(megatron_version="0.19.2")
    assert check(argparse.Namespace(log_enqueues="traces", cpu=True), facts) == []
    with pytest.raises(ArgumentError, match=r"--log-enqueues: .* Add --cpu, or drop it"):
        check(argparse.Namespace(log_enqueues="traces"), facts)


def test_the_launcher_reads_the_flag_before_megatron_does() -> None:
    assert directory_in(["--lr", "1", "--log-enqueues", "a", "--bf16"]) == "a"
    assert directory_in(["--log-enqueues=b"]) == "b"
    assert directory_in(["--log-enqueues"]) is None
    assert directory_in(["--lr", "1"]) is None
