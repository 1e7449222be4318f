"""Configs with values of a wrong kind or size are refused, each with the key that is wrong."""

from __future__ import annotations

import math

import pytest

from msllm.errors import InputError
from msllm.models.hf_config import architecture_from_config

DENSE = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 300,
}
EXPERTS = DENSE | {
    "model_type": "qwen3_moe",
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
}
LATENT = DENSE | {
    "model_type": "deepseek_v3",
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 16,
}
GEMMA = DENSE | {"model_type": "gemma2"}
YARN = {"rope_type": "yarn", "factor": 2.0}
WRONG = [
    *((DENSE, "rope_scaling", value) for value in (5, "yarn", [1])),
    *((DENSE, "rope_parameters", value) for value in (5, "yarn", {"full_attention": 5})),
    *((DENSE, "rope_scaling", {"rope_type": kind, "factor": 2.0}) for kind in (["yarn"], {}, 5)),
    *((LATENT, "rope_scaling", YARN | {"mscale_all_dim": value}) for value in ("x", math.nan)),
    *((DENSE, "rope_theta", value) for value in ("x", [1], math.nan, -1, 10**400)),
    *((DENSE, "partial_rotary_factor", value) for value in ("a", -1, math.nan, 2)),
    *((DENSE, "hidden_act", value) for value in (["silu"], {"a": 1}, 5)),
    *((DENSE | {"sliding_window": 8}, "layer_types", value) for value in (5, {"a": 1}, [1])),
    *((DENSE, "sliding_window", value) for value in ("a", [8], math.nan, -5, 8.5)),
    *((DENSE, "rms_norm_eps", value) for value in (-1, math.nan, math.inf, "a")),
    *((DENSE, "num_nextn_predict_layers", value) for value in (-1, math.nan, 10**9, 0.5)),
    *((DENSE, "tie_word_embeddings", value) for value in ("abc", 5, [])),
    *((DENSE, "num_hidden_layers", value) for value in (10**9, 10**5, 2.0, True, -1)),
    *((DENSE, "num_key_value_heads", value) for value in (10**9, 10**400)),
    *((DENSE, "hidden_size", value) for value in (10**9, 10**400)),
    *((EXPERTS, "num_experts", value) for value in (10**9, "8")),
    *((EXPERTS, "mlp_only_layers", value) for value in (5, ["a"])),
    *((EXPERTS, "decoder_sparse_step", value) for value in (0, math.nan, math.inf, "a")),
    *(
        (LATENT, key, value)
        for key in ("n_group", "topk_group", "first_k_dense_replace", "n_shared_experts")
        for value in (math.nan, math.inf, -1, "a")
    ),
    *((GEMMA, "query_pre_attn_scalar", value) for value in (0, -1, "a")),
]


@pytest.mark.parametrize("config", [DENSE, EXPERTS, LATENT, GEMMA], ids=lambda c: c["model_type"])
def test_what_is_damaged_below_is_read(config):
    assert architecture_from_config(config).num_layers == 2


@pytest.mark.parametrize(
    ("config", "key", "value"), WRONG, ids=[f"{key}-{n}" for n, (_, key, _) in enumerate(WRONG)]
)
def test_wrong_values(config, key, value):
    with pytest.raises(InputError) as error:
        architecture_from_config(config | {key: value})
    assert any(word in str(error.value) for word in (key, "full_attention"))


def test_layers_with_too_many_parts():
    with pytest.raises(InputError, match="heads or experts together"):
        architecture_from_config(EXPERTS | {"num_hidden_layers": 10_000, "num_experts": 100_000})
