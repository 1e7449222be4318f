"""Phi-3.5: mini is Llama with longrope; MoE has LayerNorm, biases and SparseMixer routing."""

from __future__ import annotations

from msllm.models.families.decoder import experts
from msllm.models.families.family import Config, Family, Fields
from msllm.models.families.mistral import MIXTRAL
from msllm.models.families.values import flag, number, size
from msllm.models.weight_map import Gated, TensorNames

_FUSED = TensorNames(
    qkv="self_attn.qkv_proj",
    dense=Gated(gate="mlp.gate_up_proj", up="mlp.gate_up_proj", down="mlp.down_proj"),
)


def _phimoe(config: Config) -> Fields:
    return {
        "norm": "LayerNorm",
        "lm_head_bias": flag(config, "lm_head_bias"),
        "moe": experts(
            config,
            intermediate_size=size(config, "intermediate_size"),
            score_function="sparsemixer",
            norm_topk_prob=False,
            input_jitter=number(config, "input_jitter_noise", 0.0),
            router_jitter=number(config, "router_jitter_noise", 0.01),
        ),
    }


_TRAINS = frozenset({"rope: longrope", "sliding window"})

FAMILIES = (
    Family(
        name="phi3",
        model_types=("phi3",),
        defaults={"rms_norm_eps": 1e-5},
        trains=_TRAINS | {"partial rotary"},
        tensors=_FUSED,
    ),
    Family(
        name="phimoe",
        model_types=("phimoe",),
        defaults={"rms_norm_eps": 1e-5, "rope_theta": 1e6},
        fields=_phimoe,
        trains=_TRAINS
        | {
            "attention output bias",
            "experts",
            "lm head bias",
            "norm: LayerNorm",
            "qkv bias",
            "router: jitter",
            "router: scores not renormalized",
            "router: sparsemixer",
        },
        tensors=MIXTRAL,
    ),
)
