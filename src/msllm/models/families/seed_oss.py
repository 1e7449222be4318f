"""Seed-OSS: Llama with biases on q, k and v, and a switch of its own for the output's."""

from __future__ import annotations

from msllm.models.families.family import Config, Family, Fields
from msllm.models.families.llama import BIASES, SCALED_ROPE
from msllm.models.families.values import flag
from msllm.models.weight_map import TensorNames


def _fields(config: Config) -> Fields:
    return {"attention_out_bias": flag(config, "attention_out_bias")}


FAMILIES = (
    Family(
        name="seed_oss",
        model_types=("seed_oss",),
        defaults={"head_dim": 128, "attention_bias": True},
        fields=_fields,
        trains=SCALED_ROPE | BIASES,
        tensors=TensorNames(),
    ),
)
