"""Tiny models of the families with latent attention, and of MiniCPM before it had that."""

from __future__ import annotations

from tests.parity.case import Case
from tests.parity.dense_cases import LINEAR, LONG, OWN_SIZES
from tests.parity.references.further_tokens import FurtherTokens
from tests.parity.references.minicpm import MiniCPM

SCALES = {"scale_emb": 7, "scale_depth": 1.9, "dim_model_base": 40}
LATENTS = {
    "head_dim": None,
    "num_key_value_heads": 4,
    "q_lora_rank": 36,
    "kv_lora_rank": 28,
    "qk_nope_head_dim": 20,
    "qk_rope_head_dim": 16,
    "v_head_dim": 12,
}
NO_QUERY_LATENT = ("q_lora_rank",)
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 8.0,
    "original_max_position_embeddings": 16,
    "beta_fast": 32,
    "beta_slow": 1,
}
EXPERTS = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 40,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 2.5,
}
GROUPS = {"n_group": 4, "topk_group": 2}
LIMITED = GROUPS | {"topk_method": "group_limited_greedy"}
DEEPSEEK = LATENTS | EXPERTS | {"num_nextn_predict_layers": 0}
EACH = {"moe": {"grouped_gemm": False}}

CASES = {
    "minicpm": Case(
        model_type="minicpm",
        config=OWN_SIZES | SCALES | {"tie_word_embeddings": True},
        reference=MiniCPM,
    ),
    "minicpm-untied": Case(
        model_type="minicpm", config={"head_dim": None, **SCALES}, reference=MiniCPM
    ),
    "minicpm3": Case(
        model_type="minicpm3", config=LATENTS | SCALES | {"tie_word_embeddings": True}
    ),
    "minicpm3-long": Case(
        model_type="minicpm3", config=LATENTS | SCALES | {"rope_parameters": LONG}
    ),
    "minicpm3-linear": Case(
        model_type="minicpm3",
        config=LATENTS
        | SCALES
        | {"rope_parameters": LINEAR, "max_position_embeddings": 32, "v_head_dim": 24},
    ),
    "minicpm3-whole-sequences": Case(
        model_type="minicpm3",
        config=LATENTS | SCALES,
        run={"layout": {"sequence_parallel": False}},
    ),
    "deepseek_v2-lite": Case(
        model_type="deepseek_v2",
        config=DEEPSEEK | {"routed_scaling_factor": 1.0},
        nulls=NO_QUERY_LATENT,
    ),
    "deepseek_v2": Case(
        model_type="deepseek_v2",
        config=DEEPSEEK
        | LIMITED
        | {"rope_parameters": YARN | {"mscale": 0.707, "mscale_all_dim": 0.707}},
    ),
    "deepseek_v2-each": Case(
        model_type="deepseek_v2",
        config=DEEPSEEK
        | LIMITED
        | {
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 64,
            "n_shared_experts": 1,
            "first_k_dense_replace": 0,
            "tie_word_embeddings": True,
        },
        run=EACH,
    ),
    "deepseek_v3": Case(
        model_type="deepseek_v3",
        config=DEEPSEEK
        | GROUPS
        | {"rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}},
    ),
    "deepseek_v3-yarn": Case(
        model_type="deepseek_v3",
        config=DEEPSEEK
        | GROUPS
        | {
            "rope_parameters": YARN | {"mscale": 1.3, "mscale_all_dim": 0.6},
            "num_experts_per_tok": 5,
            "v_head_dim": 24,
        },
    ),
    "deepseek_v3-further": Case(
        model_type="deepseek_v3",
        config=DEEPSEEK | GROUPS | {"num_nextn_predict_layers": 1},
        reference=FurtherTokens,
    ),
    "deepseek_v3-further-2": Case(
        model_type="deepseek_v3",
        config=DEEPSEEK | GROUPS | {"num_nextn_predict_layers": 2},
        reference=FurtherTokens,
        run=EACH,
    ),
    "deepseek_v3-plain": Case(
        model_type="deepseek_v3",
        config=DEEPSEEK
        | {
            "n_group": 1,
            "topk_group": 1,
            "num_experts_per_tok": 3,
            "norm_topk_prob": False,
            "rope_interleave": False,
            "tie_word_embeddings": True,
            "first_k_dense_replace": 3,
        },
        nulls=NO_QUERY_LATENT,
        run=EACH,
    ),
}
