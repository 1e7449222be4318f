"""Ling and Ring 2 (`bailing_moe`): grouped-query attention, half rotary, DeepSeek-V3's routing."""

from __future__ import annotations

from msllm.models.families.decoder import experts, groups
from msllm.models.families.family import Config, Family, Fields
from msllm.models.families.values import flag, optional_size


def _fields(config: Config) -> Fields:
    routing = groups(config)
    shared = optional_size(config, "moe_shared_expert_intermediate_size")
    if shared is not None:
        count = optional_size(config, "n_shared_experts") or 0
        routing["shared_expert_intermediate_size"] = count * shared
    return {
        "qkv_bias": flag(config, "use_qkv_bias"),
        "attention_out_bias": flag(config, "use_bias"),
        "mlp_bias": flag(config, "use_bias"),
        "qk_norm": "head" if flag(config, "use_qk_norm") else None,
        "moe": experts(
            config, expert_bias=flag(config, "moe_router_enable_expert_bias"), **routing
        ),
    }


FAMILIES = (
    Family(
        name="bailing_moe",
        model_types=("bailing_moe", "bailing_moe_v2"),
        fields=_fields,
    ),
)
