"""What an asynchronous run adds to Megatron's checkpoints, and how it is resumed from them.

A checkpoint saved after batch k holds Megatron's usual state at the newest version, k + 1, and

- the weights of version k, on which batch k + 1 runs,
- the buffers of the delay correction, in the state of the torch optimizers, or beside it in the
  torch format,
- each stage's random state from before its first forward of batch k + 1, in the place where
  Megatron keeps the random state; microbatches in flight are dropped and forwarded again,
- counters, as plain data.

So it is an ordinary checkpoint of version k + 1 to a Megatron without this package, and a resumed
run computes what the uninterrupted one does, to the last bit. With PipeDream it holds the newest
version and the counters alone, and a resumed run starts afresh from that. The functions here stand
in for those of megatron/training/checkpointing.py that have their names; the hooks call them with
the original.
"""

import argparse
import contextlib
import inspect
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from megatron.training import checkpointing as megatron_checkpointing
from megatron.training import get_args, print_rank_0

from megatron_async.checkpoint.buffers import BUFFERS, put_back, take_out
from megatron_async.checkpoint.files import (
    keep_helper_from_exit_signal,
    read_errors,
    save_directory,
    write_errors,
)
from megatron_async.checkpoint.state import STATE, leaving_text, packed, unpacked
from megatron_async.checkpoint.weights import (
    PREVIOUS,
    check_experts,
    check_parameters,
    named_weights,
    previous_weights,
)
from megatron_async.config.settings import AsyncConfig
from megatron_async.corrections.base import correction_of, drop_buffers
from megatron_async.megatron.optimizers import inner_optimizers
from megatron_async.runtime import exit_flags, random_state
from megatron_async.runtime.engine import Engine
from megatron_async.runtime.run import run

__all__ = [
    "generate_state_dict",
    "get_rng_state",
    "load_base_checkpoint",
    "load_checkpoint",
    "read_metadata",
    "save_checkpoint",
]

# What stands in for Megatron's functions


def save_checkpoint(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Complete the update of the last iteration, then save.

    Raises:
        RuntimeError: the update's gradient norm is not finite, and nothing is written; or the
            checkpoint cannot be written.
    """
    running = run.engine
    if running is None:
        return original(*args, **kwargs)
    settings = get_args()
    call = inspect.signature(original).bind(*args, **kwargs).arguments
    directory = save_directory(settings, non_persistent=call.get("non_persistent_ckpt", False))
    with exit_flags.as_given(settings):
        keep_helper_from_exit_signal()
        if not running.asynchronous_now:
            with write_errors(directory, call["iteration"]):
                return original(*args, **kwargs)
        running.settle()
        with _as_session(_Saving(running)), write_errors(directory, call["iteration"]):
            return original(*args, **kwargs)


def load_checkpoint(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Load, then make the engine go on where the checkpoint was saved.

    Raises:
        RuntimeError: the checkpoint cannot be read, or another version of this package wrote its
            asynchronous state.
    """
    call = inspect.signature(original).bind(*args, **kwargs).arguments
    running = run.engine
    optimizer = call["optimizer"]
    settings = get_args()
    with contextlib.ExitStack() as stack:
        stack.callback(setattr, run, "chosen_checkpoint", None)
        if AsyncConfig.from_args(settings).asynchronous:
            directory = _load_directory(settings, call.get("load_arg", "load"))
            stack.enter_context(read_errors(directory, settings, files_read=True))
        if optimizer is None or (running is not None and optimizer is not running.optimizer):
            return original(*args, **kwargs)
        loading = _Loading(running, optimizer)
        stack.enter_context(_as_session(loading))
        if running is not None:
            # The distributed optimizer copies into views of fp32 model parameters, in some formats
            # outside of Megatron's own no_grad.
            stack.enter_context(torch.no_grad())
        result = original(*args, **kwargs)
    loading.finish(iteration=result[0])
    return result


def _load_directory(args: argparse.Namespace, load_arg: str) -> str | None:
    """Where Megatron loads from, as in its ``load_checkpoint``."""
    directory: str | None = getattr(args, load_arg)
    pretrained: str | None = getattr(args, "pretrained_checkpoint", None)
    if pretrained is not None and not megatron_checkpointing.checkpoint_exists(directory):
        return pretrained
    return directory


def load_base_checkpoint(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Read the state dict, and see what it holds of ours before anything is made of it.

    Megatron also reads it for --use-checkpoint-args, before the arguments are known to all, and
    without an optimizer (--skip-train).

    Raises:
        RuntimeError: an asynchronous run cannot read the checkpoint, or the torch checkpoint is of
            another model or layout.
    """
    call = inspect.signature(original).bind(*args, **kwargs).arguments
    directory, settings = call["load_dir"], call["args"]
    if AsyncConfig.from_args(settings).asynchronous:
        step = getattr(settings, "ckpt_step", None)
        if step and directory is not None:
            tracker = megatron_checkpointing.get_checkpoint_tracker_filename(directory)
            run.chosen_checkpoint = Path(tracker), step
        with read_errors(directory, settings):
            state_dict, name, release, kind = original(*args, **kwargs)
    else:
        state_dict, name, release, kind = original(*args, **kwargs)
    if isinstance(run.checkpoint, _Loading) and state_dict is not None:
        run.checkpoint.found(state_dict, directory=directory, release=release)
        legacy = kind is megatron_checkpointing.CheckpointType.LEGACY
        if not legacy and run.checkpoint.running is not None:
            check_experts(settings, state_dict.get("args"), directory)
        # With rank0 it is the first stage's file, on all ranks.
        own = legacy and not call.get("rank0", False)
        if own:
            run.checkpoint.place_buffers(state_dict)
        if own and run.checkpoint.running is not None and not settings.finetune:
            check_parameters(run.checkpoint.running, state_dict.get("model", {}), directory)
    return state_dict, name, release, kind


def read_metadata(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Read which checkpoint is the latest; while loading, heed --ckpt-step.

    For the state of the distributed optimizer in a torch checkpoint Megatron looks it up once more,
    and would load the latest one's; and it prefers a later checkpoint of
    --non-persistent-ckpt-type. The file is not read: it may be broken, or missing.
    """
    if run.chosen_checkpoint is None:
        return original(*args, **kwargs)
    [file] = inspect.signature(original).bind(*args, **kwargs).args
    tracker, step = run.chosen_checkpoint
    return (step if Path(file) == tracker else -1), False


def generate_state_dict(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Add our entries to what is saved, or to what a torch_dist checkpoint is asked for."""
    state_dict = original(*args, **kwargs)
    if run.checkpoint is not None:
        call = inspect.signature(original).bind(*args, **kwargs).arguments
        metadata = (call.get("model_sd_kwargs") or {}).get("metadata")
        run.checkpoint.extend(
            state_dict, sharded=call["args"].ckpt_format == "torch_dist", metadata=metadata
        )
    return state_dict


def get_rng_state(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """While saving, the random state that the next batch has to start from."""
    if not isinstance(run.checkpoint, _Saving):
        return original(*args, **kwargs)
    with random_state.rewound(run.checkpoint.running.next_batch_random_state):
        return original(*args, **kwargs)


@contextlib.contextmanager
def _as_session(session: "_Saving | _Loading") -> Iterator[None]:
    run.checkpoint = session
    try:
        yield
    finally:
        run.checkpoint = None


# Saving


class _Saving:
    """A save of an asynchronous run, its newest version complete."""

    def __init__(self, running: Engine) -> None:
        self.running = running

    def extend(self, state_dict: dict[str, Any], *, sharded: bool, metadata: Any) -> None:
        state_dict[STATE] = packed(self.running.state_dict())
        if not sharded and "optimizer" in state_dict:
            state_dict[BUFFERS] = {}
            state_dict["optimizer"] = take_out(state_dict["optimizer"], state_dict[BUFFERS])
        if self.running.schedule.resumable:
            state_dict[PREVIOUS] = previous_weights(
                self.running, sharded=sharded, metadata=metadata
            )


# Loading


class _Loading:
    """A load, by a run with an engine or by one with Megatron's schedule.

    Args:
        running: None with Megatron's schedule.
        optimizer: Megatron's.
    """

    def __init__(self, running: Engine | None, optimizer: Any) -> None:
        self.running = running
        self._optimizer = optimizer
        self._saved: dict[str, Any] | None = None
        self._state: dict[str, Any] | None = None
        """What :meth:`Engine.state_dict` returned, if it can be read here."""
        self._previous: dict[str, torch.Tensor] = {}
        self._checkpoint_found = False
        self._resumes = False
        self._afresh = ""
        self._correction_loaded = False

    def found(self, state_dict: dict[str, Any], *, directory: str, release: bool) -> None:
        """Called with the plain data of a torch_dist checkpoint before its tensors are asked for,
        and with everything once it is loaded (of a torch checkpoint with everything alone)."""
        if not self._checkpoint_found:
            self._checkpoint_found = True
            self._saved = state_dict.get(STATE)
            if self.running is not None:
                self._decide(self.running, state_dict, directory=directory, release=release)
        self._previous = state_dict.get(PREVIOUS) or {}

    def _decide(
        self, running: Engine, state_dict: dict[str, Any], *, directory: str, release: bool
    ) -> None:
        args = get_args()
        saved = self._saved
        if args.finetune or release:
            self._afresh = "the checkpoint's weights alone are taken"
        elif saved is None:
            self._afresh = "the checkpoint holds no asynchronous state"
        elif _iteration(args, state_dict) < running.config.start_iteration:
            self._afresh = "--async-start-iteration lies ahead"
        else:
            state = self._state = unpacked(saved, directory)
            if state["schedule"] != running.schedule.name:
                self._afresh = f"the checkpoint was saved by {state['schedule']}"
            elif not running.schedule.resumable:
                self._afresh = (
                    "microbatches that were in flight run forward anew, on the newest weights"
                    if running.schedule.drifts
                    else "the batches that were in flight and the versions that they ran on are "
                    "not saved, so the delays grow anew"
                )
        if self._afresh or self._state is None:
            return
        state = self._state
        self._resumes = True
        # The model computes on what Megatron's code fills now: the newest version.
        running.weights.load_state_dict(state["weights"])
        saved_args = state_dict.get("args")
        optimizer_saved = not getattr(saved_args, "no_save_optim", False)
        self._correction_loaded = (
            state["correction"] is not None
            and state["correction"] == running.config.correction_label
            and optimizer_saved
            and not args.no_load_optim
        )
        if self._correction_loaded:
            # A torch_dist checkpoint is asked for what the optimizer's state holds already.
            for leaf in inner_optimizers(self._optimizer):
                correction = correction_of(leaf.optimizer)
                if correction is not None:
                    if leaf.init_state_fn is not None:
                        leaf.init_state_fn(leaf.optimizer, leaf.config)
                    correction.make_buffers()

    def extend(self, state_dict: dict[str, Any], *, sharded: bool, metadata: Any) -> None:
        if self.running is not None and self._resumes:
            state_dict[PREVIOUS] = previous_weights(
                self.running, sharded=sharded, metadata=metadata
            )

    def place_buffers(self, state_dict: dict[str, Any]) -> None:
        """Put the correction's buffers of a torch checkpoint where it is loaded from."""
        buffers = state_dict.pop(BUFFERS, {})
        if "optimizer" not in state_dict:
            return
        if self._correction_loaded:
            put_back(state_dict["optimizer"], buffers)
        else:  # Format 1 has them in there.
            state_dict["optimizer"] = take_out(state_dict["optimizer"], {})

    def finish(self, *, iteration: int) -> None:
        """Called when Megatron has loaded everything."""
        if not self._checkpoint_found:
            return
        if not self._correction_loaded:
            for leaf in inner_optimizers(self._optimizer):
                drop_buffers(leaf.optimizer)
        if self.running is None:
            if self._saved is not None:
                print_rank_0(f"megatron_async: {leaving_text(self._saved)}")
            return
        if not self._resumes or self._state is None:
            config = self.running.config
            start = max(iteration, config.start_iteration) + 1
            print_rank_0(
                f"megatron_async: {config.schedule} starts afresh at iteration {start}, whose "
                f"weights are version 0: {self._afresh}"
            )
            return
        self._set_previous(self.running)
        self.running.load_state_dict(self._state, corrected=self._correction_loaded)
        print_rank_0(f"megatron_async: {self._resuming(self.running, self._state, iteration)}")

    def _set_previous(self, running: Engine) -> None:
        values = []
        for name, _ in named_weights(running):
            if name not in self._previous:
                raise RuntimeError(
                    f"megatron_async: the checkpoint lacks the previous version of {name}; it was "
                    "saved from another model, or for another layout in --ckpt-format torch"
                )
            values.append(self._previous[name])
        running.weights.set_previous(values)

    def _resuming(self, running: Engine, state: dict[str, Any], iteration: int) -> str:
        newest = state["weights"]["newest"]
        if iteration >= running.args.train_iters:
            return (
                f"the checkpoint is of iteration {iteration}, the last: there is nothing to train"
            )
        text = (
            f"{running.config.schedule} resumes at iteration {iteration + 1}, with weight versions "
            f"{newest - 1} and {newest}"
        )
        was, now = state["correction"], running.config.correction_label
        record = running.config.correction_record
        if self._correction_loaded:
            text += f", delay correction {now}"
            for dest, after in running.config.correction_settings.items():
                before = state["correction_settings"].get(dest, after)
                if before != after:
                    name = dest.removeprefix("delay_correction_").replace("_", " ")
                    text += f", {name} {after} instead of {before} from the next update on"
        elif record is not None:
            text += f"; the delay correction {now} starts with the next update"
            if record.needs_last_update:
                text += ", which is not corrected"
            if was not in (None, now):
                text += f", and what {was} added last stays in the weights"
        elif was is not None:
            text += (
                f"; the delay correction {was} is off from now on, and what it added last stays in "
                "the weights"
            )
        return text


def _iteration(args: Any, state_dict: dict[str, Any]) -> int:
    """Number of iterations that are done when training goes on."""
    override = getattr(args, "override_ckpt_iteration", None)
    return int(state_dict.get("iteration", 0) if override is None else override)
