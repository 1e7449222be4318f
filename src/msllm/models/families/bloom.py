"""Bloom: LayerNorm with a further one behind the embedding, ALiBi, GELU, biases everywhere."""

from __future__ import annotations

from msllm.models.families.family import Config, Family, Fields
from msllm.models.families.values import optional_size, size


def _fields(config: Config) -> Fields:
    return {
        "intermediate_size": 4 * size(config, "hidden_size"),
        "max_position_embeddings": optional_size(config, "seq_length"),
        "position_embedding": "alibi",
        "norm": "LayerNorm",
        "embedding_norm": True,
        "activation": "gelu_tanh",
        "gated_mlp": False,
        "qkv_bias": True,
        "attention_out_bias": True,
        "mlp_bias": True,
    }


FAMILIES = (
    Family(
        name="bloom",
        model_types=("bloom",),
        renames={
            "n_layer": "num_hidden_layers",
            "n_head": "num_attention_heads",
            "n_embed": "hidden_size",
        },
        defaults={"tie_word_embeddings": True, "rms_norm_eps": 1e-5, "intermediate_size": 1},
        fields=_fields,
    ),
)
