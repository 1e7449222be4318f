"""gpt-oss: attention sinks, a window in every other layer, biases, a clamped SwiGLU of its own."""

from __future__ import annotations

from msllm.models.families.decoder import experts, number, size, window
from msllm.models.families.family import Config, Family, Fields


def _fields(config: Config) -> Fields:
    found = window(config)
    if found and config.get("layer_types") is None:
        found["sliding_layers"] = tuple(range(0, size(config, "num_hidden_layers"), 2))
    return {
        **found,
        "attention_sinks": True,
        "swiglu_limit": number(config, "swiglu_limit", 7.0),
        "mlp_bias": True,
        "moe": experts(
            config,
            intermediate_size=size(config, "intermediate_size"),
            softmax_after_topk=True,
            router_bias=True,
            expert_linear_bias=True,
        ),
        "extra": ("the activation gate * sigmoid(1.702 gate) * (up + 1)",),
    }


FAMILIES = (
    Family(
        name="gpt_oss",
        model_types=("gpt_oss",),
        defaults={
            "attention_bias": True,
            "rope_theta": 150000.0,
            "rms_norm_eps": 1e-5,
            "router_aux_loss_coef": 0.001,
        },
        fields=_fields,
    ),
)
