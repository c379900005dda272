"""Signals and faults under a real torchrun: what it passes on, what it ends, and its exit code.

pytest -m slow tests/slow/test_torchrun.py
"""

import re
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil
import pytest

from tests.support.gpt import ASYNC, PRETRAIN_GPT, Value, gpt_args
from tests.support.output import RunResult, read_scalars
from tests.support.preludes import UNREADABLE, killed, poisoned
from tests.support.steps import COMMON_FLAGS, tracked
from tests.support.torchrun import run_torchrun, wait_for_iteration

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

ITERATIONS = 400
"""A run has far more than it gets to before a signal."""
PASS_ON = ("--signals-to-handle", "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1,SIGUSR2")
PLUGIN = ("-m", "megatron_async", "--cpu")

# As UNREADABLE, in a worker, which reads ahead and does not know the iteration.
_UNREADABLE_IN_WORKER = """
from megatron.core.datasets.gpt_dataset import GPTDataset
from megatron.training import get_args
get = GPTDataset.__getitem__
reads = 0
def unreadable(self, index):
    global reads
    reads += 1
    if reads == 36 and get_args().rank == 0:
        raise OSError("the file system went away")
    return get(self, index)
GPTDataset.__getitem__ = unreadable
"""

type During = Callable[[subprocess.Popen[str], Path], None]


def flags(folder: Path, **more: Value) -> list[str]:
    found: dict[str, Value] = {
        **COMMON_FLAGS,
        "pipeline_model_parallel_size": 2,
        "train_iters": ITERATIONS,
        "ckpt_format": "torch",
        "save": folder / "checkpoints",
        "save_interval": ITERATIONS,
        "tensorboard_dir": folder / "tensorboard",
        "tensorboard_log_interval": 1,
        **more,
    }
    return gpt_args(**found)


def losses(folder: Path) -> dict[int, float]:
    return read_scalars(folder / "tensorboard")["lm loss"]


def send(number: signal.Signals, *, to_ranks: bool = False) -> During:
    """Send a signal once three iterations are done."""

    def during(torchrun: subprocess.Popen[str], logs: Path) -> None:
        wait_for_iteration(logs, rank=1, number=3)
        if not to_ranks:
            torchrun.send_signal(number)
            return
        for rank in psutil.Process(torchrun.pid).children():
            rank.send_signal(number)

    return during


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    folder = tmp_path_factory.mktemp("uninterrupted")
    argv = flags(folder, **ASYNC, save=None, save_interval=None, exit_interval=40)
    run_torchrun(2, argv, launcher="plugin")
    return losses(folder)


@pytest.mark.parametrize("name", ["SIGTERM", "SIGUSR1", "SIGUSR2"])
@pytest.mark.parametrize("to_ranks", [False, True], ids=["torchrun", "ranks"])
def test_a_signal_stops_a_run_that_goes_on_to_the_last_digit(
    tmp_path: Path, uninterrupted: dict[int, float], name: str, to_ranks: bool
) -> None:
    handled: dict[str, Value] = {"exit_signal_handler": True, "exit_signal": name}
    result = run_torchrun(
        2,
        flags(tmp_path, **ASYNC, **handled),
        launcher=(*PASS_ON, *PLUGIN),
        check=False,
        during=send(signal.Signals[name], to_ranks=to_ranks),
    )
    assert result.returncode == (0 if to_ranks else 1), result.describe()
    assert result.crashed == [], result.describe()
    done = result.iterations[-1].number
    assert 3 <= done < 38
    assert tracked(tmp_path / "checkpoints") == done
    assert losses(tmp_path) == {i: uninterrupted[i] for i in range(1, done + 1)}
    resumed = flags(tmp_path, **ASYNC, load=tmp_path / "checkpoints", exit_interval=40)
    run_torchrun(2, resumed, launcher="plugin")
    assert losses(tmp_path) == uninterrupted


@pytest.mark.parametrize("to_ranks", [False, True], ids=["torchrun", "ranks"])
def test_exit_codes_are_those_of_megatron(tmp_path: Path, to_ranks: bool) -> None:
    codes = {}
    for kind, launcher in (("plain", "plain"), ("asynchronous", "plugin")):
        more = ASYNC if kind == "asynchronous" else {}
        result = run_torchrun(
            2,
            flags(tmp_path / kind, **more, exit_signal_handler=True),
            launcher=launcher,
            check=False,
            during=send(signal.SIGTERM, to_ranks=to_ranks),
        )
        codes[kind] = result.returncode
        assert result.crashed == [], result.describe()
        assert tracked(tmp_path / kind / "checkpoints") >= 3
    assert codes["asynchronous"] == codes["plain"] is not None


def test_ranks_end_that_read_with_workers(tmp_path: Path) -> None:
    """Workers of a data loader do not end at SIGTERM with --exit-signal-handler, so they have to
    be let go before the interpreter waits for them."""
    argv = flags(tmp_path, **ASYNC, exit_signal_handler=True, num_workers=2, train_iters=3)
    assert run_torchrun(2, argv, launcher="plugin").iterations[-1].number == 3


def test_without_signals_to_handle_torchrun_leaves_its_ranks_behind(tmp_path: Path) -> None:
    """What docs/checkpoints.md warns of: SIGUSR1 ends torchrun, and nobody tells the ranks."""
    left: list[int] = []

    def during(torchrun: subprocess.Popen[str], logs: Path) -> None:
        wait_for_iteration(logs, rank=1, number=3)
        ranks = psutil.Process(torchrun.pid).children()
        try:
            torchrun.send_signal(signal.SIGUSR1)
            torchrun.wait(30)
            time.sleep(3)
            left.extend(rank.pid for rank in ranks if rank.is_running())
        finally:
            for rank in ranks:
                for process in (*rank.children(recursive=True), rank):
                    process.kill()

    handled: dict[str, Value] = {"exit_signal_handler": True, "exit_signal": "SIGUSR1"}
    argv = flags(tmp_path, **ASYNC, **handled)
    result = run_torchrun(2, argv, launcher="plugin", check=False, during=during)
    assert result.returncode == -signal.SIGUSR1
    assert len(left) == 2
    assert not (tmp_path / "checkpoints" / "latest_checkpointed_iteration.txt").exists()


def test_torchrun_kills_ranks_that_need_longer_than_its_time_out(tmp_path: Path) -> None:
    """As docs/checkpoints.md says of --shutdown-timeout; the last checkpoint stays whole."""
    script = tmp_path / "script.py"
    slow = (
        "import time\n"
        "from megatron.training import get_args, training\n"
        "save = training.save_checkpoint\n"
        "def slow(iteration, *args, **kwargs):\n"
        "    time.sleep(30 if iteration != 2 else 0)\n"
        "    return save(iteration, *args, **kwargs)\n"
        "training.save_checkpoint = slow\n"
    )
    script.write_text(slow + PRETRAIN_GPT.read_text())
    argv = flags(tmp_path, **ASYNC, save_interval=2, exit_signal_handler=True)

    def during(torchrun: subprocess.Popen[str], logs: Path) -> None:
        wait_for_iteration(logs, rank=1, number=3)
        torchrun.send_signal(signal.SIGTERM)

    result = run_torchrun(
        2,
        argv,
        launcher=("--shutdown-timeout", "5", *PLUGIN),
        script=script,
        check=False,
        during=during,
    )
    assert result.returncode == 1
    assert "forcefully exiting via" in result.launcher_output
    assert tracked(tmp_path / "checkpoints") == 2


def fail(
    tmp_path: Path, prelude: str, *, handled: bool = False, more: Sequence[str] = ()
) -> RunResult:
    """Run a job that fails in iteration 4; check that it ends, and that it can be resumed."""
    script = tmp_path / "script.py"
    script.write_text(f"{prelude}\n{PRETRAIN_GPT.read_text()}")
    argv = flags(tmp_path, **ASYNC, save_interval=3, exit_signal_handler=handled)
    result = run_torchrun(2, [*argv, *more], launcher="plugin", script=script, check=False)
    assert result.returncode == 1, result.describe()
    assert tracked(tmp_path / "checkpoints") == 3
    resumed = flags(tmp_path, **ASYNC, load=tmp_path / "checkpoints", exit_interval=6)
    run_torchrun(2, resumed, launcher="plugin")
    return result


@pytest.mark.parametrize("handled", [False, True], ids=["default", "exit-signal-handler"])
def test_a_killed_rank_ends_the_job(tmp_path: Path, handled: bool) -> None:
    result = fail(tmp_path, killed(iteration=4), handled=handled)
    assert re.search(r"rank +: 1 .*\n.*exitcode +: -9", result.launcher_output)


def test_a_gradient_that_is_not_a_number_ends_the_job(tmp_path: Path) -> None:
    result = fail(tmp_path, poisoned(1, "nan"))
    assert "RuntimeError: Rank 1, " in result.ranks[1].stderr


def test_an_error_ends_a_job_that_reads_with_workers(tmp_path: Path) -> None:
    """Its traceback holds the data loader, whose workers do not end at SIGTERM."""
    result = fail(tmp_path, poisoned(1, "nan"), handled=True, more=("--num-workers", "2"))
    assert "the gradient norm is nan" in result.ranks[1].stderr


@pytest.mark.parametrize("workers", ["0", "1"])
def test_a_data_loader_that_raises_ends_the_job(tmp_path: Path, workers: str) -> None:
    prelude = UNREADABLE if workers == "0" else _UNREADABLE_IN_WORKER
    result = fail(tmp_path, prelude, more=("--num-workers", workers))
    assert "OSError: the file system went away" in result.ranks[0].stderr
