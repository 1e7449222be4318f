"""A GPT with rotary embedding and experts, as Megatron's defaults make it; none is published."""

from __future__ import annotations

from msllm.models.families.decoder import experts
from msllm.models.families.family import Config, Family, Fields
from msllm.models.families.values import size


def _fields(config: Config) -> Fields:
    return {
        "norm": "LayerNorm",
        "activation": "gelu",
        "gated_mlp": False,
        "moe": experts(config, intermediate_size=size(config, "intermediate_size")),
    }


FAMILIES = (
    Family(
        name="gpt_moe",
        model_types=("gpt_moe",),
        defaults={"tie_word_embeddings": True, "rms_norm_eps": 1e-5},
        fields=_fields,
    ),
)
