"""The weights of an asynchronous run as a checkpoint holds them: the version before the newest,
beside Megatron's own entry with the newest one."""

import argparse
import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedBase
from megatron.core.utils import unwrap_model

from megatron_async.runtime.engine import Engine

__all__ = ["PREVIOUS", "check_experts", "check_parameters", "named_weights", "previous_weights"]

PREVIOUS = "megatron_async_previous"
"""Entry of the state dict with the weights of the version before the newest; prefix of its keys in
a torch_dist checkpoint."""


def named_weights(running: Engine) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield what has versions with its names: the trainable parameters, then the buffers."""
    chunk = unwrap_model(running.model_chunk)
    named = itertools.chain(chunk.named_parameters(), chunk.named_buffers())
    names = {id(each): name for name, each in named}
    for each in running.weights.versioned:
        yield names[id(each)], each


def previous_weights(running: Engine, *, sharded: bool, metadata: Any) -> dict[str, Any]:
    """Return the weights of the version before the newest, by name.

    Tensors; in a torch_dist checkpoint Megatron's description of each with its tensor, under a key
    of our own. Both to save from and to load into.

    Raises:
        RuntimeError: the model does not describe one as it is.
    """
    weights = running.weights
    weights.select(weights.newest - 1)
    try:
        # Megatron's descriptions hold the parameter itself, which is to point to the newest version
        # when the file is written; a detached tensor stays with the version.
        tensors = {name: each.detach() for name, each in named_weights(running)}
        if not sharded:
            return tensors
        if metadata is None:
            group = parallel_state.get_data_parallel_group(with_context_parallel=True)
            metadata = {"dp_cp_group": group}
        described = unwrap_model(running.model_chunk).sharded_state_dict(metadata=metadata)
        entries = {
            id(entry.data): entry
            for entry in nested_values(described)
            if isinstance(entry, ShardedBase)
        }
        result = {}
        for name, each in named_weights(running):
            if id(each) not in entries:
                raise RuntimeError(
                    f"megatron_async: {name} is missing in the model's sharded_state_dict, or is "
                    "not there as it is; use --ckpt-format torch"
                )
            entry = entries[id(each)]
            result[name] = replace(entry, key=f"{PREVIOUS}.{entry.key}", data=tensors[name])
        return result
    finally:
        weights.select(weights.newest)


def check_parameters(running: Engine, saved: Any, directory: str) -> None:
    """Megatron loads what fits if names are missing in a torch checkpoint, and says so in passing.

    Raises:
        RuntimeError: a parameter is missing.
    """
    chunk = unwrap_model(running.model_chunk)
    parameters = dict(chunk.named_parameters())
    for name in chunk.state_dict_for_save_checkpoint():
        if name in parameters and name not in saved:
            raise RuntimeError(
                f"megatron_async: the checkpoint in {directory} lacks {name}: it is of another "
                "model, or of another layout; only --ckpt-format torch_dist can be loaded by "
                "another number of stages"
            )


def check_experts(
    args: argparse.Namespace, saved: argparse.Namespace | None, directory: str
) -> None:
    """Refuse a torch_dist checkpoint whose optimizer Megatron cannot read for its experts.

    Megatron chains an optimizer of its own for the experts where they are spread over ranks
    (``_get_megatron_optimizer_based_on_param_groups`` in megatron/core/optimizer/__init__.py), and
    fails with a count of its entries or a missing key.

    Args:
        args: Megatron's, of this run.
        saved: those of the run that saved; None if the checkpoint has none.
        directory: that of the checkpoint.

    Raises:
        RuntimeError: one of the two runs has expert parallelism and the other has not.
    """
    if saved is None or not args.num_experts or args.no_load_optim or args.finetune:
        return
    before = getattr(saved, "expert_model_parallel_size", 1)
    now = args.expert_model_parallel_size
    if (before == 1) != (now == 1):
        raise RuntimeError(
            f"megatron_async: the checkpoint in {directory} was saved with "
            f"--expert-model-parallel-size {before}, and Megatron cannot read its optimizer with "
            f"{now}: it keeps the experts' state apart only where they are spread over ranks. "
            f"Go on with --expert-model-parallel-size {before}, or take the weights alone with "
            "--no-load-optim --no-load-rng."
        )
