"""Mistral (sliding window) and Mixtral (experts in every layer)."""

from __future__ import annotations

from msllm.models.families.decoder import experts
from msllm.models.families.family import Config, Family, Fields
from msllm.models.families.llama import SCALED_ROPE
from msllm.models.families.values import size
from msllm.models.weight_map import Gated, TensorNames

MIXTRAL = TensorNames(
    router="block_sparse_moe.gate",
    expert=Gated(
        gate="block_sparse_moe.experts.{expert}.w1",
        up="block_sparse_moe.experts.{expert}.w3",
        down="block_sparse_moe.experts.{expert}.w2",
    ),
)


def _mixtral(config: Config) -> Fields:
    return {"moe": experts(config, intermediate_size=size(config, "intermediate_size"))}


FAMILIES = (
    Family(
        name="mistral",
        model_types=("mistral",),
        trains=SCALED_ROPE | {"sliding window"},
        tensors=TensorNames(),
    ),
    Family(
        name="mixtral",
        model_types=("mixtral",),
        defaults={"rope_theta": 1e6, "rms_norm_eps": 1e-5, "router_aux_loss_coef": 0.001},
        fields=_mixtral,
        trains=SCALED_ROPE | {"sliding window", "experts"},
        tensors=MIXTRAL,
    ),
)
