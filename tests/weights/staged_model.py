"""A toy with the parts of a GPT by which stages are told apart."""

from types import SimpleNamespace
from typing import Any

import torch

__all__ = ["StagedModel"]


class StagedModel(torch.nn.Module):
    """The parts of a GPT that are told apart by name.

    Args:
        layers: how many.
        tied: whether the embedding is the output layer's weight, too.
        bias: whether layers have biases.
        value: that every parameter starts at.
    """

    def __init__(
        self, *, layers: int = 2, tied: bool = False, bias: bool = True, value: float = 0.0
    ) -> None:
        super().__init__()
        self.pre_process = True
        self.share_embeddings_and_output_weights = tied
        self.config = SimpleNamespace(num_layers=layers)
        self.embedding: Any = torch.nn.Module()
        self.embedding.word_embeddings = torch.nn.Embedding(3, 2)
        self.decoder: Any = torch.nn.Module()
        self.decoder.layers = torch.nn.ModuleList(
            torch.nn.Linear(2, 2, bias=bias) for _ in range(layers)
        )
        for number, layer in enumerate(self.decoder.layers, start=1):
            vars(layer)["layer_number"] = number
        self.decoder.final_layernorm = torch.nn.LayerNorm(2)
        if not tied:
            self.output_layer = torch.nn.Linear(2, 3, bias=False)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.fill_(value)
