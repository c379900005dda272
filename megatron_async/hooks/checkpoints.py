"""Megatron's checkpoints: what is saved and loaded beside its own state."""

import functools
from collections.abc import Callable
from typing import Any

from megatron_async.hooks.row import TRAINING, hook, row
from megatron_async.megatron import releases

__all__ = [
    "ROWS",
    "generate_state_dict",
    "get_rng_state",
    "load_base_checkpoint",
    "load_checkpoint",
    "open_whole_tracker_file",
    "read_metadata",
    "save_checkpoint",
    "whole_tracker_file",
]

_CHECKPOINTING = "megatron.training.checkpointing"


def _session(name: str) -> Callable[[Any], Any]:
    """Let a function of our session stand in; it is called with the original first."""

    def make(original: Any) -> Any:
        @functools.wraps(original)
        def replacement(*args: Any, **kwargs: Any) -> Any:
            from megatron_async.checkpoint import session
            from megatron_async.runtime.run import run

            with run.paused():
                return getattr(session, name)(original, *args, **kwargs)

        return replacement

    make.__name__ = make.__qualname__ = name
    return hook(make)


save_checkpoint = _session("save_checkpoint")
load_checkpoint = _session("load_checkpoint")
load_base_checkpoint = _session("load_base_checkpoint")
read_metadata = _session("read_metadata")
generate_state_dict = _session("generate_state_dict")
get_rng_state = _session("get_rng_state")


class _WholeTrackerFile:
    """Megatron's file functions, but the file that names the latest checkpoint changes at once."""

    def __init__(self, original: Any) -> None:
        self._original = original

    def __getattr__(self, name: str) -> Any:
        return getattr(self._original, name)

    def open(self, *args: Any, **kwargs: Any) -> Any:
        from megatron_async.checkpoint.files import open_file

        return open_file(self._original.open, *args, **kwargs)


@hook
def whole_tracker_file(original: Any) -> Any:
    return _WholeTrackerFile(original)


@hook
def open_whole_tracker_file(original: Any) -> Any:
    @functools.wraps(original)
    def open_file(*args: Any, **kwargs: Any) -> Any:
        from megatron_async.checkpoint import files

        return files.open_file(original, *args, **kwargs)

    return open_file


_KILLED = "a job killed while the tracker file is written can be resumed"


ROWS = (
    *(
        row(
            module,
            "save_checkpoint",
            save_checkpoint,
            "the launched update is completed before anything is written",
        )
        for module in (_CHECKPOINTING, TRAINING)
    ),
    *(
        row(
            module,
            "load_checkpoint",
            load_checkpoint,
            "the schedule goes on where the checkpoint was saved",
        )
        for module in (_CHECKPOINTING, TRAINING)
    ),
    row(
        _CHECKPOINTING,
        "_load_base_checkpoint",
        load_base_checkpoint,
        "what a checkpoint holds is known before the model and the optimizer are loaded",
    ),
    row(
        _CHECKPOINTING,
        "read_metadata",
        read_metadata,
        "--ckpt-step does not reach the distributed optimizer's state in a torch checkpoint, and "
        "loses to a later non-persistent checkpoint",
    ),
    row(
        _CHECKPOINTING,
        "generate_state_dict",
        generate_state_dict,
        "the previous weight version and the counters are saved, too",
    ),
    row(
        _CHECKPOINTING,
        "get_rng_state",
        get_rng_state,
        "stages that have forwarded microbatches ahead save the random state from before them",
    ),
    row(
        _CHECKPOINTING,
        "maybe_msc",
        whole_tracker_file,
        _KILLED,
        versions=releases.since("0.19"),
    ),
    row(
        _CHECKPOINTING,
        "open_file",
        open_whole_tracker_file,
        _KILLED,
        versions=releases.before("0.19"),
    ),
)
