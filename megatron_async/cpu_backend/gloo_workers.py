"""Lets gloo's worker threads finish while there still is an interpreter.

A worker tells those who wait for a collective first and drops its tensors then
(``ProcessGroupGloo::runLoop`` in torch 2.14). To drop one that Python knows, it takes Python's lock
(``ConcretePyInterpreterVTable::decref``). If the main thread comes to the end of the script first
and does not give the lock away any more, the worker still waits for it when the interpreter begins
to end. Python before 3.14 then ends the waiting thread (``PyThread_exit_thread``), which unwinds
its stack through a C++ destructor: "terminate called without an active exception", SIGABRT. All is
computed and saved by then, but the job counts as failed.

``destroy_process_group`` does not prevent it: gloo's workers are only joined when nobody refers to
their group any more, and Megatron's modules do. NCCL has no such threads: its watchdog leaves the
tensors to the main thread (``ProcessGroupNCCL::shelvesToUnstash_``).
"""

import atexit
import ctypes
import os
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist

__all__ = ["drain", "drain_at_exit"]

FINISHED_S = 60.0
"""Seconds to wait for collectives that the script did not wait for: other ranks may come late."""
FAILED_S = 1.0
"""The same with an exception under way: the other ranks may be waiting for this one to end."""


def drain() -> None:
    """Wait until no worker of this process holds a tensor.

    Nothing is communicated, so it does not matter what the other ranks do. Collectives that are
    still running are waited for, within limits. Errors are left out: who needs a collective's
    result has waited for it.
    """
    failed = hasattr(sys, "last_exc") or sys.exception() is not None
    deadline = time.monotonic() + (FAILED_S if failed else FINISHED_S)
    works = []
    for group in list(dist.distributed_c10d._world.pg_map):
        try:
            # Of nothing: gloo returns without asking the other ranks. The group's one worker gets
            # to this when it has dropped the tensors of everything before.
            works.append(group.allreduce([torch.empty(0)]))
        except RuntimeError:
            continue  # The group is broken.
    # The worker drops these as well, and nothing happens as long as it is not the last to do so.
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(works))
    for work in works:
        seconds = max(deadline - time.monotonic(), 0.001)  # 0 would mean for ever
        try:
            work.wait(timedelta(seconds=seconds))
        except RuntimeError:
            continue  # Too late, or the connection to another rank is gone.


def drain_at_exit() -> None:
    """Let this process drain before its interpreter begins to end; it does not change how."""
    process = os.getpid()

    def end() -> None:
        # Threads do not live on in a fork.
        if os.getpid() == process and dist.is_initialized():
            drain()

    atexit.register(end)
