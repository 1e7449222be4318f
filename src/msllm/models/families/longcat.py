"""LongCat-Flash: a layer is two of latent attention + dense MLP beside one set of experts."""

from __future__ import annotations

from msllm.models.families.decoder import experts, latents
from msllm.models.families.family import Config, Family, Fields
from msllm.models.families.values import flag, whole


def _fields(config: Config) -> Fields:
    return {
        **latents(config),
        "sublayers": 2,
        "mtp_dense": True,
        "moe": experts(
            config,
            norm_topk_prob=False,
            expert_bias=True,
            router_bias=flag(config, "router_bias"),
            zero_experts=whole(config, "zero_expert_num", 0),
        ),
    }


FAMILIES = (
    Family(
        name="longcat_flash",
        model_types=("longcat_flash",),
        renames={
            "num_layers": "num_hidden_layers",
            "ffn_hidden_size": "intermediate_size",
            "expert_ffn_hidden_size": "moe_intermediate_size",
        },
        defaults={
            "rope_interleave": True,
            "rope_theta": 1e7,
            "rms_norm_eps": 1e-5,
            "mla_scale_q_lora": True,
        },
        fields=_fields,
    ),
)
