"""Tiny configs of every family that transformers has natively, as arguments of its config class."""

from __future__ import annotations

from typing import Any

import pytest

_SHAPE = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 80,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
_LATENT = {
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "num_key_value_heads": 4,
}
_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 40}
_ROUTED = {**_EXPERTS, "n_routed_experts": 8, "n_shared_experts": 2}
_GROUPS = {"n_group": 2, "topk_group": 1}
_INDEXER = {"index_n_heads": 4, "index_head_dim": 16, "index_topk": 8}
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 40.0,
    "original_max_position_embeddings": 512,
    "mscale": 0.707,
    "mscale_all_dim": 0.707,
}
_LINEAR = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
_MAMBA = {"num_heads": 8, "head_dim": 16, "state_size": 16, "n_groups": 2}
_V4 = {
    **_EXPERTS, **_INDEXER, "n_routed_experts": 8, "q_lora_rank": 24, "head_dim": 32,
    "o_groups": 2, "o_lora_rank": 12, "num_hidden_layers": 6, "hc_mult": 2,
    "num_key_value_heads": 1, "sliding_window": 16,
}  # fmt: skip

VARIANTS: dict[str, list[dict[str, Any]]] = {
    "llama": [
        {},
        {"attention_bias": True, "mlp_bias": True, "head_dim": 32},
        {"tie_word_embeddings": True, "num_key_value_heads": None},
    ],
    "mistral": [{"sliding_window": 32}, {"head_dim": 32, "sliding_window": None}],
    "qwen2": [
        {"tie_word_embeddings": True},
        {"use_sliding_window": True, "sliding_window": 32, "max_window_layers": 2},
    ],
    "qwen3": [{"head_dim": 32}, {"head_dim": 32, "attention_bias": True}],
    "gemma": [{"head_dim": 32}],
    "gemma2": [{"head_dim": 32, "sliding_window": 32, "query_pre_attn_scalar": 144}],
    "phi3": [{}],
    "seed_oss": [{"head_dim": 32}, {"head_dim": 32, "attention_out_bias": True}],
    "internlm3": [{"head_dim": 32}, {"head_dim": 16, "attention_bias": True, "mlp_bias": True}],
    "minicpm3": [_LATENT],
    "qwen2_moe": [{**_EXPERTS, "num_experts": 8, "shared_expert_intermediate_size": 48}],
    "qwen3_moe": [
        {**_EXPERTS, "num_experts": 8, "head_dim": 32},
        {**_EXPERTS, "num_experts": 8, "mlp_only_layers": [1], "decoder_sparse_step": 2},
    ],
    "mixtral": [{"num_local_experts": 8}],
    "deepseek_v2": [
        {**_ROUTED, **_LATENT, "first_k_dense_replace": 1, "rope_parameters": _YARN},
        {
            **_ROUTED, **_LATENT, **_GROUPS,
            "q_lora_rank": None, "topk_method": "group_limited_greedy",
        },
    ],
    "deepseek_v3": [
        {**_ROUTED, **_LATENT, **_GROUPS},
        {**_ROUTED, **_LATENT, **_GROUPS, "attention_bias": True, "rope_parameters": _YARN},
    ],
    "deepseek_v32": [{**_ROUTED, **_LATENT, **_GROUPS, **_INDEXER}],
    "deepseek_v4": [_V4, {**_V4, "compress_ratios": [0, 0, 4, 128, 4, 128]}],
    "glm": [{"head_dim": 32}, {"head_dim": 16, "attention_bias": False}],
    "glm4": [{"head_dim": 32}],
    "glm4_moe": [
        {**_ROUTED, "head_dim": 32, "attention_bias": True},
        {**_ROUTED, "head_dim": 32, "use_qk_norm": True},
    ],
    "glm_moe_dsa": [
        {**_ROUTED, **_LATENT, **_INDEXER, "num_hidden_layers": 8},
        {
            **_ROUTED, **_LATENT, **_INDEXER, "num_hidden_layers": 8,
            "index_topk_freq": 4, "index_skip_topk_offset": 3,
        },
    ],
    "gpt_oss": [{"num_local_experts": 8, "num_experts_per_tok": 2, "head_dim": 32}],
    "phimoe": [
        {"num_local_experts": 8},
        {"num_local_experts": 8, "attention_bias": True, "lm_head_bias": True},
    ],
    "minimax_m2": [
        {"num_local_experts": 8, "num_experts_per_tok": 2, "head_dim": 32, "rotary_dim": 16}
    ],
    "qwen3_next": [
        {
            **_EXPERTS, **_LINEAR,
            "num_experts": 8, "shared_expert_intermediate_size": 48, "head_dim": 32,
        }
    ],
    "bloom": [{"n_layer": 3, "n_head": 4}],
    "mamba2": [_MAMBA, {**_MAMBA, "use_bias": True, "tie_word_embeddings": True}],
    "nemotron_h": [
        {
            "layers_block_type": ["linear_attention", "mlp", "full_attention", "mlp"],
            "mamba_num_heads": 8, "mamba_head_dim": 16, "ssm_state_size": 16, "n_groups": 2,
            "head_dim": 16,
        }
    ],
    "longcat_flash": [
        {
            **_LATENT, "num_layers": 3, "ffn_hidden_size": 80, "expert_ffn_hidden_size": 40,
            "moe_topk": 2, "n_routed_experts": 8, "zero_expert_num": 0,
        }
    ],
}  # fmt: skip
"""Arguments over the common shape, by model type."""

_OWN_WORDS = {
    "bloom": ("vocab_size", "hidden_size"),
    "mamba2": ("vocab_size", "hidden_size", "num_hidden_layers"),
    "nemotron_h": tuple(set(_SHAPE) - {"num_hidden_layers"}),
    "longcat_flash": tuple(set(_SHAPE) - {"num_hidden_layers", "intermediate_size"}),
}
"""Parts of the common shape that families with words of their own take."""


def cases() -> list[Any]:
    """Every variant as a test's parameter: (model type, arguments)."""
    return [
        pytest.param(model_type, _arguments(model_type, variant), id=f"{model_type}-{number}")
        for model_type, variants in VARIANTS.items()
        for number, variant in enumerate(variants)
    ]


def _arguments(model_type: str, variant: dict[str, Any]) -> dict[str, Any]:
    shape = {key: _SHAPE[key] for key in _OWN_WORDS.get(model_type, _SHAPE)}
    return {**shape, **variant}
