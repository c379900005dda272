"""Fingerprints of a run (``--log-fingerprints``): what every update was made of and what it made.

Each rank writes a file of JSON lines. Its first line describes the rank; then comes one line for
each tensor of each update, with a hash of its bytes and its norm:

- ``gradient``: what the torch optimizer gets, clipped, by parameter;
- ``weight``: what it leaves in the parameter (the fp32 main parameter or this rank's shard of it),
  the delay correction included;
- ``state``: its own buffers and the delay correction's, as ``PARAMETER:KEY``;
- ``random``: the generators of the rank, and Megatron's tracked ones, from before the first forward
  of the update's batch; of a synchronous update, from behind it.

Two runs that compute the same have the same lines, whenever a line was written. ``megatron-async
compare A B`` names the first that differ. It works with every schedule. Hashing copies each tensor
to the host: it is for finding a fault, not for training.
"""

import argparse
import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.utils import get_attr_wrapped_model

from megatron_async.megatron.optimizers import (
    gradient_attribute,
    inner_optimizers,
    model_parameters,
)
from megatron_async.runtime import random_state
from megatron_async.runtime.run import run

__all__ = ["Fingerprints", "attach", "digest", "parameter_names"]


def attach(
    args: argparse.Namespace, directory: Path, model_chunks: list[Any], optimizer: Any
) -> None:
    """Write the fingerprints of this run from now on; called on all ranks, behind the engine's own
    :func:`~megatron_async.runtime.engine.attach`."""
    run.fingerprints = Fingerprints(args, directory, model_chunks, optimizer)


def digest(tensor: torch.Tensor) -> str:
    """Return a hash of a tensor's dtype, shape and bytes (16 hexadecimal digits)."""
    flat = tensor.detach().cpu().contiguous()
    found = hashlib.blake2b(digest_size=8)
    found.update(f"{flat.dtype} {tuple(flat.shape)}".encode())
    found.update(flat.reshape(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def parameter_names(model_chunk: Any) -> dict[torch.nn.Parameter, str]:
    """Return the names of a model chunk's parameters, with the layers' numbers in the whole model,
    so that the same parameter has the same name on any number of stages."""
    chunk = get_attr_wrapped_model(model_chunk, "pre_process", return_model_obj=True)
    names: dict[torch.nn.Parameter, str] = {}
    for name, parameter in chunk.named_parameters():
        parts = name.split(".")
        if parts[:2] == ["decoder", "layers"] and hasattr(chunk.decoder, "layers"):
            parts[2] = str(chunk.decoder.layers[int(parts[2])].layer_number - 1)
        names[parameter] = ".".join(parts)
    return names


class Fingerprints:
    """The file of one rank.

    Args:
        args: Megatron's; they know the iteration of a synchronous update.
        directory: gets ``rank<N>.jsonl``; a resumed run of the same directory appends.
        model_chunks: Megatron's, DDP-wrapped.
        optimizer: Megatron's; the step hooks of its torch optimizers are used.
    """

    def __init__(
        self, args: argparse.Namespace, directory: Path, model_chunks: list[Any], optimizer: Any
    ) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        rank = dist.get_rank()
        self.stage = parallel_state.get_pipeline_model_parallel_rank()
        self._file = (directory / f"rank{rank:05d}.jsonl").open("a", encoding="utf-8")
        self._args = args
        self._update: tuple[int, int] | None = None
        """Iteration and version of the asynchronous update under way."""
        self._started: dict[int, list[tuple[str, str]]] = {}
        """The generators' states from before the batches that are in flight, by version."""
        self._write(
            rank=rank,
            world=dist.get_world_size(),
            stage=self.stage,
            stages=parallel_state.get_pipeline_model_parallel_world_size(),
            tensor_rank=parallel_state.get_tensor_model_parallel_rank(),
            data_rank=parallel_state.get_data_parallel_rank(),
        )
        names: dict[torch.nn.Parameter, str] = {}
        for chunk in model_chunks:
            names |= parameter_names(chunk)
        leaves = inner_optimizers(optimizer)
        self._gradient = gradient_attribute(optimizer)
        for number, leaf in enumerate(leaves):
            own = {
                parameter: names[model]
                for parameter, model in model_parameters(leaf, list(names)).items()
            }
            # Behind the hooks of the delay correction, which are there already.
            leaf.optimizer.register_step_pre_hook(self._before(own))
            leaf.optimizer.register_step_post_hook(self._after(own, last=number == len(leaves) - 1))

    def start(self, *, version: int) -> None:
        """Called before a batch's first forward; when its update is completed, others have drawn.

        Args:
            version: the weight version that the batch's update makes.
        """
        self._started[version] = list(self._generators())

    def begin(self, *, iteration: int, version: int) -> None:
        """Called before the step of an asynchronous update.

        Args:
            iteration: in which the batch of the update ran; 1 is the first.
            version: the weight version that the update makes.
        """
        self._update = iteration, version

    def _before(self, names: dict[torch.Tensor, str]) -> Any:
        def hook(optimizer: torch.optim.Optimizer, *_: Any) -> None:
            for parameter, name in names.items():
                gradient = getattr(parameter, self._gradient, None)
                if gradient is not None:
                    self._tensor("gradient", name, gradient)

        return hook

    def _after(self, names: dict[torch.Tensor, str], *, last: bool) -> Any:
        def hook(optimizer: torch.optim.Optimizer, *_: Any) -> None:
            for parameter, name in names.items():
                self._tensor("weight", name, parameter)
                for key, value in sorted(optimizer.state.get(parameter, {}).items()):
                    if isinstance(value, torch.Tensor):
                        self._tensor("state", f"{name}:{key}", value)
            if last:
                version = -1 if self._update is None else self._update[1]
                for name, state in self._started.pop(version, None) or self._generators():
                    self._line("random", name, state, norm=0.0)
                self._file.flush()
                self._update = None

        return hook

    def _generators(self) -> Iterator[tuple[str, str]]:
        now = random_state.capture()
        yield "cpu", digest(now.cpu)
        yield "device", digest(now.device)
        for name, state in sorted(now.trackers.items()):
            tensor = state.get_state() if isinstance(state, torch.Generator) else state
            yield f"tracker {name}", digest(tensor)

    def _tensor(self, what: str, name: str, tensor: torch.Tensor) -> None:
        norm = float(torch.linalg.vector_norm(tensor.detach().double()))
        self._line(what, name, digest(tensor), norm=norm)

    def _line(self, what: str, name: str, found: str, *, norm: float) -> None:
        iteration, version = self._update or (self._args.curr_iteration + 1,) * 2
        self._write(
            iteration=iteration,
            version=version,
            what=what,
            name=name,
            hash=found,
            norm=norm,
        )

    def _write(self, **record: Any) -> None:
        self._file.write(json.dumps(record) + "\n")
