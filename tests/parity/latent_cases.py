"""Tiny models of the families with latent attention, and of MiniCPM before it had that."""

from __future__ import annotations

from tests.parity.case import Case
from tests.parity.dense_cases import LINEAR, LONG, OWN_SIZES
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
NO_QUERY_LATENT = {"q_lora_rank": None}

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
}
