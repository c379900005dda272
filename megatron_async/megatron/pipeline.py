"""One microbatch's steps, and what crosses stages, as Megatron's own schedules make them.

Functions are looked up in Megatron's modules at each call, where others may have replaced them.

Source: megatron/core/pipeline_parallel/schedules.py and
megatron/core/distributed/finalize_model_grads.py.
"""

from collections.abc import Callable
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.distributed.finalize_model_grads import _get_shared_word_embedding_weight
from megatron.core.pipeline_parallel import schedules
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.multi_token_prediction import MTPLossAutoScaler
from megatron.core.utils import get_attr_wrapped_model

__all__ = [
    "backward_step",
    "forward_step",
    "group_collection",
    "release_output",
    "set_auxiliary_loss_scales",
    "tensor_shapes",
    "tied_embedding",
]


def group_collection() -> Any:
    """Return the process groups that the schedules of Megatron use by default (tp, cp, pp, ...)."""
    if hasattr(schedules, "_build_default_pg_collection"):  # not in 0.18
        return schedules._build_default_pg_collection()
    groups = ProcessGroupCollection()
    groups.tp = parallel_state.get_tensor_model_parallel_group()
    groups.cp = parallel_state.get_context_parallel_group()
    groups.embd = parallel_state.get_embedding_group(check_initialized=False)
    groups.pos_embd = parallel_state.get_position_embedding_group(check_initialized=False)
    groups.pp = parallel_state.get_pipeline_model_parallel_group()
    groups.dp_cp = parallel_state.get_data_parallel_group(with_context_parallel=True)
    groups.tp_dp_cp = parallel_state.get_tensor_and_data_parallel_group(with_context_parallel=True)
    return groups


def tensor_shapes(
    *,
    seq_length: int,
    micro_batch_size: int,
    decoder_seq_length: int | None,
    config: Any,
    groups: Any,
) -> Any:
    """Return the shapes of what stages exchange, as the P2P communicator takes them."""
    return schedules.get_tensor_shapes(
        seq_length=seq_length,
        micro_batch_size=micro_batch_size,
        decoder_seq_length=decoder_seq_length,
        config=config,
        tp_group=groups.tp,
        cp_group=groups.cp,
    )


def forward_step(
    forward_step_func: Callable[..., Any],
    data_iterator: Any,
    model: Any,
    *,
    num_microbatches: int,
    received: Any,
    losses: list[Any],
    config: Any,
    groups: Any,
    microbatch: int,
    is_last_stage: bool,
) -> tuple[Any, torch.Tensor]:
    """Run one microbatch forward.

    Args:
        forward_step_func: the training script's.
        data_iterator: what it reads from.
        model: the DDP-wrapped model chunk.
        num_microbatches: of the microbatch's batch; the loss is divided by it.
        received: the input from the stage before; None on the first.
        losses: gets what the loss function reports, on the last stage.
        config: the model's configuration.
        groups: see :func:`group_collection`.
        microbatch: its index in the batch.
        is_last_stage: whether the loss is computed here.

    Returns:
        The output, and the number of tokens (int scalar).
    """
    output, num_tokens = schedules.forward_step(
        forward_step_func,
        data_iterator,
        model,
        num_microbatches,
        received,
        losses,
        config,
        cp_group_size=groups.cp.size(),
        is_first_microbatch=microbatch == 0,
        current_microbatch=microbatch,
        is_last_stage=is_last_stage,
    )
    return output, num_tokens


def backward_step(received: Any, output: Any, output_gradient: Any, config: Any) -> Any:
    """Run one microbatch backward and return the gradient of its input."""
    return schedules.backward_step(received, output, output_gradient, config)


def release_output(output: Any, config: Any) -> None:
    """Free the data of an output that was sent, if the configuration says so."""
    schedules.deallocate_output_tensor(output, config.deallocate_pipeline_outputs)


def set_auxiliary_loss_scales(
    output: Any, *, num_microbatches: int, config: Any, groups: Any
) -> None:
    """Set the scales of the gradients of the routers' auxiliary losses and of the losses of
    multi-token prediction, for the backward of one microbatch.

    Megatron keeps them in globals that each forward sets.

    Args:
        output: of the microbatch's forward.
        num_microbatches: of its batch.
        config: the model's configuration.
        groups: see :func:`group_collection`.
    """
    batch = 1 if config.calculate_per_token_loss else num_microbatches
    if getattr(config, "num_moe_experts", None) is not None:
        scale = _loss_scale("moe", config, schedules.get_tensor_device(output))
        if not config.calculate_per_token_loss:
            scale = scale * groups.cp.size()
        schedules.MoEAuxLossAutoScaler.set_loss_scale(scale / batch)
    if getattr(config, "mtp_num_layers", None) is not None:
        scale = _loss_scale("mtp", config, schedules.get_tensor_device(output))
        MTPLossAutoScaler.set_loss_scale(scale / batch)


def _loss_scale(kind: str, config: Any, device: Any) -> Any:
    own = getattr(schedules, f"_get_{kind}_loss_scale", None)
    if own is not None:  # not in 0.18
        return own(config, device)
    scale = torch.ones(1, device=device)
    return scale if config.grad_scale_func is None else config.grad_scale_func(scale)


def tied_embedding(model_chunk: Any, config: Any) -> torch.nn.Parameter | None:
    """Return the embedding weight that another stage has a copy of, None if none has."""
    group = parallel_state.get_embedding_group(check_initialized=False)
    if group is None or not parallel_state.is_rank_in_embedding_group(ignore_virtual=True):
        return None
    if group.size() < 2:
        return None
    module = get_attr_wrapped_model(model_chunk, "pre_process", return_model_obj=True)
    weight: torch.nn.Parameter | None = _get_shared_word_embedding_weight(module, config)
    return weight if weight is not None and weight.requires_grad else None
