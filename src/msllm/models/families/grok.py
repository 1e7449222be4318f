"""Grok-1, in the words of its Hugging Face ports: sandwich norms, soft caps, scaled ends."""

from __future__ import annotations

from msllm.models.families.decoder import experts
from msllm.models.families.family import Config, Family, Fields
from msllm.models.families.values import number, size


def _fields(config: Config) -> Fields:
    return {
        "activation": "gelu",
        "sandwich_norm": True,
        "attention_scale": number(config, "attn_output_multiplier", 0.0) or None,
        "attention_softcap": number(config, "max_attn_value", 30.0),
        "embedding_scale": number(config, "embedding_multiplier_scale", 1.0),
        "logit_scale": number(config, "output_multiplier_scale", 1.0),
        "moe": experts(
            config,
            intermediate_size=size(config, "intermediate_size"),
            norm_topk_prob=False,
        ),
    }


FAMILIES = (
    Family(
        name="grok",
        model_types=("grok-1",),
        defaults={"tie_word_embeddings": True, "rms_norm_eps": 1e-5},
        fields=_fields,
    ),
)
