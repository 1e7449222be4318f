"""Qwen3: no biases, RMSNorm on each head's query and key; dense and mixture of experts."""

from __future__ import annotations

from msllm.models.families.decoder import experts
from msllm.models.families.family import Config, Family, Fields
from msllm.models.families.llama import SCALED_ROPE
from msllm.models.families.qwen2 import UNUSED_WINDOW, upper_window
from msllm.models.weight_map import TensorNames

_TRAINS = SCALED_ROPE | {"qk norm: head", "sliding window"}


def _qwen3(config: Config) -> Fields:
    return {"qk_norm": "head", **upper_window(config)}


def _qwen3_moe(config: Config) -> Fields:
    return {**_qwen3(config), "moe": experts(config)}


FAMILIES = (
    Family(
        name="qwen3",
        model_types=("qwen3",),
        defaults={"head_dim": 128, **UNUSED_WINDOW},
        fields=_qwen3,
        trains=_TRAINS,
        tensors=TensorNames(),
    ),
    Family(
        name="qwen3_moe",
        model_types=("qwen3_moe",),
        defaults={**UNUSED_WINDOW, "norm_topk_prob": False, "router_aux_loss_coef": 0.001},
        fields=_qwen3_moe,
        trains=_TRAINS | {"experts", "dense layers among experts"},
        tensors=TensorNames(),
    ),
)
