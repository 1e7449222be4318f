"""The first Qwen: Llama with biases on q, k and v, in words of its own.

Its dynamic NTK and log-n scaling act only when generating beyond the trained length.
"""

from __future__ import annotations

from msllm.models.families.family import Config, Family, Fields
from msllm.models.families.llama import BIASES
from msllm.models.families.values import flag, size
from msllm.models.weight_map import Gated, TensorNames

_NAMES = TensorNames(
    embedding="transformer.wte",
    final_norm="transformer.ln_f",
    layer="transformer.h.{layer}.",
    input_norm="ln_1",
    mlp_norm="ln_2",
    qkv="attn.c_attn",
    out="attn.c_proj",
    dense=Gated(gate="mlp.w2", up="mlp.w1", down="mlp.c_proj"),
)


def _fields(config: Config) -> Fields:
    bias = not flag(config, "no_bias", True)
    return {
        "qkv_bias": True,
        "attention_out_bias": bias,
        "mlp_bias": bias,
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
        trains=BIASES,
        tensors=_NAMES,
    ),
)
