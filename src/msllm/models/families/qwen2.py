"""Qwen 1.5, 2 and 2.5: Llama with biases on q, k and v; and their mixture of experts."""

from __future__ import annotations

from msllm.models.families.decoder import experts, window
from msllm.models.families.family import Config, Family, Fields
from msllm.models.families.llama import SCALED_ROPE
from msllm.models.families.values import flag, optional_size, size
from msllm.models.weight_map import Gated, TensorNames

UNUSED_WINDOW = {"use_sliding_window": False}


def upper_window(config: Config) -> Fields:
    """Qwen's sliding window, which starts at layer `max_window_layers` unless layers are named."""
    found = window(config)
    first = optional_size(config, "max_window_layers")
    if found and config.get("layer_types") is None and first is not None:
        layers = tuple(range(first, size(config, "num_hidden_layers")))
        return {**found, "sliding_layers": layers} if layers else {"sliding_window": None}
    return found


def _qwen2(config: Config) -> Fields:
    return {"qkv_bias": True, "attention_out_bias": False, **upper_window(config)}


def _qwen2_moe(config: Config) -> Fields:
    return {
        **_qwen2(config),
        "qkv_bias": flag(config, "qkv_bias", True),
        "moe": experts(config, shared_expert_gate=True),
    }


_TRAINS = SCALED_ROPE | {"qkv bias", "sliding window"}
_SHARED = Gated(
    gate="mlp.shared_expert.gate_proj",
    up="mlp.shared_expert.up_proj",
    down="mlp.shared_expert.down_proj",
)


FAMILIES = (
    Family(
        name="qwen2",
        model_types=("qwen2",),
        defaults=UNUSED_WINDOW,
        fields=_qwen2,
        trains=_TRAINS,
        tensors=TensorNames(),
    ),
    Family(
        name="qwen2_moe",
        model_types=("qwen2_moe",),
        defaults={**UNUSED_WINDOW, "norm_topk_prob": False, "router_aux_loss_coef": 0.001},
        fields=_qwen2_moe,
        trains=_TRAINS
        | {
            "experts",
            "shared experts",
            "shared expert gate",
            "dense layers among experts",
            "router: scores not renormalized",
        },
        tensors=TensorNames(shared=_SHARED),
    ),
)
