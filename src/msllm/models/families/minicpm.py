"""MiniCPM: Llama with scaled embedding, residuals and logits; version 3 with latent attention."""

from __future__ import annotations

from msllm.models.families.decoder import experts, latents
from msllm.models.families.family import Config, Family, Fields
from msllm.models.families.llama import SCALED_ROPE
from msllm.models.families.values import number, size
from msllm.models.weight_map import TensorNames


def _scales(config: Config) -> Fields:
    """Scales in the style of muP (arXiv:2404.06395, section 3)."""
    hidden = size(config, "hidden_size")
    depth = size(config, "num_hidden_layers")
    return {
        "embedding_scale": number(config, "scale_emb", 1.0),
        "residual_scale": number(config, "scale_depth", depth**0.5) / depth**0.5,
        "logit_scale": number(config, "dim_model_base", hidden) / hidden,
    }


def _minicpm(config: Config) -> Fields:
    if not config.get("num_experts"):
        return _scales(config)
    moe = experts(config, intermediate_size=size(config, "intermediate_size"))
    return {**_scales(config), "moe": moe}


def _minicpm3(config: Config) -> Fields:
    return {**_scales(config), **latents(config)}


_TRAINS = SCALED_ROPE | {"embedding scale", "residual scale", "logit scale"}

FAMILIES = (
    Family(
        name="minicpm",
        model_types=("minicpm",),
        defaults={"tie_word_embeddings": True},
        fields=_minicpm,
        trains=_TRAINS,
        tensors=TensorNames(),
    ),
    Family(
        name="minicpm3",
        model_types=("minicpm3",),
        defaults={"tie_word_embeddings": True},
        fields=_minicpm3,
        trains=_TRAINS | {"latent attention"},
        tensors=TensorNames(),
    ),
)
