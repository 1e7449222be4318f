"""GLM-4 (interleaved rotary on half of each head), 4.5 (experts) and 5 (latent, indexed attention).

`chatglm` is the GLM-4 of before transformers had it.
"""

from __future__ import annotations

from dataclasses import replace

from msllm.models.architecture import SparseAttention
from msllm.models.families.decoder import ROUTED_BY_SIGMOID, experts, groups, latents, rotary
from msllm.models.families.family import Config, Family, Fields
from msllm.models.families.llama import SCALED_ROPE
from msllm.models.families.values import flag, names, size, whole
from msllm.models.weight_map import Gated, TensorNames

_FUSED = TensorNames(
    dense=Gated(gate="mlp.gate_up_proj", up="mlp.gate_up_proj", down="mlp.down_proj")
)
_TRAINS = SCALED_ROPE | {"qkv bias", "partial rotary", "interleaved rotary"}


def _glm(config: Config) -> Fields:
    return {
        "rope": replace(rotary(config)["rope"], interleaved=True),
        "attention_out_bias": False,
        "mlp_bias": False,
    }


def _glm4(config: Config) -> Fields:
    return {**_glm(config), "sandwich_norm": True}


def _glm4_moe(config: Config) -> Fields:
    return {
        "attention_out_bias": False,
        "qk_norm": "head" if flag(config, "use_qk_norm") else None,
        "moe": experts(config, score_function="sigmoid", expert_bias=True, **groups(config)),
    }


def _indexer_layers(config: Config) -> tuple[int, ...] | None:
    """Layers with an indexer of their own; the others use the choice of the last of those."""
    count = size(config, "num_hidden_layers")
    kinds = names(config, "indexer_types")
    frequency = max(whole(config, "index_topk_freq", 1), 1)
    offset = whole(config, "index_skip_topk_offset", 2)
    if kinds is not None:
        own = [i for i, kind in enumerate(kinds[:count]) if kind == "full"]
    else:
        own = [i for i in range(count) if max(i - offset + 1, 0) % frequency == 0]
    return None if len(own) == count else tuple(own)


def _glm_moe_dsa(config: Config) -> Fields:
    return {
        **latents(config),
        "sparse_attention": SparseAttention(
            index_n_heads=size(config, "index_n_heads"),
            index_head_dim=size(config, "index_head_dim"),
            index_topk=size(config, "index_topk"),
            indexer_layers=_indexer_layers(config),
        ),
        "moe": experts(config, score_function="sigmoid", expert_bias=True, **groups(config)),
    }


_GLM4_DEFAULTS = {
    "partial_rotary_factor": 0.5,
    "attention_bias": True,
    "head_dim": 128,
    "rms_norm_eps": 1.5625e-7,
}

FAMILIES = (
    Family(
        name="glm",
        model_types=("glm",),
        defaults=_GLM4_DEFAULTS,
        fields=_glm,
        trains=_TRAINS,
        tensors=_FUSED,
    ),
    Family(
        name="glm4",
        model_types=("glm4",),
        defaults=_GLM4_DEFAULTS,
        fields=_glm4,
        trains=_TRAINS | {"norms behind sublayers"},
        tensors=_FUSED,
    ),
    Family(
        name="glm4_moe",
        model_types=("glm4_moe",),
        defaults={"partial_rotary_factor": 0.5, "rms_norm_eps": 1e-5},
        fields=_glm4_moe,
        trains=SCALED_ROPE
        | ROUTED_BY_SIGMOID
        | {
            "qkv bias",
            "partial rotary",
            "qk norm: head",
            "shared experts",
            "dense layers among experts",
            "multi-token prediction",
        },
        tensors=TensorNames(),
    ),
    Family(
        name="glm_moe_dsa",
        model_types=("glm_moe_dsa",),
        defaults={"rope_interleave": True, "first_k_dense_replace": 3, "rms_norm_eps": 1e-5},
        fields=_glm_moe_dsa,
    ),
)
