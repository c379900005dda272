"""What a script that pretrains a GPT asks Megatron for, where its releases differ.

Source: pretrain_gpt.py, pretrain_hybrid.py, gpt_builders.py and hybrid_builders.py of Megatron-LM,
megatron/training/argument_utils.py and megatron/core/utils.py.
"""

from argparse import Namespace
from collections.abc import Callable
from typing import Any

from megatron_async.megatron import releases

__all__ = ["batch_on_this_tp_rank", "pretrain"]


def batch_on_this_tp_rank(batch: dict[str, Any], **options: Any) -> dict[str, Any]:
    """Share a microbatch without packed sequences with the tensor-parallel ranks.

    Args:
        batch: the fields, on the first tensor-parallel rank.
        options: of Megatron's ``get_batch_on_this_tp_rank``.
    """
    from megatron.core.utils import get_batch_on_this_tp_rank

    packed = "is_sft" if releases.series(releases.current()) == "0.18" else "has_cu_seqlens"
    return dict(get_batch_on_this_tp_rank(batch, **{packed: False}, **options))


def pretrain(
    args: Namespace,
    datasets: Callable[..., Any],
    forward_step: Callable[..., Any],
    *,
    get_embedding_ranks: Callable[[list[int]], list[int]],
) -> None:
    """Train the GPT or the hybrid model that the arguments describe, by Megatron's training loop.

    Args:
        args: Megatron's, validated.
        datasets: takes numbers of samples, returns the data sets.
        forward_step: takes a data iterator and a model chunk.
        get_embedding_ranks: takes a pipeline's ranks, returns those that hold word embeddings.
    """
    from megatron.core.enums import ModelType
    from megatron.training import pretrain
    from megatron.training.argument_utils import pretrain_cfg_container_from_args

    model: dict[str, Any] = {}
    if releases.series(releases.current()) == "0.18":
        config = pretrain_cfg_container_from_args(args)
        model["model_provider"] = _build
    else:
        from megatron.training import argument_utils

        kind = "gpt" if args.hybrid_layer_pattern is None else "hybrid"
        model_config = getattr(argument_utils, f"{kind}_config_from_args")
        config = pretrain_cfg_container_from_args(args, model_config(args))
    pretrain(
        config,
        train_valid_test_dataset_provider=datasets,
        model_type=ModelType.encoder_or_decoder,
        forward_step_func=forward_step,
        get_embedding_ranks=get_embedding_ranks,
        **model,
    )


def _build(
    pre_process: bool = True,
    post_process: bool = True,
    vp_stage: int | None = None,
    config: Any = None,
    pg_collection: Any = None,
) -> Any:
    """Build a stage's model, as gpt_builders.py and hybrid_builders.py of core_v0.18.2 do. Later
    releases have that in the wheel."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.hybrid import hybrid_layer_specs
    from megatron.core.models.hybrid.hybrid_model import HybridModel
    from megatron.core.transformer.spec_utils import import_module
    from megatron.training import get_args, print_rank_0
    from megatron.training.arguments import core_transformer_config_from_args
    from megatron.training.yaml_arguments import core_transformer_config_from_yaml

    args = get_args()
    hybrid = args.hybrid_layer_pattern is not None
    print_rank_0(f"building {'hybrid' if hybrid else 'GPT'} model ...")
    if config is None:
        config = (
            core_transformer_config_from_args(args)
            if args.yaml_cfg is None
            else core_transformer_config_from_yaml(args, "language_model")
        )
    if hybrid:
        kind = HybridModel
        of_kind = {
            "hybrid_layer_pattern": args.hybrid_layer_pattern,
            "hybrid_stack_spec": hybrid_layer_specs.hybrid_stack_spec
            if args.spec is None
            else import_module(args.spec),
        }
    else:
        kind = GPTModel
        of_kind = {
            "transformer_layer_spec": _layer_spec(args, config, vp_stage),
            "rope_scaling": args.use_rope_scaling,
            "mtp_block_spec": _mtp_spec(args, config, vp_stage),
        }
    return kind(
        config=config,
        vocab_size=args.padded_vocab_size,
        max_sequence_length=args.max_position_embeddings,
        pre_process=pre_process,
        post_process=post_process,
        fp16_lm_cross_entropy=args.fp16_lm_cross_entropy,
        parallel_output=True,
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        position_embedding_type=args.position_embedding_type,
        rotary_percent=args.rotary_percent,
        rotary_base=args.rotary_base,
        vp_stage=vp_stage,
        pg_collection=pg_collection,
        **of_kind,
    )


def _mtp_spec(args: Namespace, config: Any, vp_stage: int | None) -> Any:
    from megatron.core.models.gpt import gpt_layer_specs as specs

    if args.mtp_num_layers is None:
        return None
    on_gpu = args.transformer_impl == "transformer_engine"
    layers = specs.get_gpt_decoder_layer_specs(
        config,
        use_transformer_engine=on_gpu,
        normalization=args.normalization,
        qk_l2_norm=args.qk_l2_norm,
        vp_stage=vp_stage,
    )
    return specs.get_gpt_mtp_block_spec(
        config, layers[-1], use_transformer_engine=on_gpu, vp_stage=vp_stage
    )


def _layer_spec(args: Namespace, config: Any, vp_stage: int | None) -> Any:
    from megatron.core.models.gpt import experimental_attention_variant_module_specs as variants
    from megatron.core.models.gpt import gpt_layer_specs as specs
    from megatron.core.models.gpt.heterogeneous.heterogeneous_layer_specs import (
        get_gpt_heterogeneous_layer_spec,
    )
    from megatron.core.transformer.spec_utils import import_module

    on_gpu = args.transformer_impl == "transformer_engine"
    if args.spec is not None:
        return import_module(args.spec)
    if args.experimental_attention_variant is not None:
        return variants.get_transformer_block_with_experimental_attention_variant_spec(
            config=config, vp_stage=vp_stage
        )
    if args.heterogeneous_layers_config_path is not None and not args.num_experts:
        return get_gpt_heterogeneous_layer_spec(config, on_gpu)
    if config.transformer_impl == "inference_optimized":
        raise SystemExit(
            "--transformer-impl inference_optimized: this pretrain_gpt.py trains. Leave it out."
        )
    # Without experts the block's layers are all of the one kind that gpt_builders.py asks for.
    return specs.get_gpt_decoder_block_spec(
        config,
        use_transformer_engine=on_gpu,
        normalization=args.normalization,
        qk_l2_norm=args.qk_l2_norm,
        vp_stage=vp_stage,
    )
