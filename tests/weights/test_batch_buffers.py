"""Sums of several batches in one model."""

import torch

from megatron_async.weights.batch_buffers import BatchBuffers


def test_each_batch_has_its_own_sums_until_they_are_zeroed() -> None:
    model = torch.nn.Module()
    model.register_buffer("tokens", torch.zeros(3))
    model.register_buffer("steps", torch.zeros(()))
    tokens, steps = model.tokens, model.steps
    assert isinstance(tokens, torch.Tensor)
    assert isinstance(steps, torch.Tensor)
    sums = BatchBuffers([tokens, steps], batches=2)
    # As microbatches of two batches alternate; batch k adds k + 1.
    for batch in (0, 0, 1, 0, 1):
        sums.select(batch)
        tokens += batch + 1
        steps += 1
    sums.select(0)
    assert (tokens.tolist(), float(steps)) == ([3.0] * 3, 3.0)
    tokens.zero_()
    steps.zero_()
    sums.select(1)
    assert (tokens.tolist(), float(steps)) == ([4.0] * 3, 2.0)
    sums.select(2)
    assert (tokens.tolist(), float(steps)) == ([0.0] * 3, 0.0)
    # The model's own buffers all along.
    assert model.tokens is tokens
