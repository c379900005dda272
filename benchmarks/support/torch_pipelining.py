"""The training script of the peer: a pipeline of torch.distributed.pipelining that sleeps.

A plain program of torch, started by torchrun. Stages compute next to nothing, and each part of a
microbatch (forward, the backward's half for the input and the one for the weights) is stretched to
a given time by sleeping. An iteration ends as Megatron's does: the sum of a shared embedding's
gradients, the norm over all stages, clipping, the optimizer, the flag of success. The settings come
as JSON in the environment variable BENCHMARK_SETTINGS.
"""

import json
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage, schedules

from support.late_messages import LateRequest, Table, delay_collectives
from support.record import Record, stretched

_WIDTH = 32  # a message is as large as in the jobs of Megatron: 32 x 1 x 32 numbers


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What a benchmark asks for; times are those of one stage, of which a rank has two."""

    output: str
    schedule: str
    v_shaped: bool
    microbatches: int
    iterations: int
    forward_seconds: float
    backward_seconds: float
    optimizer_seconds: float
    latency_seconds: float
    tied: bool


def main() -> None:
    settings = Settings(**json.loads(os.environ["BENCHMARK_SETTINGS"]))
    record = Record()
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    embedding_group: Any = dist.new_group([0, ranks - 1])
    if settings.latency_seconds:
        _delay(settings, rank=rank, ranks=ranks)
    _pace(settings, record)
    torch.manual_seed(1234)
    second = 2 * ranks - 1 - rank if settings.v_shaped else ranks + rank
    models = {index: _stage_model() for index in range(2 * ranks)}
    mine = {index: models[index] for index in (rank, second)}
    stages = [
        PipelineStage(model, index, 2 * ranks, torch.device("cpu")) for index, model in mine.items()
    ]
    schedule = getattr(schedules, settings.schedule)(
        stages, settings.microbatches, loss_fn=torch.nn.functional.mse_loss
    )
    parameters = [parameter for model in mine.values() for parameter in model.parameters()]
    optimizer = torch.optim.Adam(parameters, lr=1e-4)
    step = stretched(optimizer.step, settings.optimizer_seconds, record.optimizer)
    # In a V the first rank has both ends.
    shared = settings.tied and not settings.v_shaped and rank in (0, ranks - 1)
    try:
        for _ in range(settings.iterations):
            optimizer.zero_grad()
            samples, targets = torch.randn(2, settings.microbatches, _WIDTH, _WIDTH).unbind()
            schedule.step(
                *((samples,) if 0 in mine else ()),
                **({"target": targets} if 2 * ranks - 1 in mine else {}),
                return_outputs=False,
            )
            gradients = [each.grad for each in parameters if each.grad is not None]
            if shared:
                dist.all_reduce(gradients[0], group=embedding_group)
            norm = torch.nn.utils.get_total_norm(gradients)
            square = norm.square()
            dist.all_reduce(square)
            torch.nn.utils.clip_grads_with_norm_(parameters, 1.0, square.sqrt())
            step()
            succeeded = torch.ones(1)
            dist.all_reduce(succeeded, op=dist.ReduceOp.MIN)
            record.ends.append(time.monotonic())
    finally:
        record.write(settings.output, rank=rank)
    dist.destroy_process_group()


def _stage_model() -> torch.nn.Module:
    # The output of a linear layer alone would be a view, which the runtime cannot detach.
    return torch.nn.Sequential(torch.nn.Linear(_WIDTH, _WIDTH), torch.nn.Tanh())


def _pace(settings: Settings, record: Record) -> None:
    forward = stretched(PipelineStage.forward_one_chunk, settings.forward_seconds, record.forward)
    whole, half = (
        stretched(PipelineStage.backward_one_chunk, seconds, record.backward)
        for seconds in (settings.backward_seconds, settings.backward_seconds / 2)
    )
    weights = stretched(
        PipelineStage.backward_weight_one_chunk, settings.backward_seconds / 2, record.backward
    )

    def backward(*args: Any, full_backward: bool = True, **kwargs: Any) -> Any:
        chosen = whole if full_backward else half
        return chosen(*args, full_backward=full_backward, **kwargs)

    for name, function in {
        "forward_one_chunk": forward,
        "backward_one_chunk": backward,
        "backward_weight_one_chunk": weights,
    }.items():
        setattr(PipelineStage, name, function)


def _delay(settings: Settings, *, rank: int, ranks: int) -> None:
    """Let messages and collectives arrive late, as those of a job of Megatron do."""
    table = Table(
        Path(settings.output) / "messages", rank=rank, ranks=ranks, seconds=settings.latency_seconds
    )
    original = schedules._batch_p2p

    def batch(operations: list[Any], *args: Any, **kwargs: Any) -> list[Any]:
        # All messages of a pair of ranks are on one channel: they are matched in this order.
        messages = [
            table.send("pair", each.peer)
            if each.op is dist.isend
            else table.receive("pair", each.peer)
            for each in operations
        ]
        works = original(operations, *args, **kwargs)
        return [LateRequest(*pair) for pair in zip(works, messages, strict=True)]

    vars(schedules)["_batch_p2p"] = batch
    delay_collectives(settings.latency_seconds)


if __name__ == "__main__":
    main()
