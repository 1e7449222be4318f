"""Tiny models with one feature each, as arguments of `Architecture`."""

from __future__ import annotations

from typing import Any

BASE: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 128, "num_layers": 3, "num_attention_heads": 4,
    "num_query_groups": 2, "head_dim": 32, "intermediate_size": 352, "vocab_size": 512,
    "max_position_embeddings": 512,
}  # fmt: skip
MOE = {"num_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 96}
LATENTS = {
    "q_lora_rank": 96, "kv_lora_rank": 64, "qk_nope_head_dim": 32, "qk_rope_head_dim": 16,
    "v_head_dim": 24,
}  # fmt: skip
LATENT = BASE | {"num_query_groups": 4, "head_dim": 48, "mla": LATENTS}
SHAPES: dict[str, dict[str, Any]] = {
    "llama": BASE,
    "mistral": BASE | {"model_type": "mistral", "sliding_window": 64},
    "qwen2": BASE | {"model_type": "qwen2", "qkv_bias": True, "tie_word_embeddings": True},
    "qwen3": BASE | {"model_type": "qwen3", "qk_norm": "head", "num_attention_heads": 8},
    "gemma2": BASE
    | {
        "model_type": "gemma2",
        "sandwich_norm": True,
        "norm_zero_centered": True,
        "activation": "gelu_tanh",
        "attention_softcap": 50.0,
        "logit_softcap": 30.0,
        "embedding_scale": 11.3,
        "sliding_window": 64,
        "sliding_layers": (0, 2),
        "tie_word_embeddings": True,
    },
    "biases": BASE | {"qkv_bias": True, "attention_out_bias": True, "mlp_bias": True},
    "wide-capped": BASE | {"vocab_size": 20_000, "num_layers": 1, "logit_softcap": 30.0},
    "wide": BASE | {"vocab_size": 20_000, "num_layers": 1},
    "moe": BASE | {"model_type": "qwen3_moe", "qk_norm": "head", "moe": MOE},
    "shared": BASE
    | {
        "model_type": "qwen2_moe",
        "moe": MOE | {"shared_expert_intermediate_size": 288, "shared_expert_gate": True},
    },
    "whole-norm": BASE | {"model_type": "minimax_m2", "qk_norm": "full"},
    "sinks": BASE
    | {
        "model_type": "gpt_oss",
        "qkv_bias": True,
        "attention_out_bias": True,
        "mlp_bias": True,
        "attention_sinks": True,
        "sliding_window": 64,
        "sliding_layers": (0, 2),
        "swiglu_limit": 7.0,
        "swiglu_alpha": 1.702,
        "moe": MOE | {"router_bias": True, "expert_linear_bias": True},
    },
    "drawn": BASE
    | {
        "model_type": "phimoe",
        "norm": "LayerNorm",
        "lm_head_bias": True,
        "moe": MOE | {"score_function": "sparsemixer", "input_jitter": 0.01},
    },
    "latent": LATENT | {"model_type": "minicpm3", "mla": {**LATENTS, "q_lora_rank": None}},
    "deepseek": LATENT
    | {
        "model_type": "deepseek_v3",
        "moe": {**MOE, "shared_expert_intermediate_size": 96, "first_dense_layers": 1},
        "num_nextn_predict_layers": 1,
    },
}
