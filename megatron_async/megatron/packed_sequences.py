"""The sums over packed sequences that Megatron counts floating-point operations by.

Source: megatron/training/training.py, ``update_seqlen_stats_from_cu_seqlens``, through which each
microbatch adds to them, and ``consume_seqlen_stats_in_iteration``.
"""

import argparse

import torch

__all__ = ["are_packed", "have_all_ranks_sum", "take_sums"]


def are_packed(args: argparse.Namespace) -> bool:
    """Whether Megatron's own scripts run packed sequences with these arguments."""
    return bool(
        getattr(args, "sft", False) or getattr(args, "dataloader_inter_document_masking", False)
    )


def take_sums() -> torch.Tensor | None:
    """Return what was added on this rank since the last call, and clear it.

    Returns:
        The number of tokens and the sum of the squared lengths of the sequences, shape (2,),
        float64; None if nothing was added.
    """
    from megatron.training import training

    sums = training._seqlen_stats_in_iteration
    if sums is None or not training._seqlen_stats_active:
        return None
    taken: torch.Tensor = sums.clone()
    sums.zero_()
    training._seqlen_stats_active = False
    return taken


def have_all_ranks_sum() -> None:
    """Let this rank take part in the sum over all ranks of this iteration, whatever it ran."""
    from megatron.training import training

    if training._seqlen_stats_in_iteration is None:
        training._seqlen_stats_in_iteration = torch.zeros(
            2, dtype=torch.float64, device=torch.cuda.current_device()
        )
    training._seqlen_stats_active = True
