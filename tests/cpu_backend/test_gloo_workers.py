"""The end of a rank: its exit code is the script's, and it waits for gloo's worker threads."""

from pathlib import Path
from typing import Any

import pytest

from tests.support.torchrun import run_python

pytestmark = pytest.mark.timeout(300)

# Each case is a job of two forks, which end as an interpreter does. Rank 0 starts an all-reduce
# that it does not wait for, and rank 1 comes late to it. Rank 0's worker has to drop its tensor
# then, but Python's lock is not given away any more, until an object that takes its time to die
# does it.
ENDS = """
import faulthandler, gc, json, os, sys, time
from datetime import timedelta
from pathlib import Path
from megatron_async import cpu_backend
cpu_backend.install()
import torch, torch.distributed as dist
from megatron_async.cpu_backend import gloo_workers

directory = Path(sys.argv[1])

class Dying:
    def __init__(self):
        self.tensor = torch.ones(100)
        self.sleep = time.sleep
    def __del__(self):
        self.sleep(0.5)

dying = Dying()

def start(case, rank):
    log = os.open(directory / f"{case}-{rank}.log", os.O_WRONLY | os.O_CREAT)
    os.dup2(log, 1)
    os.dup2(log, 2)
    store = dist.FileStore(str(directory / f"{case}.store"), 2)
    dist.init_process_group(store=store, rank=rank, world_size=2, timeout=timedelta(minutes=2))
    dying.group = dist.new_group([0, 1])  # Megatron keeps its groups, too.
    dist.all_reduce(torch.ones(1), group=dying.group)

def leave_running(rank):
    if rank == 1:
        time.sleep(0.5)
    dist.all_reduce(dying.tensor, group=dying.group, async_op=True)

def keep_the_lock():
    sys.setswitchinterval(1000)
    end = time.monotonic() + 1.5
    while time.monotonic() < end:
        pass

def left_running(rank):
    leave_running(rank)
    keep_the_lock()

def left_running_and_destroyed(rank):
    leave_running(rank)
    dist.destroy_process_group()
    keep_the_lock()

def exit_code(rank):
    leave_running(rank)
    keep_the_lock()
    sys.exit(3)

def failed(rank):
    gloo_workers.FINISHED_S = 3600.0  # The other one does not wait for that.
    if rank == 1:
        while not (directory / "failed ended").exists():
            time.sleep(0.01)
        return
    leave_running(rank)
    raise ValueError("what went wrong")

def other_rank_died(rank):
    gloo_workers.FINISHED_S = 3600.0
    if rank == 1:
        os._exit(9)
    leave_running(rank)

CASES = (left_running, left_running_and_destroyed, exit_code, failed, other_rank_died)
gc.collect()
gc.freeze()
pids, own = {}, None
for each in [(case, rank) for case in CASES for rank in (0, 1)]:
    pid = os.fork()
    if pid == 0:
        own = each
        break
    pids[pid] = each
if own:
    faulthandler.enable()
    case, rank = own
    start(case.__name__, rank)
    case(rank)
else:
    codes = {case.__name__: [None, None] for case in CASES}
    while pids:
        pid, status = os.wait()
        case, rank = pids.pop(pid)
        codes[case.__name__][rank] = os.waitstatus_to_exitcode(status)
        if rank == 0:
            (directory / f"{case.__name__} ended").touch()
    print(json.dumps(codes))
"""


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("ends")


@pytest.fixture(scope="module")
def codes(directory: Path) -> Any:
    return run_python(ENDS, str(directory))


@pytest.mark.parametrize(
    ("case", "expected"),
    [
        # Without cpu_backend/gloo_workers.py, ranks of the first three end with SIGABRT.
        ("left_running", [0, 0]),
        ("left_running_and_destroyed", [0, 0]),
        ("exit_code", [3, 3]),
        ("failed", [1, 0]),
        ("other_rank_died", [0, 9]),
    ],
)
def test_exit_codes(
    codes: dict[str, list[int]], directory: Path, case: str, expected: list[int]
) -> None:
    log = (directory / f"{case}-0.log").read_text()
    assert codes[case] == expected, log
    assert "terminate called" not in log
    assert log.count("ValueError: what went wrong") == (case == "failed")
