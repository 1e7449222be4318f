"""Qwen3-Next: three layers of gated delta net to one of gated attention, experts in all."""

from __future__ import annotations

from msllm.models.architecture import LinearAttention
from msllm.models.families.decoder import experts
from msllm.models.families.family import Config, Family, Fields
from msllm.models.families.values import names, size, whole


def layer_types(config: Config) -> tuple[str, ...]:
    """Kind of each layer, from `layer_types` or from every how many layers attention is full."""
    count = size(config, "num_hidden_layers")
    interval = whole(config, "full_attention_interval", 4)
    given = names(config, "layer_types")
    if given is None:
        full = [(i + 1) % interval == 0 for i in range(count)]
    else:
        full = [kind == "full_attention" for kind in given[:count]]
    return tuple("attention" if f else "linear_attention" for f in full)


def _fields(config: Config) -> Fields:
    return {
        "norm_zero_centered": True,
        "qk_norm": "head",
        "attention_output_gate": True,
        "layer_types": layer_types(config),
        "linear_attention": LinearAttention(
            num_key_heads=size(config, "linear_num_key_heads"),
            num_value_heads=size(config, "linear_num_value_heads"),
            key_head_dim=size(config, "linear_key_head_dim"),
            value_head_dim=size(config, "linear_value_head_dim"),
            conv_kernel=size(config, "linear_conv_kernel_dim"),
        ),
        "moe": experts(config, shared_expert_gate=True),
    }


FAMILIES = (
    Family(
        name="qwen3_next",
        model_types=("qwen3_next",),
        defaults={
            "head_dim": 256,
            "partial_rotary_factor": 0.25,
            "linear_num_key_heads": 16,
            "linear_num_value_heads": 32,
            "linear_key_head_dim": 128,
            "linear_value_head_dim": 128,
            "linear_conv_kernel_dim": 4,
            "router_aux_loss_coef": 0.001,
        },
        fields=_fields,
    ),
)
