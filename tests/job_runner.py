"""Runs many jobs, one after another, in the ranks of one torchrun launch.

    torchrun --nproc-per-node N tests/job_runner.py JOBS.json

Most of the time of a tiny job goes into imports. Each rank imports torch and Megatron once and
forks a process for every job; the fork runs the package's launcher, as a rank of its own would.
What a job computes is recorded with all its digits: what Megatron's own ``train_step`` and
``evaluate`` return, what is reported of each update, and, from torch's optimizer hooks, the
parameters.

JOBS.json is a list of objects:

- ``directory``: gets ``rank<R>.log``, ``rank<R>.json`` (see :class:`Recorder`), ``rank<R>.pt`` and
  ``rank<R>.code``, the exit code (negative for a signal; null if it did not end by itself).
- ``script``, ``argv``: what to run.
- ``break``: name of a function in :data:`MUTATIONS`, called before the script; or null.
- ``dump``: what to write into ``rank<R>.pt``, see :class:`Recorder`.
"""

import faulthandler
import importlib
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

LIMIT = 180.0
"""Seconds until the process of a job is stopped."""


def _drop(name: str) -> Callable[[], None]:
    def drop() -> None:
        from megatron_async.weights.versions import WeightVersions

        assert callable(getattr(WeightVersions, name))
        setattr(WeightVersions, name, lambda self, side: None)

    return drop


def _keep_cached_shards() -> None:
    from megatron_async.weights.versions import WeightVersions

    original = WeightVersions._repoint_flat_buffers

    def repoint(self: Any, side: int) -> None:
        kept = [group.cached_param_buffer_shard_list for group in self._bucket_groups]
        original(self, side)
        for group, shards in zip(self._bucket_groups, kept, strict=True):
            group.cached_param_buffer_shard_list = shards

    WeightVersions._repoint_flat_buffers = repoint  # type: ignore[method-assign]


MUTATIONS: dict[str, Callable[[], None]] = {
    "parameters": _drop("_repoint_parameters"),
    "flat buffers": _drop("_repoint_flat_buffers"),
    "optimizer's shards": _drop("_repoint_shards"),
    "cached shards": _keep_cached_shards,
}
"""Each leaves out one thing that has to be repointed with the weight version."""


class Recorder:
    """Records a job on one rank.

    ``rank<R>.json`` has:

    - ``losses``: of each iteration, what ``train_step`` returned; on the last stage only.
    - ``reported``: of each iteration, the gradient norm that ``train_step`` returned or null.
    - ``norms``, ``zeros``: of each update of an asynchronous schedule, its iteration (0 is the
      first) and its gradient norm, or the number of zeros in the gradient.
    - ``validation``: [number of iterations done, loss] of each evaluation; on the last stage.

    ``rank<R>.pt`` has what ``dump`` asks for:

    - "trajectory": ``initial`` (name -> tensor) and ``steps``, a list of such, one for each step of
      the torch optimizer, right after it. The optimizer must hold the model's own parameters.
    - "embedding": ``embedding``, the weight that the first and the last stage share, at the end.
    """

    def __init__(self, dump: list[str]) -> None:
        self._dump = dump
        self._model: Any = None
        self.numbers: dict[str, list[Any]] = {
            "losses": [],
            "reported": [],
            "norms": [],
            "zeros": [],
            "validation": [],
        }
        self.tensors: dict[str, Any] = {}

    def install(self) -> None:
        from megatron.training import training

        from megatron_async.runtime.updates import Updates

        train_step, evaluate = training.train_step, training.evaluate
        setup = training.setup_model_and_optimizer

        def recorded_train_step(*args: Any, **kwargs: Any) -> Any:
            result = train_step(*args, **kwargs)
            losses, norm = result[0], result[5]
            if "lm loss" in losses:
                self.numbers["losses"].append(float(losses["lm loss"]))
            self.numbers["reported"].append(None if norm is None else float(norm))
            return result

        def recorded_evaluate(*args: Any, **kwargs: Any) -> Any:
            result = evaluate(*args, **kwargs)
            if result[0] and "lm loss" in result[0]:
                done = len(self.numbers["reported"])
                self.numbers["validation"].append([done, float(result[0]["lm loss"])])
            return result

        def recorded_setup(*args: Any, **kwargs: Any) -> Any:
            result = setup(*args, **kwargs)
            self._model = result[0][0]
            if "trajectory" in self._dump:
                self._record_trajectory()
            return result

        made = Updates._made

        def recorded_made(updates: Any, update: Any) -> None:
            made(updates, update)
            self.numbers["norms"].append([update.iteration - 1, update.grad_norm])
            self.numbers["zeros"].append([update.iteration - 1, update.num_zeros])

        Updates._made = recorded_made  # type: ignore[method-assign]
        training.train_step = recorded_train_step
        training.evaluate = recorded_evaluate
        training.setup_model_and_optimizer = recorded_setup

    def _record_trajectory(self) -> None:
        from torch.optim.optimizer import register_optimizer_step_post_hook

        names = {parameter: name for name, parameter in _named_parameters(self._model)}
        self.tensors["initial"] = {name: p.detach().clone() for p, name in names.items()}
        self.tensors["steps"] = []

        def after_step(optimizer: Any, *_: Any) -> None:
            self.tensors["steps"].append(
                {
                    names[p]: p.detach().clone()
                    for group in optimizer.param_groups
                    for p in group["params"]
                }
            )

        # A global hook: it runs behind those that the package put on the optimizer itself.
        register_optimizer_step_post_hook(after_step)

    def write(self, directory: Path, rank: int) -> None:
        import torch

        if "embedding" in self._dump:
            from megatron.core.utils import get_attr_wrapped_model

            chunk = get_attr_wrapped_model(self._model, "pre_process", return_model_obj=True)
            weight = chunk.shared_embedding_or_output_weight()
            if weight is not None:
                self.tensors["embedding"] = weight.detach().clone()
        if self.tensors:
            torch.save(self.tensors, directory / f"rank{rank}.pt")
        (directory / f"rank{rank}.json").write_text(json.dumps(self.numbers))


def _named_parameters(model: Any) -> list[tuple[str, Any]]:
    """Parameters with the names that they have in a model of one stage."""
    from megatron.core.utils import get_attr_wrapped_model

    chunk = get_attr_wrapped_model(model, "pre_process", return_model_obj=True)
    found = []
    for name, parameter in chunk.named_parameters():
        parts = name.split(".")
        if parts[:2] == ["decoder", "layers"]:
            parts[2] = str(chunk.decoder.layers[int(parts[2])].layer_number - 1)
        found.append((".".join(parts), parameter))
    return found


def _run_job(job: dict[str, Any], number: int, rank: int) -> None:
    import torch.distributed as dist

    # A scratch part of the launch's store for each job.
    store = dist.TCPStore(
        os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False
    )
    init = dist.init_process_group

    def init_process_group(*args: Any, **kwargs: Any) -> Any:
        kwargs["store"] = dist.PrefixStore(f"job{number}", store)
        kwargs |= {"rank": rank, "world_size": int(os.environ["WORLD_SIZE"])}
        return init(*args, **kwargs)

    dist.init_process_group = init_process_group
    directory = Path(job["directory"])
    recorder = Recorder(job["dump"])
    recorder.install()
    if job["break"] is not None:
        MUTATIONS[job["break"]]()

    from megatron_async.__main__ import main

    try:
        main(["--cpu", job["script"], *job["argv"]])
    except SystemExit as end:
        if end.code not in (None, 0):
            raise
    recorder.write(directory, rank)


def _forked(job: dict[str, Any], number: int, rank: int) -> None:
    log = os.open(Path(job["directory"]) / f"rank{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    code = 1
    try:
        faulthandler.enable()
        faulthandler.register(signal.SIGUSR1, all_threads=True)
        _run_job(job, number, rank)
        code = 0
    except SystemExit as end:
        traceback.print_exc()
        code = end.code if isinstance(end.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        # Checkpoints leave a process behind, which a normal exit would end.
        for child in psutil.Process().children(recursive=True):
            child.kill()
        os._exit(code)


def _wait(pid: int) -> int | None:
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

    from megatron_async import cpu_backend

    cpu_backend.install()
    # What a job imports takes longer than what it does. Nothing here may start a thread.
    for module in (
        "torch._dynamo",
        "megatron.training.training",
        "megatron.core.datasets.helpers_cpp",
        "megatron.core.models.mimo",
        "megatron.core.tokenizers.text.text_tokenizer",
        "megatron_async.checkpoint.session",
        "megatron_async.hooks",
        "megatron_async.scripts.pretrain_gpt",
        "megatron_async.config.startup",
    ):
        importlib.import_module(module)

    for number, job in enumerate(jobs):
        pid = os.fork()
        if pid == 0:
            _forked(job, number, rank)
        code = _wait(pid)
        (Path(job["directory"]) / f"rank{rank}.code").write_text(json.dumps(code))


if __name__ == "__main__":
    main()
