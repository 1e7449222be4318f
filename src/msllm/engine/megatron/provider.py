"""The provider from which Megatron-core builds layers: which module does what.

This is Megatron's own door for other implementations (`BackendSpecProvider`): msllm's norms,
attention, activation and experts come in here, chosen and not patched in.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.backends import BackendSpecProvider
from megatron.core.models.gpt.gpt_layer_specs import get_mlp_module_spec_for_backend
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.multi_latent_attention import MLASelfAttentionSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_layer import (
    TransformerLayer,
    TransformerLayerSubmodules,
)

from msllm.engine.megatron.latent_attention import LatentAttention
from msllm.engine.megatron.model_config import ModelConfig
from msllm.engine.megatron.modules import Activation, CoreAttention, GroupedExperts, Norm
from msllm.engine.megatron.projections import AttentionOutput, Down, ExpertDown, QueryKeyValue
from msllm.engine.megatron.residual import NormedResidual, ScaledResidual
from msllm.engine.megatron.routing import NoisyExperts, Router
from msllm.engine.megatron.whole_norm import WholeNorm
from msllm.engine.weights.stored import fused_norms

Module: TypeAlias = ModuleSpec | type


class SpecProvider(BackendSpecProvider):
    """Megatron's parallel linears with msllm's operators between them."""

    def column_parallel_linear(self) -> type:
        """Linear whose output features are spread over the tensor parallel group."""
        return ColumnParallelLinear

    def row_parallel_linear(self) -> type:
        """Linear whose input features are spread over the tensor parallel group."""
        return Down

    def fuse_layernorm_and_linear(self) -> bool:
        """Whether norm and linear are one module: they are not."""
        return False

    def column_parallel_layer_norm_linear(self) -> type | None:
        """The module for norm and linear in one: none."""
        return None

    def layer_norm(self, rms_norm: bool = False, for_qk: bool = False) -> type:
        """The norm; which kind is the config's."""
        return Norm

    def core_attention(self) -> type:
        """Softmax attention."""
        return CoreAttention

    def grouped_mlp_modules(
        self, moe_use_grouped_gemm: bool, moe_use_legacy_grouped_gemm: bool
    ) -> tuple[type, MLPSubmodules | None]:
        """The experts: one grouped matmul for all of a rank, or one MLP each."""
        if moe_use_grouped_gemm:
            return GroupedExperts, None
        return SequentialMLP, MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=ExpertDown)

    def activation_func(self) -> type:
        """The MLP's activation."""
        return Activation


def layer_spec(config: ModelConfig, layer: int) -> ModuleSpec:
    """The modules of transformer layer `layer` (from 0)."""
    provider = SpecProvider()
    norm = provider.layer_norm()
    moe = config.architecture.moe if config.architecture.has_experts(layer) else None
    mlp = get_mlp_module_spec_for_backend(
        backend=provider,
        num_experts=moe.num_experts if moe is not None else None,
        moe_grouped_gemm=config.moe_grouped_gemm,
        moe_use_legacy_grouped_gemm=config.moe_use_legacy_grouped_gemm,
        use_te_activation_func=True,
    )
    if moe is not None:
        mlp.submodules.router = Router
        mlp.module = NoisyExperts if moe.input_jitter else mlp.module
    return ModuleSpec(
        module=TransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=norm,
            self_attention=_attention(config, provider),
            self_attn_bda=_residual(config),
            pre_mlp_layernorm=norm,
            mlp=mlp,
            mlp_bda=_residual(config),
            sharded_state_dict_keys_map=fused_norms(config.architecture),
        ),
    )


def _attention(config: ModelConfig, provider: SpecProvider) -> ModuleSpec:
    params = {"attn_mask_type": AttnMaskType.causal}
    core, out = provider.core_attention(), AttentionOutput
    if config.architecture.mla is not None:
        latent = MLASelfAttentionSubmodules(core_attention=core, linear_proj=out)
        return ModuleSpec(module=LatentAttention, params=params, submodules=latent)
    query_norm, key_norm = _qk_norms(config)
    heads = SelfAttentionSubmodules(
        linear_qkv=QueryKeyValue,
        core_attention=core,
        linear_proj=out,
        q_layernorm=query_norm,
        k_layernorm=key_norm,
    )
    return ModuleSpec(module=SelfAttention, params=params, submodules=heads)


def _qk_norms(config: ModelConfig) -> tuple[Module, Module]:
    """The norms of queries and keys: of each head, or of all of them together."""
    architecture = config.architecture
    if architecture.qk_norm is None:
        return IdentityOp, IdentityOp
    if architecture.qk_norm == "head":
        return Norm, Norm
    heads = (architecture.num_attention_heads, architecture.num_query_groups)
    query, key = (ModuleSpec(module=WholeNorm, params={"heads": count}) for count in heads)
    return query, key


def _residual(config: ModelConfig) -> ModuleSpec | Callable[..., Any]:
    """What adds a sublayer's output to the residual stream."""
    if config.architecture.sandwich_norm:
        return ModuleSpec(module=NormedResidual, params={"config": config})
    if (scale := config.architecture.residual_scale) is not None:
        return ModuleSpec(module=ScaledResidual, params={"scale": scale})
    return get_bias_dropout_add


def block_spec(config: ModelConfig, layers: range) -> TransformerBlockSubmodules:
    """The modules of one pipeline chunk that holds the global layers `layers`."""
    return TransformerBlockSubmodules(
        layer_specs=[layer_spec(config, layer) for layer in layers], layer_norm=Norm
    )
