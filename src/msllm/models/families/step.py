"""Step-3.5: layers with a window have more heads and their own rotary settings; a gate a head."""

from __future__ import annotations

from msllm.models.families.decoder import experts
from msllm.models.families.family import Config, Family, Fields
from msllm.models.families.values import size

EXTRA = (
    "rotary settings of the layers with a window",
    "clamps of single layers' SwiGLU (swiglu_limits)",
)


def _sparse_layers(config: Config) -> Fields:
    """Older configs name the layers with experts in `moe_layers_enum`."""
    named = config.get("moe_layers_enum")
    if named is None:
        return {"first_k_dense_replace": 3}
    sparse = {int(i) for i in (named.split(",") if isinstance(named, str) else named)}
    count = size(config, "num_hidden_layers")
    return {"mlp_layer_types": ["sparse" if i in sparse else "dense" for i in range(count)]}


def _fields(config: Config) -> Fields:
    other = config.get("attention_other_setting") or {}
    if config.get("mlp_layer_types") is None:
        config = {**config, **_sparse_layers(config)}
    return {
        "norm_zero_centered": True,
        "qk_norm": "head",
        "attention_head_gate": True,
        "sliding_num_attention_heads": config.get(
            "num_sliding_attention_heads", other.get("num_attention_heads")
        ),
        "mtp_dense": True,
        "moe": experts(
            config,
            score_function="sigmoid",
            expert_bias=True,
            shared_expert_intermediate_size=size(config, "share_expert_dim"),
        ),
        "extra": EXTRA,
    }


FAMILIES = (
    Family(
        name="step3p5",
        model_types=("step3p5", "step3p7"),
        renames={
            "num_attention_groups": "num_key_value_heads",
            "moe_num_experts": "num_experts",
            "moe_top_k": "num_experts_per_tok",
            "share_expert_dims": "share_expert_dim",
        },
        defaults={"head_dim": 128, "rms_norm_eps": 1e-5},
        fields=_fields,
    ),
)
