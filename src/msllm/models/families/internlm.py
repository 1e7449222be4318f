"""InternLM 1 (biases on q, k, v and o), 2 and 3 (none): Llama otherwise."""

from __future__ import annotations

from msllm.models.architecture import Rope
from msllm.models.families.family import Config, Family, Fields
from msllm.models.families.llama import BIASES, SCALED_ROPE
from msllm.models.families.values import flag, number
from msllm.models.weight_map import Gated, TensorNames

_GROUPED = TensorNames(
    embedding="model.tok_embeddings",
    head="output",
    input_norm="attention_norm",
    mlp_norm="ffn_norm",
    qkv="attention.wqkv",
    qkv_grouped=True,
    out="attention.wo",
    dense=Gated(gate="feed_forward.w1", up="feed_forward.w3", down="feed_forward.w2"),
)


def _attention_bias(config: Config) -> Fields:
    bias = flag(config, "bias")
    return {"qkv_bias": bias, "attention_out_bias": bias}


def _internlm(config: Config) -> Fields:
    found, rotary = _attention_bias(config), config.get("rotary")
    if rotary:  # the first version's own words for it
        factor = number(rotary, "scaling_factor", 1.0)
        scaling = {"type": "dynamic", "factor": factor} if rotary.get("type") == "dynamic" else None
        found["rope"] = Rope(theta=number(rotary, "base", 10000.0), scaling=scaling)
    return found


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
        fields=_internlm,
        trains=SCALED_ROPE | {"qkv bias", "attention output bias"},
        tensors=TensorNames(),
    ),
    Family(
        name="internlm2",
        model_types=("internlm2",),
        fields=_attention_bias,
        trains=SCALED_ROPE | {"qkv bias", "attention output bias"},
        tensors=_GROUPED,
    ),
    Family(
        name="internlm3",
        model_types=("internlm3",),
        defaults={"rms_norm_eps": 1e-5},
        fields=_internlm3,
        trains=SCALED_ROPE | BIASES,
        tensors=TensorNames(),
    ),
)
