"""What msllm itself supports of a model: a level that tests prove, and features they cover.

`support.json` says for each model type how far tests have brought it; a test run writes it
(`pytest --update-support`), nobody types it. A model whose architecture has features beyond those
that its family's tests cover is listed and no more.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

from msllm.models.architecture import Architecture, MoE
from msllm.models.families import families

LISTED = "listed"
TRAINS = "trains"
LEVELS = (LISTED, TRAINS, "self-referenced", "proven")
"""From known, to trained, to equal with an own reference, to equal with a published one."""

MISSING_BACKENDS = ("fsdp2",)
"""Backends that recipes are published for and that this version does not have yet."""

REGISTRY = Path(__file__).with_name("support.json")


@cache
def proven_levels() -> dict[str, str]:
    """The level that tests proved for each model type; types without one are listed."""
    levels: dict[str, str] = json.loads(REGISTRY.read_text(encoding="utf-8"))
    return levels


def support(arch: Architecture | None) -> str:
    """The level of a model with this architecture; without a known shape it is listed."""
    if arch is None or untrained_features(arch):
        return LISTED
    return proven_levels().get(arch.model_type, LISTED)


def untrained_features(arch: Architecture) -> list[str]:
    """What keeps the model from its family's level: features that the tests do not cover."""
    family = families().get(arch.model_type)
    covered = family.trains if family else frozenset()
    return [*arch.extra, *sorted(features(arch) - covered)]


def missing_for(backend: str, cp: int) -> list[str]:
    """What a recipe needs that this version does not have, whatever the model.

    The tests hold this to what a run's own checks refuse.
    """
    needs = [f"the {backend} backend"] if backend in MISSING_BACKENDS else []
    return [*needs, "context parallelism"] if cp > 1 else needs


def features(arch: Architecture) -> frozenset[str]:
    """Names of what the architecture has beyond the plain decoder.

    Plain are RMSNorm, rotary embedding of the whole head in halves, SwiGLU, grouped queries, any
    head size, tied or untied embeddings.
    """
    rope = arch.rope
    present = {
        f"position embedding: {arch.position_embedding}": arch.position_embedding != "rope",
        f"rope: {(rope.scaling or {}).get('type')}": rope.scaling is not None,
        "partial rotary": rope.partial_factor != 1.0,
        "interleaved rotary": rope.interleaved,
        f"norm: {arch.norm}": arch.norm != "RMSNorm",
        "norm: 1 + w": arch.norm_zero_centered,
        "norms behind sublayers": arch.sandwich_norm,
        "embedding norm": arch.embedding_norm,
        f"activation: {arch.activation}": arch.activation != "silu",
        "mlp without gate": not arch.gated_mlp,
        f"qk norm: {arch.qk_norm}": arch.qk_norm is not None,
        "qkv bias": arch.qkv_bias,
        "attention output bias": arch.attention_out_bias,
        "mlp bias": arch.mlp_bias,
        "lm head bias": arch.lm_head_bias,
        "normalized lm head": arch.normalized_head,
        "sliding window": arch.sliding_window is not None,
        "layers without rotary": bool(arch.no_rope_layers),
        "attention sinks": arch.attention_sinks,
        "attention scale": arch.attention_scale is not None,
        "attention soft cap": arch.attention_softcap is not None,
        "logit soft cap": arch.logit_softcap is not None,
        "embedding scale": arch.embedding_scale is not None,
        "residual scale": arch.residual_scale is not None,
        "logit scale": arch.logit_scale is not None,
        "swiglu limit": arch.swiglu_limit is not None,
        "swiglu alpha": arch.swiglu_alpha is not None,
        "multi-token prediction": arch.num_nextn_predict_layers > 0,
        "layers of several kinds": arch.layer_types is not None,
        "attention output gate": arch.attention_output_gate or arch.attention_head_gate,
        "heads by layer": arch.sliding_num_attention_heads is not None,
        "keys and values of other layers": arch.kv_sharing > 1,
        "double layers": arch.sublayers > 1,
        "hyper-connections": arch.hyper_connections > 0,
        "latent attention": arch.mla is not None,
        "scaled latents": getattr(arch.mla, "scale_latents", False),
        "state space": arch.mamba is not None,
        "linear attention": arch.linear_attention is not None,
        "sparse attention": arch.sparse_attention is not None,
        "compressed attention": arch.compressed_attention is not None,
    }
    plain = frozenset(name for name, is_there in present.items() if is_there)
    return plain | (_moe_features(arch.moe) if arch.moe else frozenset())


def _moe_features(moe: MoE) -> frozenset[str]:
    present = {
        "experts": True,
        "shared experts": moe.shared_expert_intermediate_size > 0,
        "shared expert gate": moe.shared_expert_gate,
        "dense layers among experts": bool(moe.first_dense_layers or moe.dense_layers),
        f"router: {moe.score_function}": moe.score_function != "softmax",
        "router: scores not renormalized": not (moe.norm_topk_prob or moe.softmax_after_topk),
        # the one chosen score is then always 1, and its router learns from the balance alone
        "router: one renormalized score": moe.num_experts_per_tok == 1
        and moe.score_function == "softmax"
        and (moe.norm_topk_prob or moe.softmax_after_topk),
        "router: groups": moe.num_groups is not None,
        "router: scaled": moe.routed_scaling_factor != 1.0,
        "router: balancing bias": moe.expert_bias,
        "router: bias": moe.router_bias,
        "expert bias": moe.expert_linear_bias,
        "experts without weights": moe.zero_experts > 0,
        "experts by token id": moe.hash_layers > 0,
        "router: jitter": moe.input_jitter > 0,
    }
    return frozenset(name for name, is_there in present.items() if is_there)
