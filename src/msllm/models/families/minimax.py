"""MiniMax-M2: norms over the whole query and key, half rotary, experts chosen with a bias."""

from __future__ import annotations

from dataclasses import replace

from msllm.models.families.decoder import ROUTED_BY_SIGMOID, experts
from msllm.models.families.family import Config, Family, Fields
from msllm.models.families.llama import SCALED_ROPE
from msllm.models.families.mistral import MIXTRAL
from msllm.models.families.values import flag, size


def _fields(config: Config) -> Fields:
    return {
        "qk_norm": "full" if flag(config, "use_qk_norm", True) else None,
        "moe": experts(
            config,
            intermediate_size=size(config, "intermediate_size"),
            score_function="sigmoid",
            expert_bias=True,
        ),
    }


FAMILIES = (
    Family(
        name="minimax_m2",
        model_types=("minimax_m2",),
        defaults={"head_dim": 128, "rope_theta": 5e6, "router_aux_loss_coef": 0.001},
        fields=_fields,
        trains=SCALED_ROPE | ROUTED_BY_SIGMOID | {"qk norm: full", "partial rotary"},
        tensors=replace(MIXTRAL, router_correction="block_sparse_moe.e_score_correction_bias"),
    ),
)
