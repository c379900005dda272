"""The layers of hybrid models without Transformer Engine.

Megatron's ``hybrid_stack_spec`` names Transformer Engine's modules alone. Here the attention, MLP
and MoE layers are of Megatron's local modules, those of ``get_gpt_layer_local_spec``; all other
layers, whose kernels need a GPU, stay as they are.

Source: megatron/core/models/hybrid/hybrid_layer_specs.py and hybrid_block.py,
megatron/core/models/gpt/gpt_layer_specs.py.
"""

import dataclasses
from functools import partial
from typing import Any

__all__ = ["local_stack_spec"]


def local_stack_spec(original: Any) -> Any:
    """Return Megatron's ``hybrid_stack_spec`` with local attention, MLP and MoE layers."""
    from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
    from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
    from megatron.core.ssm.mlp_layer import MLPLayer
    from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
    from megatron.core.transformer.dot_product_attention import DotProductAttention
    from megatron.core.transformer.enums import AttnMaskType
    from megatron.core.transformer.mlp import MLP, MLPSubmodules
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.torch_norm import WrappedTorchNorm
    from megatron.core.transformer.transformer_layer import (
        MoETransformerLayer,
        TransformerLayer,
        TransformerLayerSubmodules,
    )

    # Checkpoints name a layer's norms as Transformer Engine's fused modules do.
    norms = {
        "input_layernorm.": "self_attention.linear_qkv.layer_norm_",
        "pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_",
    }
    attention = ModuleSpec(
        module=SelfAttention,
        params={"attn_mask_type": AttnMaskType.causal},
        submodules=SelfAttentionSubmodules(
            linear_qkv=ColumnParallelLinear,
            core_attention=DotProductAttention,
            linear_proj=RowParallelLinear,
        ),
    )
    mlp = partial(
        MLP.as_mlp_submodule,
        submodules=MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear),
    )
    return ModuleSpec(
        module=original.module,
        submodules=dataclasses.replace(
            original.submodules,
            attention_layer=ModuleSpec(
                module=TransformerLayer,
                submodules=TransformerLayerSubmodules(
                    input_layernorm=WrappedTorchNorm,
                    self_attention=attention,
                    self_attn_bda=get_bias_dropout_add,
                    sharded_state_dict_keys_map=norms,
                ),
            ),
            mlp_layer=ModuleSpec(
                module=MLPLayer,
                submodules=TransformerLayerSubmodules(
                    pre_mlp_layernorm=WrappedTorchNorm,
                    mlp=mlp,
                    mlp_bda=get_bias_dropout_add,
                    sharded_state_dict_keys_map=norms,
                ),
            ),
            moe_layer=ModuleSpec(
                module=MoETransformerLayer,
                submodules=TransformerLayerSubmodules(
                    pre_mlp_layernorm=WrappedTorchNorm,
                    mlp=get_moe_module_spec(use_te=False, num_experts=8, moe_grouped_gemm=False),
                    mlp_bda=get_bias_dropout_add,
                ),
            ),
        ),
    )
