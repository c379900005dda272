"""Looks at the model wherever a training script might, while parameters are gathered late.

To be installed in a job's processes ahead of its training script (``Step.prelude``). A gather in
flight has NaN in the place of what other ranks send, until it is waited for: the slowest that a
network can be, and the same in each run.
"""

import hashlib
import json
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

__all__ = ["Seen", "install", "prelude", "read"]


class Seen(NamedTuple):
    """What one rank saw. An iteration (1 is the first) is the one that is running or, between two,
    the last one."""

    complete: dict[str, dict[int, bool]]
    """Place -> iteration -> whether no weight that was looked at was NaN."""
    weights: dict[str, dict[int, str]]
    """Place -> iteration -> hash of all weights of the stage, where all are looked at at once."""
    hidden: dict[int, int]
    """Weight version -> number of forwards and backwards of microbatches between the start of its
    gather and the wait for it."""


def prelude(directory: Path, name: str, *, late: bool) -> str:
    """Return the code that installs it in a job.

    Args:
        directory: where each rank writes what it saw.
        name: of the job.
        late: whether gathers are late. Otherwise each iteration's update is completed at once, and
            the version that it makes is looked at as "settled".
    """
    place = str(directory / name)
    return f"from tests.support.late_gathers import install\ninstall({place!r}, late={late})"


def read(directory: Path, name: str, *, ranks: int) -> list[Seen]:
    """Return what each rank saw.

    Raises:
        FileNotFoundError: a rank did not come to the end of its training, or to an evaluation.
    """
    files = [directory / f"{name}-{rank}.json" for rank in range(ranks)]
    return [Seen(*_with_numbers(json.loads(file.read_text()))) for file in files]


def _with_numbers(value: Any) -> Any:
    """JSON has no numbers as keys."""
    if isinstance(value, list):
        return [_with_numbers(one) for one in value]
    if isinstance(value, dict):
        return {int(k) if k.isdigit() else k: _with_numbers(one) for k, one in value.items()}
    return value


class _Late:
    """A gather whose data arrives when it is waited for."""

    def __init__(self, pieces: list[tuple[Any, Any]], arrived: Callable[[], None]) -> None:
        self._pieces = pieces
        self._arrived = arrived

    def wait(self) -> None:
        for piece, data in self._pieces:
            piece.copy_(data)
        self._arrived()


class _Watch:
    """What looks at one rank's model."""

    def __init__(self, place: str) -> None:
        self._place = place
        self._model: Any = None
        self._computed = 0
        self._seen = Seen(defaultdict(dict), defaultdict(dict), {})

    def write(self) -> None:
        import torch.distributed as dist

        Path(f"{self._place}-{dist.get_rank()}.json").write_text(json.dumps(self._seen))

    def look(self, place: str, parameters: list[Any] | None = None) -> None:
        """Look at the whole model, or at some of its parameters."""
        from megatron.training import get_args

        iteration = get_args().curr_iteration + 1
        if self._computed == 0:
            iteration = 0  # The initial weights.
        whole = parameters is None
        looked_at = self._model.parameters() if parameters is None else parameters
        tensors = [p.data for p in looked_at]
        complete = all(bool(tensor.isfinite().all()) for tensor in tensors)
        before = self._seen.complete[place].get(iteration, True)
        self._seen.complete[place][iteration] = complete and before
        if whole:
            digest = hashlib.sha1()
            for tensor in tensors:
                digest.update(tensor.float().numpy().tobytes())
            self._seen.weights[place][iteration] = digest.hexdigest()

    def hook_model(self, model: Any) -> None:
        """Look from hooks on its modules and on its gradients."""
        self._model = model
        for module in model.modules():
            own = list(module.parameters(recurse=False))
            if own:
                module.register_forward_pre_hook(self._forward_hook(own))
        for parameter in model.parameters():
            parameter.register_hook(self._backward_hook(parameter))

    def _forward_hook(self, parameters: list[Any]) -> Any:
        def hook(module: Any, *_: Any) -> None:
            place = "forward hook" if module.training else "evaluation"
            self.look(place, parameters)

        return hook

    def _backward_hook(self, parameter: Any) -> Any:
        def hook(gradient: Any) -> None:
            self.look("backward hook", [parameter])

        return hook

    def after(self, function: Any, place: str) -> Any:
        """Look when ``function`` returns."""

        def looked_at(*args: Any, **kwargs: Any) -> Any:
            result = function(*args, **kwargs)
            self.look(place)
            return result

        return looked_at

    def before(self, function: Any, place: str) -> Any:
        """Look when ``function`` is called."""

        def looked_at(*args: Any, **kwargs: Any) -> Any:
            self.look(place)
            return function(*args, **kwargs)

        return looked_at

    def counted(self, function: Any) -> Any:
        """Count the calls of what computes a microbatch."""

        def step(*args: Any, **kwargs: Any) -> Any:
            self._computed += 1
            return function(*args, **kwargs)

        return step

    def late(self, start: Any) -> Any:
        """Make the gathers late that ``start`` starts."""

        def start_param_sync(group: Any, force_sync: bool = False) -> None:
            start(group, force_sync=force_sync)
            if group.param_gather_handle is None:
                return
            group.param_gather_handle.wait()
            group.param_gather_handle = self._late([group])

        return start_param_sync

    def late_together(self, start: Any) -> Any:
        """The same for what starts all gathers of a version at once."""

        def start_param_gathers(model_chunk: Any) -> list[Any]:
            from megatron_async.megatron.data_parallel import bucket_groups

            for work in start(model_chunk):
                work.wait()
            return [self._late(bucket_groups(model_chunk))]

        return start_param_gathers

    def _late(self, groups: Sequence[Any]) -> _Late:
        """Hide what other ranks have sent for some bucket groups."""
        from megatron.core.distributed.param_and_grad_buffer import shard_buffer

        from megatron_async.runtime.run import run

        pieces = [
            (piece, piece.clone())
            for group in groups
            for bucket in group.buckets
            for rank, piece in enumerate(
                shard_buffer(bucket.param_data, group.intra_distributed_optimizer_instance_size)
            )
            if rank != group.intra_distributed_optimizer_instance_rank
        ]
        for piece, _ in pieces:
            piece.fill_(float("nan"))
        assert run.engine is not None
        version, before = run.engine.weights.newest, self._computed

        def arrived() -> None:
            self._seen.hidden[version] = self._computed - before

        return _Late(pieces, arrived)


def _settled(train_step: Any) -> Any:
    def settled_step(*args: Any, **kwargs: Any) -> Any:
        from megatron_async.runtime.run import run

        result = train_step(*args, **kwargs)
        assert run.engine is not None
        run.engine.settle()
        return result

    return settled_step


def install(place: str, *, late: bool) -> None:
    """Look at the model of this process, and make its gathers late.

    Args:
        place: what the names of the ranks' files begin with.
        late: see :func:`prelude`.
    """
    from megatron.core.distributed import param_and_grad_buffer
    from megatron.core.pipeline_parallel import schedules
    from megatron.training import training

    from megatron_async.megatron.data_parallel import start_param_gathers
    from megatron_async.runtime import updates

    watch = _Watch(place)
    setup, train = training.setup_model_and_optimizer, training.train
    evaluate = training.evaluate_and_print_results

    def watched_setup(*args: Any, **kwargs: Any) -> Any:
        result = setup(*args, **kwargs)
        watch.hook_model(result[0][0])
        return result

    def watched_train(*args: Any, **kwargs: Any) -> Any:
        watch.look("settled")
        result = train(*args, **kwargs)
        watch.look("end of training")
        watch.write()
        return result

    def watched_evaluation(*args: Any, **kwargs: Any) -> Any:
        # What a training script may pass to Megatron's pretrain().
        kwargs["non_loss_data_func"] = lambda model: watch.look("non-loss data")
        evaluate(*args, **kwargs)
        watch.write()

    training.setup_model_and_optimizer = watched_setup
    training.train = watched_train
    training.evaluate_and_print_results = watched_evaluation
    for name, seen in (
        ("train_step", "after the step"),
        ("training_log", "log"),
        ("calc_params_l2_norm", "norm"),
        ("check_param_hashes_across_dp_replicas", "hashes"),
        ("post_training_step_callbacks", "callbacks"),
        ("save_checkpoint", "save"),
    ):
        setattr(training, name, watch.after(getattr(training, name), seen))
    training.finalize_model_grads = watch.before(training.finalize_model_grads, "finalization")
    schedules.forward_step = watch.counted(schedules.forward_step)
    schedules.backward_step = watch.counted(schedules.backward_step)
    if not late:
        training.train_step = watch.after(_settled(training.train_step), "settled")
    else:
        groups = param_and_grad_buffer._ParamAndGradBucketGroup
        groups.start_param_sync = watch.late(groups.start_param_sync)
        name = start_param_gathers.__name__
        setattr(updates, name, watch.late_together(start_param_gathers))
