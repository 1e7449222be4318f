"""Baichuan 1 and 2: Llama, at 13B with ALiBi; version 2 normalizes its output layer.

Configs do not say so outright: those of 13B give no `max_position_embeddings`, those of version 2
have a `z_loss_weight`.
"""

from __future__ import annotations

from msllm.models.families.family import Config, Family, Fields
from msllm.models.families.values import optional_size
from msllm.models.weight_map import TensorNames


def _fields(config: Config) -> Fields:
    alibi = "max_position_embeddings" not in config
    return {
        "position_embedding": "alibi" if alibi else "rope",
        "max_position_embeddings": optional_size(
            config, "model_max_length" if alibi else "max_position_embeddings"
        ),
        "normalized_head": "z_loss_weight" in config,
    }


FAMILIES = (
    Family(
        name="baichuan",
        model_types=("baichuan",),
        fields=_fields,
        tensors=TensorNames(qkv="self_attn.W_pack"),
    ),
)
