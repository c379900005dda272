"""What is replaced in Megatron itself, where standing in for CUDA and NCCL is not enough."""

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from megatron_async.cpu_backend.context_parallel import forward_of_a_part, init_of_a_part
from megatron_async.cpu_backend.fused_adam import FusedAdam, found_in_transformer_engine
from megatron_async.cpu_backend.hybrid_layers import local_stack_spec
from megatron_async.megatron import dataset_helpers, releases
from megatron_async.megatron.replaced import Replacement

__all__ = ["MEGATRON_VERSIONS", "megatron_rows"]

MEGATRON_VERSIONS = releases.VERSIONS


def _norm(original: Callable[..., Any]) -> Callable[..., Any]:
    def new(
        cls: type, config: Any, hidden_size: int, eps: float = 1e-5, **kwargs: Any
    ) -> torch.nn.Module:
        sequence_parallel = config.sequence_parallel
        config.sequence_parallel = False
        try:
            norm: torch.nn.Module = original(cls, config, hidden_size, eps=eps, **kwargs)
        finally:
            config.sequence_parallel = sequence_parallel
        for param in norm.parameters():
            param.sequence_parallel = sequence_parallel  # type: ignore[attr-defined]
        return norm

    return new


def _attention_of_any_width(original: Callable[..., None]) -> Callable[..., None]:
    def init(
        self: Any,
        *args: Any,
        k_channels: int | None = None,
        v_channels: int | None = None,
        **kwargs: Any,
    ) -> None:
        original(self, *args, **kwargs)
        if v_channels is not None:
            self.hidden_size_per_partition = v_channels * self.num_attention_heads_per_partition

    return init


def _forked_worker(original: Callable[..., Any]) -> Any:
    def get_process(cls: type, rank: int, mp_mode: str = "fork", *args: Any, **kwargs: Any) -> Any:
        return original(rank, "fork", *args, **kwargs)

    return classmethod(get_process)


def _forked_manager(original: Callable[..., Any]) -> Callable[..., Any]:
    def get_write_results_queue(mp_mode: str = "fork") -> Any:
        return original("fork")

    return get_write_results_queue


def _schedule_copies(original: Callable[..., Any]) -> Callable[..., Any]:
    def schedule_async_call(self: Any, async_req: Any) -> None:
        if async_req.preload_fn is not None:
            rank, _, *rest = async_req.async_fn_args
            copies = tree_map_only(torch.Tensor, torch.clone, async_req.preload_fn())
            async_req = async_req._replace(async_fn_args=(rank, copies, *rest), preload_fn=None)
        original(self, async_req)

    return schedule_async_call


def _local_norm(original: Any) -> Any:
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    return WrappedTorchNorm


def megatron_rows() -> list[Replacement]:
    """The rows for ``megatron.core``."""
    optimizer = "megatron.core.optimizer"
    distributed = "megatron.core.optimizer.distrib_optimizer"
    adam_why = (
        "without Transformer Engine and Apex, DistributedOptimizer cannot resume torch's Adam: "
        "it expects the step counter in the state that it has not yet created "
        "(core/optimizer/distrib_optimizer.py, state_dict and load_state_dict)"
    )
    values: list[tuple[str, str, Any]] = [
        (optimizer, "Adam", FusedAdam),
        (optimizer, "USING_PYTORCH_OPTIMIZER", False),
        (distributed, "Adam", FusedAdam),
        (distributed, "HAVE_APEX_OR_TE", True),
        (distributed, "USING_APEX_OPTIMIZER", True),
    ]
    rows = [
        Replacement(
            target=target,
            attribute=attribute,
            make=lambda _, value=value: value,  # type: ignore[misc]
            why=adam_why,
            versions=MEGATRON_VERSIONS,
        )
        for target, attribute, value in values
    ]
    rows.append(
        Replacement(
            target="megatron.core.optimizer.optimizer_config:OptimizerConfig",
            attribute="__post_init__",
            make=found_in_transformer_engine,
            why="the precision-aware optimizer wants a FusedAdam with certain arguments in "
            "Transformer Engine: show it the one that is used here",
            versions=MEGATRON_VERSIONS,
        )
    )
    rows.append(
        Replacement(
            target="megatron.core.transformer.torch_norm:WrappedTorchNorm",
            attribute="__new__",
            make=_norm,
            why="torch's norms are refused under sequence parallelism, only because their "
            "parameters lack the mark by which finalize_model_grads all-reduces their gradients "
            "over tensor parallel ranks (core/transformer/torch_norm.py): set the mark",
            versions=MEGATRON_VERSIONS,
        )
    )
    rows.append(
        Replacement(
            target="megatron.core.datasets.utils",
            attribute="compile_helpers",
            make=dataset_helpers.compile_if_missing,
            why="the wheel brings the helper compiled but no Makefile, and exits when `make` fails",
            versions=MEGATRON_VERSIONS,
        )
    )
    rows += [
        Replacement(
            target="megatron.core.transformer.dot_product_attention:DotProductAttention",
            attribute=attribute,
            make=make,
            why=why,
            versions=MEGATRON_VERSIONS,
        )
        for attribute, make, why in (
            (
                "__init__",
                lambda original: init_of_a_part(_attention_of_any_width(original)),
                (
                    "Megatron's local attention lacks the widths of keys and values that multi-"
                    "latent attention passes; only the width of the output depends on them. And it "
                    "refuses context parallelism (core/transformer/dot_product_attention.py)"
                ),
            ),
            (
                "forward",
                forward_of_a_part,
                (
                    "under context parallelism keys and values are gathered over its ranks "
                    "(core/transformer/dot_product_attention.py)"
                ),
            ),
        )
    ]
    hybrid = "megatron.core.models.hybrid"
    hybrid_why = (
        "hybrid models are made of Transformer Engine's modules alone: make their attention, MLP "
        "and MoE layers of Megatron's local ones (core/models/hybrid/hybrid_layer_specs.py)"
    )
    rows += [
        Replacement(
            target=target,
            attribute=attribute,
            make=make,
            why=hybrid_why,
            versions=MEGATRON_VERSIONS,
        )
        for target, attribute, make in (
            (f"{hybrid}.hybrid_layer_specs", "hybrid_stack_spec", local_stack_spec),
            ("megatron.training.models.hybrid", "default_hybrid_stack_spec", local_stack_spec),
            (f"{hybrid}.hybrid_block", "TENorm", _local_norm),
        )
    ]
    worker = "megatron.core.dist_checkpointing.strategies.async_utils:PersistentAsyncCaller"
    rows += [
        Replacement(
            target="megatron.core.dist_checkpointing.strategies.filesystem_async",
            attribute="get_write_results_queue",
            make=_forked_manager,
            why="a torch_dist save starts a manager process afresh, which imports the training "
            "script and Megatron again, with nothing replaced and for seconds: fork it",
            versions=MEGATRON_VERSIONS,
        ),
        Replacement(
            target=worker,
            attribute="_get_process",
            make=_forked_worker,
            why="the worker of --async-save is started afresh, where nothing is replaced and the "
            "first call of torch.cuda fails: fork it",
            versions=MEGATRON_VERSIONS,
        ),
        Replacement(
            target=worker,
            attribute="schedule_async_call",
            make=_schedule_copies,
            why="the worker would copy weights from the GPU while the training waits; host memory "
            "it shares with the training instead, and would save what later steps write there",
            versions=MEGATRON_VERSIONS,
        ),
    ]
    return rows
