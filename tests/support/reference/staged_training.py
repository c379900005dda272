"""Training with a delay that differs between layers, in plain PyTorch.

    torchrun --nproc-per-node 1 -m tests.support.launchers.plain_cpu \
        tests/support/reference/staged_training.py \
        --runs RUNS.json MEGATRON'S FLAGS

As delayed_training.py, but for the weights that batch k's gradient is taken at: a pipeline of P
stages has L / P layers on each, stage s of it is P - 1 - s updates late, so layer l is taken from
W(max(k - (P - 1 - s), 0)), the embeddings from that of s = 0, the final norm and the output layer
from that of s = P - 1. An embedding that is also the output layer is two matrices here: one of each
version, and the sum of their gradients is what W is updated by.

RUNS.json is a list of objects: ``start``, ``out``, ``optimizer``, ``lr``, ``weight_decay`` as
there, and ``stages`` (P).
"""

from typing import Any

import torch

from tests.support.reference.delayed_training import (
    Weights,
    _clipped,
    _gradient,
    _optimizer,
    _stage,
    run_all,
)

EMBEDDING = "embedding.word_embeddings.weight"
OUTPUT = "output_layer.weight"


def _staged_gradient(
    model: torch.nn.Module, versions: list[Weights], k: int, batch: Any, stages: int, layers: int
) -> Weights:
    seen = {}
    for name, _ in model.named_parameters():
        version = versions[max(k - (stages - 1 - _stage(name, stages, layers)), 0)]
        seen[name] = version[EMBEDDING if name not in version else name]
    gradient = _gradient(model, seen, batch)
    if OUTPUT not in versions[0]:
        gradient[EMBEDDING] += gradient.pop(OUTPUT)
    return gradient


def _train(run: dict[str, Any], model: torch.nn.Module, batches: Any, args: Any) -> list[Weights]:
    start: Weights = torch.load(run["start"])["initial"]
    weights = {name: value.clone() for name, value in start.items()}
    optimizer = _optimizer(run, weights, args)
    versions = [start]
    for k, batch in enumerate(batches):
        gradient = _staged_gradient(model, versions, k, batch, run["stages"], args.num_layers)
        gradient = _clipped(gradient, 1, args)
        for name, weight in weights.items():
            weight.grad = gradient[name]
        optimizer.step()
        versions.append({name: weight.detach().clone() for name, weight in weights.items()})
    return versions[1:]


if __name__ == "__main__":
    run_all(_train, two_matrices=True)
