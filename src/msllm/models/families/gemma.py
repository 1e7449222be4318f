"""Gemma 1 and 2: GeGLU, norms stored as 1 + w, scaled embedding; 2 adds norms and soft caps."""

from __future__ import annotations

from msllm.models.families.decoder import activation, window
from msllm.models.families.family import Config, Family, Fields
from msllm.models.families.values import flag, number, size
from msllm.models.weight_map import TensorNames

_GEMMA = frozenset({"norm: 1 + w", "activation: gelu_tanh", "embedding scale"})
_GEMMA2 = _GEMMA | {
    "norms behind sublayers",
    "sliding window",
    "attention scale",
    "attention soft cap",
    "logit soft cap",
}
_SANDWICH = TensorNames(
    mlp_norm="pre_feedforward_layernorm",
    attention_post_norm="post_attention_layernorm",
    mlp_post_norm="post_feedforward_layernorm",
)


def _gemma(config: Config) -> Fields:
    # transformers takes the tanh form whatever `hidden_act` says, unless hidden_activation is set
    act = config.get("hidden_activation") or "gelu_pytorch_tanh"
    return {
        "activation": activation({"hidden_act": act}),
        "norm_zero_centered": True,
        "embedding_scale": size(config, "hidden_size") ** 0.5,
        "extra": ("attention in both directions",) * flag(config, "use_bidirectional_attention"),
    }


def _gemma2(config: Config) -> Fields:
    found = window(config)
    if found and config.get("layer_types") is None:
        found["sliding_layers"] = tuple(range(0, size(config, "num_hidden_layers"), 2))
    return {
        **_gemma(config),
        **found,
        "sandwich_norm": True,
        "attention_scale": number(config, "query_pre_attn_scalar", 256, above=0) ** -0.5,
        "attention_softcap": number(config, "attn_logit_softcapping", 0) or None,
        "logit_softcap": number(config, "final_logit_softcapping", 0) or None,
    }


_DEFAULTS = {"tie_word_embeddings": True, "head_dim": 256}

FAMILIES = (
    Family(
        name="gemma",
        model_types=("gemma",),
        defaults=_DEFAULTS,
        fields=_gemma,
        trains=_GEMMA,
        tensors=TensorNames(),
    ),
    Family(
        name="gemma2",
        model_types=("gemma2",),
        defaults=_DEFAULTS,
        fields=_gemma2,
        trains=_GEMMA2,
        tensors=_SANDWICH,
    ),
)
