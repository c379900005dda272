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

import json
from pathlib import Path
from typing import Any

import torch
from megatron.core.datasets import utils as dataset_utils
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.training import initialize_megatron
from megatron.training.argument_utils import core_transformer_config_from_args
from megatron.training.arguments import parse_and_validate_args

from tests.support.reference.delayed_training import (
    Weights,
    _add_arguments,
    _batches,
    _clipped,
    _gradient,
    _optimizer,
    _stage,
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


def main() -> None:
    args = parse_and_validate_args(extra_args_provider=_add_arguments)
    helpers = Path(dataset_utils.__file__).with_name("Makefile")
    if not helpers.exists():  # Megatron's wheel holds them compiled
        dataset_utils.compile_helpers = lambda: None
    initialize_megatron()
    model = GPTModel(
        config=core_transformer_config_from_args(args),
        transformer_layer_spec=get_gpt_layer_local_spec(normalization=args.normalization),
        vocab_size=args.padded_vocab_size,
        max_sequence_length=args.max_position_embeddings,
        share_embeddings_and_output_weights=False,
        position_embedding_type=args.position_embedding_type,
    )
    batches = _batches(args)
    for run in json.loads(args.runs.read_text()):
        torch.save(_train(run, model, batches, args), run["out"])


if __name__ == "__main__":
    main()
