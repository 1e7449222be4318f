"""DeepSeek-V4: compressed attention over one shared head, hyper-connections, hash-routed layers."""

from __future__ import annotations

from msllm.models.architecture import CompressedAttention, Rope, SparseAttention
from msllm.models.families.decoder import experts, rotary
from msllm.models.families.family import Config, Family, Fields
from msllm.models.families.values import names, number, size, whole

_KINDS = {
    "sliding_attention": "sliding",
    "compressed_sparse_attention": "sparse",
    "heavily_compressed_attention": "heavy",
    0: "sliding",
    4: "sparse",
    128: "heavy",
}


def _kinds(config: Config) -> tuple[str, ...]:
    """How each layer sees distant keys, from `layer_types` or the ratios older configs give."""
    count = size(config, "num_hidden_layers")
    given = config.get("layer_types") or config.get("compress_ratios")
    if given is None:
        rest = ["sparse" if i % 2 else "heavy" for i in range(max(count - 2, 0))]
        return (*["heavy"] * min(count, 2), *rest)
    return tuple(_KINDS[kind] for kind in given[:count])


def _hash_layers(config: Config) -> int:
    kinds = names(config, "mlp_layer_types")
    return whole(config, "num_hash_layers", 3) if kinds is None else kinds.count("hash_moe")


def _attention(config: Config) -> Fields:
    head = size(config, "head_dim")
    rotated = config.get("qk_rope_head_dim") or head * number(
        config, "partial_rotary_factor", 0.125
    )
    rope: Rope = rotary(config)["rope"]
    return {
        "rope": Rope(theta=rope.theta, partial_factor=rotated / head, interleaved=True),
        "compressed_attention": CompressedAttention(
            q_lora_rank=size(config, "q_lora_rank"),
            o_lora_rank=size(config, "o_lora_rank"),
            o_groups=size(config, "o_groups"),
            rope_head_dim=int(rotated),
            kinds=_kinds(config),  # type: ignore[arg-type]
        ),
        "sparse_attention": SparseAttention(
            index_n_heads=size(config, "index_n_heads"),
            index_head_dim=size(config, "index_head_dim"),
            index_topk=size(config, "index_topk"),
        ),
        "attention_sinks": True,
        "sliding_layers": None,
    }


def _fields(config: Config) -> Fields:
    return {
        **_attention(config),
        "swiglu_limit": number(config, "swiglu_limit", 0.0) or None,
        "hyper_connections": size(config, "hc_mult"),
        "moe": experts(
            config,
            score_function=config.get("score_function", "sqrtsoftplus"),
            expert_bias=True,
            hash_layers=_hash_layers(config),
        ),
        "extra": ("a second rotary embedding (compress_rope_theta) for compressed keys",),
    }


FAMILIES = (
    Family(
        name="deepseek_v4",
        model_types=("deepseek_v4",),
        renames={"moe_intermediate_size": "intermediate_size"},
        defaults={"hc_mult": 4, "o_groups": 8},
        fields=_fields,
    ),
)
