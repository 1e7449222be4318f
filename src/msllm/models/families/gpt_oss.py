"""gpt-oss: attention sinks, a window in every other layer, biases, a clamped SwiGLU of its own."""

from __future__ import annotations

from msllm.models.families.decoder import experts, window
from msllm.models.families.family import Config, Family, Fields
from msllm.models.families.llama import SCALED_ROPE
from msllm.models.families.values import number, size
from msllm.models.weight_map import Stacked, TensorNames


def _fields(config: Config) -> Fields:
    found = window(config)
    if found and config.get("layer_types") is None:
        found["sliding_layers"] = tuple(range(0, size(config, "num_hidden_layers"), 2))
    return {
        **found,
        "attention_sinks": True,
        "swiglu_limit": number(config, "swiglu_limit", 7.0),
        "swiglu_alpha": number(config, "swiglu_alpha", 1.702),
        "mlp_bias": True,
        "moe": experts(
            config,
            intermediate_size=size(config, "intermediate_size"),
            softmax_after_topk=True,
            router_bias=True,
            expert_linear_bias=True,
        ),
    }


_ROPE = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}

FAMILIES = (
    Family(
        name="gpt_oss",
        model_types=("gpt_oss",),
        defaults={
            "attention_bias": True,
            "rope_theta": 150000.0,
            "rms_norm_eps": 1e-5,
            "rope_parameters": _ROPE,
            "router_aux_loss_coef": 0.001,
        },
        fields=_fields,
        trains=SCALED_ROPE
        | {
            "attention output bias",
            "attention sinks",
            "expert bias",
            "experts",
            "mlp bias",
            "qkv bias",
            "router: bias",
            "sliding window",
            "swiglu alpha",
            "swiglu limit",
        },
        tensors=TensorNames(
            router="mlp.router",
            stacked=Stacked(gate_up="mlp.experts.gate_up_proj", down="mlp.experts.down_proj"),
        ),
    ),
)
