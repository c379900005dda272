"""The ranks of :func:`tests.support.forked.run_forked`: many jobs, one after another.

    torchrun --nproc-per-node N -m tests.support.forked_ranks JOBS.json

Each rank imports torch and Megatron once and forks a process for every job; the fork runs the
package's launcher and ends, as a rank of its own would.

JOBS.json is a list of objects:

- ``directory``: gets ``rank<R>.log``, ``rank<R>.json`` and ``rank<R>.pt`` (see
  :class:`~tests.support.recorder.Recorder`) and ``rank<R>.code``, the exit code (negative for a
  signal; null if it did not end by itself).
- ``script``, ``argv``: what to run.
- ``dump``: what to write into ``rank<R>.pt``.
"""

import faulthandler
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import psutil

from megatron_async.study.fork_host import import_once
from tests.support.fork import fork
from tests.support.recorder import Recorder

LIMIT = 180.0
"""Seconds until the process of a job is stopped."""


def run_job(job: dict[str, Any], number: int, rank: int) -> None:
    import torch.distributed as dist
    from torch._C._distributed_c10d import PrefixStore, TCPStore

    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    # A scratch part of the launch's store for each job.
    store = TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    init = dist.init_process_group

    def init_process_group(*args: Any, **kwargs: Any) -> Any:
        kwargs["store"] = PrefixStore(f"job{number}", store)
        kwargs |= {"rank": rank, "world_size": int(os.environ["WORLD_SIZE"])}
        return init(*args, **kwargs)

    dist.init_process_group = init_process_group
    recorder = Recorder(job["dump"])
    recorder.install()

    from megatron_async.__main__ import main

    try:
        main(["--cpu", job["script"], *job["argv"]])
    except SystemExit as end:
        if end.code not in (None, 0):
            raise
    recorder.write(Path(job["directory"]), rank)


def wait(pid: int) -> int | None:
    """Return the exit code of a job's process, None if it had to be stopped."""
    stop = time.monotonic() + LIMIT
    while True:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() > stop:
            os.kill(pid, signal.SIGUSR1)  # prints its stacks
            time.sleep(0.5)
            for process in (*psutil.Process(pid).children(recursive=True), psutil.Process(pid)):
                process.kill()
            os.waitpid(pid, 0)
            return None
        time.sleep(0.01)


def main() -> None:
    jobs = json.loads(Path(sys.argv[1]).read_text())
    rank = int(os.environ["RANK"])
    import_once()
    for number, job in enumerate(jobs):
        directory = Path(job["directory"])

        def work(job: dict[str, Any] = job, number: int = number) -> None:
            run_job(job, number, rank)

        code = wait(fork(work, log=directory / f"rank{rank}.log"))
        (directory / f"rank{rank}.code").write_text(json.dumps(code))


if __name__ == "__main__":
    main()
