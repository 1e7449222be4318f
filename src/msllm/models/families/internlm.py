"""InternLM 1 (biases on q, k, v and o), 2 and 3 (none): Llama otherwise."""

from __future__ import annotations

from msllm.models.families.decoder import flag
from msllm.models.families.family import Config, Family, Fields
from msllm.models.families.llama import BIASES, SCALED_ROPE
from msllm.models.weight_map import TensorNames


def _attention_bias(config: Config) -> Fields:
    bias = flag(config, "bias")
    return {"qkv_bias": bias, "attention_out_bias": bias}


def _internlm3(config: Config) -> Fields:
    bias = flag(config, "bias") or flag(config, "attention_bias")
    return {
        "qkv_bias": bias or flag(config, "qkv_bias"),
        "attention_out_bias": bias,
        "mlp_bias": flag(config, "bias") or flag(config, "mlp_bias"),
    }


FAMILIES = (
    Family(
        name="internlm",
        model_types=("internlm",),
        defaults={"bias": True},
        fields=_attention_bias,
    ),
    Family(name="internlm2", model_types=("internlm2",), fields=_attention_bias),
    Family(
        name="internlm3",
        model_types=("internlm3",),
        defaults={"rms_norm_eps": 1e-5},
        fields=_internlm3,
        trains=SCALED_ROPE | BIASES,
        tensors=TensorNames(),
    ),
)
