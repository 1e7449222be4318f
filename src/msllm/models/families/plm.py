"""PLM: latent attention without compressed queries, squared-ReLU MLP without a gate."""

from __future__ import annotations

from msllm.models.families.decoder import latents
from msllm.models.families.family import Config, Family, Fields


def _fields(config: Config) -> Fields:
    return {**latents(config), "gated_mlp": False}


FAMILIES = (
    Family(
        name="plm",
        model_types=("plm",),
        defaults={"hidden_act": "relu2", "tie_word_embeddings": True, "rope_interleave": True},
        fields=_fields,
    ),
)
