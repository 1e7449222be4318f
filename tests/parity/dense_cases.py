"""Tiny models of the dense families."""

from __future__ import annotations

from tests.parity.case import Case

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
LINEAR = {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}

CASES = {
    "llama": Case(model_type="llama"),
    "llama-rope3-tied": Case(
        model_type="llama", config={"rope_parameters": LLAMA3, "tie_word_embeddings": True}
    ),
    "llama-linear": Case(model_type="llama", config={"rope_parameters": LINEAR}),
    "mistral": Case(model_type="mistral", config={"sliding_window": 9}),
    "qwen2": Case(model_type="qwen2", config={"head_dim": None, "tie_word_embeddings": True}),
    "qwen3": Case(model_type="qwen3"),
}
