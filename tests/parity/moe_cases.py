"""Tiny models of the families with experts."""

from __future__ import annotations

from tests.parity.case import Case
from tests.parity.references.further_tokens import FurtherTokens

EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 40}
MIXTRAL = {"num_local_experts": 4, "num_experts_per_tok": 2}
EACH = {"moe": {"grouped_gemm": False}}

QWEN2_MOE = EXPERTS | {"head_dim": None, "shared_expert_intermediate_size": 88}

GLM4_MOE = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 40,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "num_nextn_predict_layers": 0,
}
GROUPS = {"n_group": 4, "topk_group": 2}
MINIMAX = {"num_local_experts": 6, "num_experts_per_tok": 3, "rotary_dim": 16}

GPT_OSS = {
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "sliding_window": 9,
    "swiglu_limit": 1.0,
}
"""The limit is one that these small numbers reach."""
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1.5e5,
    "factor": 4.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 32,
}

LONG = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0 + 0.1 * i for i in range(12)],
    "long_factor": [2.0 + i for i in range(12)],
    "short_mscale": 1.2,
    "long_mscale": 1.3,
    "original_max_position_embeddings": 100,
}
"""No sequence is longer: for those that are, transformers 5 uses the short factors all the same."""
PHIMOE = {
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "router_jitter_noise": 0.3,
    "input_jitter_noise": 0.1,
}

CASES = {
    "qwen3_moe": Case(model_type="qwen3_moe", config=EXPERTS | {"norm_topk_prob": True}),
    "qwen3_moe-plain": Case(model_type="qwen3_moe", config=EXPERTS | {"norm_topk_prob": False}),
    "qwen3_moe-square": Case(
        model_type="qwen3_moe", config=EXPERTS | {"moe_intermediate_size": 64}
    ),
    "qwen3_moe-each": Case(
        model_type="qwen3_moe", config=EXPERTS | {"norm_topk_prob": True}, run=EACH
    ),
    "mixtral": Case(model_type="mixtral", config=MIXTRAL),
    "mixtral-each": Case(model_type="mixtral", config=MIXTRAL, run=EACH),
    "qwen2_moe": Case(model_type="qwen2_moe", config=QWEN2_MOE),
    "qwen2_moe-some-dense": Case(
        model_type="qwen2_moe",
        config=QWEN2_MOE
        | {
            "decoder_sparse_step": 2,
            "mlp_only_layers": [3],
            "norm_topk_prob": True,
            "qkv_bias": False,
            "tie_word_embeddings": True,
            "num_key_value_heads": 4,
        },
        run=EACH,
    ),
    "glm4_moe": Case(
        model_type="glm4_moe",
        config=GLM4_MOE | {"use_qk_norm": True, "attention_bias": True},
    ),
    "glm4_moe-groups": Case(
        model_type="glm4_moe",
        config=GLM4_MOE
        | GROUPS
        | {"routed_scaling_factor": 2.5, "n_shared_experts": 1, "tie_word_embeddings": True},
    ),
    "glm4_moe-plain-scores": Case(
        model_type="glm4_moe",
        config=GLM4_MOE
        | GROUPS
        | {"num_experts_per_tok": 2, "norm_topk_prob": False, "first_k_dense_replace": 2},
        run=EACH,
    ),
    "glm4_moe-further": Case(
        model_type="glm4_moe",
        config=GLM4_MOE | {"num_nextn_predict_layers": 1, "attention_bias": True},
        reference=FurtherTokens,
    ),
    "minimax_m2": Case(model_type="minimax_m2", config=MINIMAX),
    "minimax_m2-square": Case(
        model_type="minimax_m2",
        config=MINIMAX | {"intermediate_size": 64, "tie_word_embeddings": True, "head_dim": 16},
        run=EACH,
    ),
    "gpt_oss": Case(model_type="gpt_oss", config=GPT_OSS | {"rope_parameters": YARN}),
    "gpt_oss-square": Case(
        model_type="gpt_oss",
        config=GPT_OSS
        | {
            "intermediate_size": 64,
            "num_hidden_layers": 3,
            "attention_bias": False,
            "tie_word_embeddings": True,
            "swiglu_limit": 7.0,
        },
    ),
    "phimoe": Case(
        model_type="phimoe",
        config=PHIMOE | {"rope_parameters": LONG, "attention_bias": True, "lm_head_bias": True},
        evaluated=True,
    ),
    "phimoe-no-biases": Case(
        model_type="phimoe",
        config=PHIMOE | {"sliding_window": 9, "head_dim": None, "num_hidden_layers": 3},
        run=EACH,
        evaluated=True,
    ),
}
