"""Training with a delay of one step, in plain PyTorch.

    torchrun --nproc-per-node 1 -m tests.support.launchers.plain_cpu \
        tests/support/reference/delayed_training.py \
        --runs RUNS.json MEGATRON'S FLAGS

Megatron gives the model, the data and the meaning of its flags. The rest is written out here, in
the simplest way there is, to compare with::

    W(1)   = W(0) - U(grad(W(0)) on batch 0)
    W(k+1) = W(k) - U(grad(W(k-1)) on batch k)

where U is what torch's SGD or AdamW subtracts. If only the first c of a batch's microbatches are
delayed, the gradient is the mean of theirs at W(k-1) and of the others' at W(k). With a correction
the weights that gradients are taken on, x, are others:

- "error-feedback", from k = 1 on: x(k+1) = x(k) - U(k) - lambda (U(k) - U(k-1)); with "adaptive",
  x(k+1) = x(k) - U(k) - (a(k) - a(k-1)) where a(k) = lambda clamp(U(k) / U(k-1), 0, 1) U(k) and
  a(0) = lambda U(0).
- "weight-prediction": y(k+1) = y(k) - U(k), x(k+1) = y(k+1) - lambda U(k).
- "nesterov": w(k+1) = x(k) - (1 - gamma) U(k), x(k+1) = w(k+1) + gamma (w(k+1) - w(k)).
- "damping": x(k+1) = x(k) - strength U(k).
- "delay-compensation", adaptive: U is made of g + lambda g^2 / sqrt(v) (x(k) - x(k-1)), with v the
  moving average of g^2 with a decay of 0.95, which starts with the first.

RUNS.json is a list of objects: ``start`` (file with ``initial``: name -> tensor), ``out`` (file for
a list of such, W(1), W(2), ...), ``optimizer`` ("sgd" or "adamw"), ``lr``, ``weight_decay``,
``correction`` (null for none), ``strength``, ``momentum``, ``adaptive``, ``delay`` (d for W(k-d) in
the place of W(k-1)), ``delayed`` (c; null for all) and ``clipped_stages`` (gradients are clipped by
the norms of so many parts of the model, each by its own; 1 for the norm of all).
"""

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from megatron.core.datasets import utils as dataset_utils
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDatasetConfig, MockGPTDataset
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer
from megatron.training import initialize_megatron
from megatron.training.argument_utils import core_transformer_config_from_args
from megatron.training.arguments import parse_and_validate_args

Weights = dict[str, torch.Tensor]


def _add_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    parser.add_argument("--runs", type=Path, required=True)
    return parser


def _batches(args: Any) -> list[list[dict[str, torch.Tensor]]]:
    """The training samples in their order: a batch is a list of microbatches."""
    config = GPTDatasetConfig(
        random_seed=args.seed,
        sequence_length=args.seq_length,
        split=args.split,
        tokenizer=build_tokenizer(args),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
    )
    sizes = [args.train_iters * args.global_batch_size, 0, 0]
    builder = BlendedMegatronDatasetBuilder(MockGPTDataset, sizes, lambda: True, config)
    samples = iter(builder.build()[0])
    collate = torch.utils.data.default_collate
    return [
        [
            collate([next(samples) for _ in range(args.micro_batch_size)])
            for _ in range(args.global_batch_size // args.micro_batch_size)
        ]
        for _ in range(args.train_iters)
    ]


def _gradient(
    model: torch.nn.Module, weights: Weights, batch: list[dict[str, torch.Tensor]]
) -> Weights:
    """The gradient of the mean loss of a batch at the given weights."""
    parameters = dict(model.named_parameters())
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(weights[name])
            parameter.grad = None
    for data in batch:
        losses = model(
            data["tokens"], data["position_ids"], data["attention_mask"], labels=data["labels"]
        )
        loss = (losses * data["loss_mask"]).sum() / data["loss_mask"].sum()
        (loss / len(batch)).backward()
    return {name: p.grad.detach().clone() for name, p in parameters.items() if p.grad is not None}


def _stage(name: str, stages: int, layers: int) -> int:
    """The stage of an even pipeline that holds a parameter."""
    parts = name.split(".")
    if parts[0] == "embedding":
        return 0
    if parts[:2] == ["decoder", "layers"]:
        return int(parts[2]) // (layers // stages)
    return stages - 1


def _clipped(gradient: Weights, stages: int, args: Any) -> Weights:
    if args.clip_grad == 0:
        return gradient
    stage_of = {name: _stage(name, stages, args.num_layers) for name in gradient}
    squares = [0.0] * stages
    for name, g in gradient.items():
        squares[stage_of[name]] += float(g.double().square().sum())
    scales = [min(1.0, args.clip_grad / (square**0.5 + 1e-6)) for square in squares]
    return {name: g * scales[stage_of[name]] for name, g in gradient.items()}


def _optimizer(run: dict[str, Any], weights: Weights, args: Any) -> torch.optim.Optimizer:
    # Megatron decays what has more than one dimension and is no bias.
    decayed = [w for name, w in weights.items() if w.ndim > 1 and not name.endswith(".bias")]
    others = [w for w in weights.values() if all(w is not one for one in decayed)]
    groups = [
        {"params": decayed, "weight_decay": run["weight_decay"]},
        {"params": others, "weight_decay": 0.0},
    ]
    if run["optimizer"] == "sgd":
        return torch.optim.SGD(groups, lr=run["lr"], momentum=args.sgd_momentum)
    betas = (args.adam_beta1, args.adam_beta2)
    return torch.optim.AdamW(groups, lr=run["lr"], betas=betas, eps=args.adam_eps)


class _Plain:
    def __init__(self, run: dict[str, Any], start: Weights) -> None:
        self.strength, self.momentum = run["strength"], run["momentum"]
        self.adaptive = run["adaptive"]
        self.iterates = [start]
        self.updates: list[Weights] = []

    def gradient(self, gradient: Weights, versions: list[Weights]) -> Weights:
        return gradient

    def next(self, versions: list[Weights], update: Weights) -> Weights:
        return {name: x - update[name] for name, x in versions[-1].items()}


class _ErrorFeedback(_Plain):
    def next(self, versions: list[Weights], update: Weights) -> Weights:
        plain = super().next(versions, update)
        self.updates.append(update)
        if len(self.updates) == 1:
            return plain
        a, last = self._ahead(-1), self._ahead(-2)
        return {name: x - (a[name] - last[name]) for name, x in plain.items()}

    def _ahead(self, k: int) -> Weights:
        now = self.updates[k]
        if not self.adaptive or len(self.updates) + k == 0:
            return {name: self.strength * u for name, u in now.items()}
        before = self.updates[k - 1]
        return {
            name: self.strength
            * torch.where(before[name] == 0, 0, u / before[name]).clamp(0, 1)
            * u
            for name, u in now.items()
        }


class _WeightPrediction(_Plain):
    def next(self, versions: list[Weights], update: Weights) -> Weights:
        self.iterates.append({name: y - update[name] for name, y in self.iterates[-1].items()})
        return {name: y - self.strength * update[name] for name, y in self.iterates[-1].items()}


class _Nesterov(_Plain):
    def next(self, versions: list[Weights], update: Weights) -> Weights:
        gamma, w = self.momentum, self.iterates[-1]
        after = {name: x - (1 - gamma) * update[name] for name, x in versions[-1].items()}
        self.iterates.append(after)
        return {name: after[name] + gamma * (after[name] - w[name]) for name in w}


class _DelayCompensation(_Plain):
    mean_square: Weights | None = None

    def gradient(self, gradient: Weights, versions: list[Weights]) -> Weights:
        now, then = versions[-1], versions[max(len(versions) - 2, 0)]
        last = self.mean_square
        self.mean_square = {
            name: g.square() if last is None else 0.95 * last[name] + 0.05 * g.square()
            for name, g in gradient.items()
        }
        return {
            name: g
            + self.strength
            * torch.where(g == 0, 0, g.square() / self.mean_square[name].sqrt())
            * (now[name] - then[name])
            for name, g in gradient.items()
        }


class _Damping(_Plain):
    def next(self, versions: list[Weights], update: Weights) -> Weights:
        return {name: x - self.strength * update[name] for name, x in versions[-1].items()}


_CORRECTIONS = {
    None: _Plain,
    "error-feedback": _ErrorFeedback,
    "weight-prediction": _WeightPrediction,
    "nesterov": _Nesterov,
    "damping": _Damping,
    "delay-compensation": _DelayCompensation,
}


def _train(run: dict[str, Any], model: torch.nn.Module, batches: Any, args: Any) -> list[Weights]:
    start: Weights = torch.load(run["start"])["initial"]
    weights = {name: value.clone() for name, value in start.items()}
    optimizer = _optimizer(run, weights, args)
    versions = [start]  # W(0), W(1), ...
    correction = _CORRECTIONS[run["correction"]](run, start)
    for k, batch in enumerate(batches):
        late = len(batch) if run.get("delayed") is None else run["delayed"]
        parts = ((batch[:late], versions[max(k - run["delay"], 0)]), (batch[late:], versions[k]))
        gradient = {name: torch.zeros_like(weight) for name, weight in weights.items()}
        for part, at in parts:
            if part:
                for name, g in _gradient(model, at, part).items():
                    gradient[name] += len(part) / len(batch) * g
        gradient = _clipped(gradient, run["clipped_stages"], args)
        gradient = correction.gradient(gradient, versions)
        for name, weight in weights.items():
            weight.copy_(versions[k][name])
            weight.grad = gradient[name]
        optimizer.step()
        update = {name: versions[k][name] - weights[name] for name in weights}
        versions.append(correction.next(versions, update))
    return versions[1:]


def run_all(
    train: Callable[[dict[str, Any], torch.nn.Module, Any, Any], list[Weights]],
    *,
    two_matrices: bool = False,
) -> None:
    """Train what the command line asks for.

    Args:
        train: takes a run, the model, the batches and Megatron's arguments; returns W(1), W(2), ...
        two_matrices: the model has a tied embedding and its output layer apart.
    """
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
        share_embeddings_and_output_weights=not (
            args.untie_embeddings_and_output_weights or two_matrices
        ),
        position_embedding_type=args.position_embedding_type,
    )
    batches = _batches(args)
    for run in json.loads(args.runs.read_text()):
        torch.save(train(run, model, batches, args), run["out"])


if __name__ == "__main__":
    run_all(_train)
