"""The first Qwen: Llama with biases on q, k and v, in words of its own.

Its dynamic NTK and log-n scaling act only when generating beyond the trained length.
"""

from __future__ import annotations

from msllm.models.families.decoder import size
from msllm.models.families.family import Config, Family, Fields


def _fields(config: Config) -> Fields:
    return {
        "qkv_bias": True,
        # the published size counts the gate and the up projection together
        "intermediate_size": size(config, "intermediate_size") // 2,
    }


FAMILIES = (
    Family(
        name="qwen",
        model_types=("qwen",),
        renames={
            "kv_channels": "head_dim",
            "rotary_emb_base": "rope_theta",
            "rotary_pct": "partial_rotary_factor",
        },
        fields=_fields,
    ),
)
