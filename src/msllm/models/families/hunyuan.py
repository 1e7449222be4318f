"""Hunyuan-Large: top-1 experts beside a shared one, keys and values shared by pairs of layers."""

from __future__ import annotations

from msllm.models.families.decoder import experts
from msllm.models.families.family import Config, Family, Fields
from msllm.models.families.values import flag, size, whole


def _fields(config: Config) -> Fields:
    width = size(config, "intermediate_size")
    shared = whole(config, "n_shared_experts", 0) * width
    sharing = whole(config, "cla_share_factor", 1) if flag(config, "use_cla") else 1
    return {
        "qk_norm": "head" if flag(config, "use_qk_norm") else None,
        "kv_sharing": sharing,
        "moe": experts(config, intermediate_size=width, shared_expert_intermediate_size=shared),
    }


FAMILIES = (
    Family(
        name="hunyuan",
        model_types=("hunyuan",),
        renames={"attention_head_dim": "head_dim"},
        defaults={"rms_norm_eps": 1e-5},
        fields=_fields,
    ),
)
