"""MiniMax-M2: norms over the whole query and key, half rotary, experts chosen with a bias."""

from __future__ import annotations

from msllm.models.families.decoder import experts, flag, size
from msllm.models.families.family import Config, Family, Fields


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
    ),
)
