"""``--fused-cpu-kernels``: torch's fused operators in place of Megatron's own chains of small ones.

A tiny model on a CPU rank spends its time in calling operators, not in arithmetic. Megatron's local
attention is eight of them forward, its cross entropy twenty, and each linear layer a function of
autograd in Python, all of which are there for tensor parallelism. The fused ones compute the same
functions, with sums in another order: losses agree to rounding, not digit for digit. So they are
off unless they are asked for.

What does not fit (tensor parallelism, a mask that is not the causal one, attention dropout, a
window) runs as Megatron has it.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional

from megatron_async.megatron import releases
from megatron_async.megatron.replaced import Replacement

__all__ = ["fused_rows"]


def _attention(original: Callable[..., Any]) -> Callable[..., Any]:
    """Make ``DotProductAttention.forward`` of shape (sequence, microbatch, heads, width)."""
    from megatron.core.transformer.enums import AttnMaskType

    def fits(self: Any, query: Any, key: Any, mask: Any) -> bool:
        softmax = self.scale_mask_softmax
        return (
            # Without one, the softmax makes the causal mask by itself.
            mask is None
            and self.attn_mask_type == AttnMaskType.causal
            and softmax.window_size is None
            and softmax.scale is None
            and getattr(self, "softmax_offset", None) is None
            and not (self.training and self.attention_dropout.p)
            and self.config.context_parallel_size == 1
            and query.shape[0] == key.shape[0]
        )

    @functools.wraps(original)
    def forward(
        self: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: Any,
        attn_mask_type: Any = None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        others = any(one is not None for one in (*args, *kwargs.values()))
        if others or not fits(self, query, key, attention_mask):
            return original(
                self, query, key, value, attention_mask, attn_mask_type, *args, **kwargs
            )
        queries_a_group = query.shape[2] // key.shape[2]
        if queries_a_group > 1:
            key = key.repeat_interleave(queries_a_group, dim=2)
            value = value.repeat_interleave(queries_a_group, dim=2)
        query, key, value = (one.permute(1, 2, 0, 3) for one in (query, key, value))
        context = functional.scaled_dot_product_attention(
            query,
            key,
            value,
            is_causal=True,
            scale=self.softmax_scale,
        )
        return context.permute(2, 0, 1, 3).flatten(2)

    return forward


def _cross_entropy(original: Callable[..., Any]) -> Callable[..., Any]:
    """Make ``vocab_parallel_cross_entropy`` of logits (sequence, microbatch, vocabulary)."""

    @functools.wraps(original)
    def vocab_parallel_cross_entropy(
        vocab_parallel_logits: torch.Tensor, target: torch.Tensor, *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        from megatron.core import parallel_state

        smoothing = args[0] if args else kwargs.get("label_smoothing", 0.0)
        if smoothing or parallel_state.get_tensor_model_parallel_world_size() > 1:
            result: torch.Tensor = original(vocab_parallel_logits, target, *args, **kwargs)
            return result
        logits = vocab_parallel_logits.float()
        losses = functional.cross_entropy(
            logits.view(-1, logits.shape[-1]), target.reshape(-1), reduction="none"
        )
        return losses.view(target.shape)

    return vocab_parallel_cross_entropy


def _linear(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def linear(
        input: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> torch.Tensor:
        parallel = any(
            kwargs.get(name)
            for name in ("gradient_accumulation_fusion", "allreduce_dgrad", "sequence_parallel")
        )
        deferred = kwargs.get("grad_output_buffer") is not None
        other = kwargs.get("gtp_remat_size", 1) > 1 or kwargs.get("output_dtype") is not None
        if args or parallel or deferred or other:
            result: torch.Tensor = original(input, weight, bias, *args, **kwargs)
            return result
        return functional.linear(input, weight, bias)

    return linear


def fused_rows() -> list[Replacement]:
    """The rows of ``--fused-cpu-kernels``, which go on top of those of :mod:`.megatron_rows`."""
    attention = "megatron.core.transformer.dot_product_attention:DotProductAttention"
    return [
        Replacement(
            target=target,
            attribute=attribute,
            make=make,
            why=why,
            versions=releases.VERSIONS,
        )
        for target, attribute, make, why in (
            (
                attention,
                "forward",
                _attention,
                "causal attention in one operator (core/transformer/dot_product_attention.py)",
            ),
            (
                "megatron.core.tensor_parallel",
                "vocab_parallel_cross_entropy",
                _cross_entropy,
                "log-softmax and the loss in two operators (core/tensor_parallel/cross_entropy.py)",
            ),
            (
                "megatron.core.tensor_parallel.layers",
                "linear_with_grad_accumulation_and_async_allreduce",
                _linear,
                "a linear layer whose backward is not in Python (core/tensor_parallel/layers.py)",
            ),
        )
    ]
