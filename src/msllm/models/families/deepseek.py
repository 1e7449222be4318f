"""DeepSeek V2, V3 and V3.2: latent attention, shared and routed experts; V3.2 adds an indexer."""

from __future__ import annotations

import math

from msllm.models.architecture import SparseAttention
from msllm.models.families.decoder import (
    ROUTED_BY_SIGMOID,
    experts,
    groups,
    head_dim,
    latents,
    rotary,
)
from msllm.models.families.family import Config, Family, Fields
from msllm.models.families.llama import SCALED_ROPE
from msllm.models.families.values import flag, size
from msllm.models.weight_map import TensorNames


def attention_scale(config: Config) -> float | None:
    """Softmax scale that yarn's `mscale_all_dim` changes (arXiv:2309.00071, section 3.4).

    head_dim ** -0.5 times the square of 0.1 mscale_all_dim ln(factor) + 1, as in DeepSeek's own
    modelling code; None where it is plain.
    """
    scaling = rotary(config)["rope"].scaling or {}
    mscale, factor = scaling.get("mscale_all_dim"), scaling.get("factor", 1.0)
    if not mscale or factor <= 1.0:
        return None
    stretch: float = 0.1 * mscale * math.log(factor) + 1.0
    return head_dim(config) ** -0.5 * stretch * stretch


def _attention(config: Config) -> Fields:
    return {**latents(config), "attention_scale": attention_scale(config)}


def _v2(config: Config) -> Fields:
    limited = config.get("topk_method", "greedy") == "group_limited_greedy"
    routing = {**groups(config), "group_best": 1} if limited else {}
    # published code and transformers' disagree on what it means; no published model has it
    unknown = ("renormalized scores of DeepSeek V2",) * flag(config, "norm_topk_prob")
    return {**_attention(config), "moe": experts(config, **routing), "extra": unknown}


def _v3(config: Config) -> Fields:
    moe = experts(config, score_function="sigmoid", expert_bias=True, **groups(config))
    return {**_attention(config), "moe": moe}


def _v32(config: Config) -> Fields:
    indexer = SparseAttention(
        index_n_heads=size(config, "index_n_heads"),
        index_head_dim=size(config, "index_head_dim"),
        index_topk=size(config, "index_topk"),
    )
    return {**_v3(config), "sparse_attention": indexer}


_TRAINS = SCALED_ROPE | {
    "latent attention",
    "interleaved rotary",
    "attention scale",
    "shared experts",
    "dense layers among experts",
}

FAMILIES = (
    Family(
        name="deepseek_v2",
        model_types=("deepseek_v2",),
        renames={"aux_loss_alpha": "router_aux_loss_coef"},
        defaults={"rope_interleave": True, "norm_topk_prob": False},
        fields=_v2,
        trains=_TRAINS
        | {"experts", "router: scores not renormalized", "router: groups", "router: scaled"},
        tensors=TensorNames(),
    ),
    Family(
        name="deepseek_v3",
        model_types=("deepseek_v3",),
        defaults={"rope_interleave": True, "first_k_dense_replace": 3},
        fields=_v3,
        trains=_TRAINS | ROUTED_BY_SIGMOID | {"multi-token prediction"},
        tensors=TensorNames(),
    ),
    Family(
        name="deepseek_v32",
        model_types=("deepseek_v32",),
        defaults={"rope_interleave": True, "first_k_dense_replace": 3},
        fields=_v32,
    ),
)
