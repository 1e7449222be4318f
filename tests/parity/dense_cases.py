"""Tiny models of the dense families."""

from __future__ import annotations

from tests.parity.case import Case
from tests.parity.references.chatglm import ChatGLM
from tests.parity.references.internlm2 import InternLM2
from tests.parity.references.llama_shaped import LlamaShaped
from tests.parity.references.qwen import Qwen

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
LINEAR = {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 3.0}
LONG = {
    "rope_type": "longrope",
    "short_factor": [1.0 + 0.1 * i for i in range(8)],
    "long_factor": [2.0 + i for i in range(8)],
    "original_max_position_embeddings": 32,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
}
LONG_LLAMA = LONG | {
    "rope_theta": 1e4,
    "short_factor": [1.0 + 0.1 * i for i in range(12)],
    "long_factor": [2.0 + i for i in range(12)],
    "factor": 4.0,
}
PAD = {"pad_token_id": 127}
"""A token that no case sees: transformers does not train its embedding."""
NO_DROPOUT = {"attention_dropout": 0.0, "residual_dropout": 0.0}

OWN_SIZES = {"head_dim": None, "num_key_value_heads": None}
CHATGLM = {
    **OWN_SIZES,
    "num_hidden_layers": None,
    "num_layers": 4,
    "multi_query_attention": True,
    "multi_query_group_num": 2,
    "kv_channels": 24,
    "intermediate_size": None,
    "ffn_hidden_size": 96,
    "vocab_size": None,
    "padded_vocab_size": 131,
    "max_position_embeddings": None,
    "seq_length": 128,
    "rms_norm_eps": None,
    "layernorm_epsilon": 3e-6,
    "add_bias_linear": False,
    "add_qkv_bias": True,
    "rope_ratio": 1,
}
QWEN = {
    **OWN_SIZES,
    "kv_channels": 16,
    "intermediate_size": 192,
    "rms_norm_eps": None,
    "layer_norm_epsilon": 3e-6,
    "rotary_emb_base": 10000.0,
    "rotary_pct": 1.0,
    "no_bias": True,
}
ROTARY = {"type": "dynamic", "base": 20000, "scaling_factor": 2.0}

CASES = {
    "llama": Case(model_type="llama"),
    "llama-rope3-tied": Case(
        model_type="llama", config={"rope_parameters": LLAMA3, "tie_word_embeddings": True}
    ),
    "llama-linear": Case(
        model_type="llama", config={"rope_parameters": LINEAR, "max_position_embeddings": 32}
    ),
    "llama-dynamic": Case(
        model_type="llama", config={"rope_parameters": DYNAMIC, "max_position_embeddings": 32}
    ),
    "llama-longrope": Case(model_type="llama", config={"rope_parameters": LONG_LLAMA}),
    "qwen3-yarn": Case(model_type="qwen3", config={"rope_parameters": YARN}),
    "llama-biases": Case(model_type="llama", config={"attention_bias": True, "mlp_bias": True}),
    "llama-mlp-bias": Case(model_type="llama", config={"mlp_bias": True}),
    "mistral": Case(model_type="mistral", config={"sliding_window": 9}),
    "qwen2": Case(model_type="qwen2", config={"head_dim": None, "tie_word_embeddings": True}),
    "qwen1.5": Case(model_type="qwen2", config={"head_dim": None, "num_key_value_heads": 4}),
    "qwen3": Case(model_type="qwen3"),
    "seed_oss": Case(model_type="seed_oss", config=PAD | {"attention_bias": True, **NO_DROPOUT}),
    "seed_oss-out-bias": Case(
        model_type="seed_oss",
        config=PAD | {"attention_bias": False, "attention_out_bias": True, **NO_DROPOUT},
    ),
    "internlm3": Case(
        model_type="internlm3",
        config=PAD | {"rope_parameters": DYNAMIC, "max_position_embeddings": 32},
    ),
    "internlm3-biases": Case(
        model_type="internlm3", config=PAD | {"attention_bias": True, "mlp_bias": True}
    ),
    "glm": Case(model_type="glm", config=PAD | {"partial_rotary_factor": 0.5}),
    "glm-no-bias": Case(
        model_type="glm", config=PAD | {"attention_bias": False, "tie_word_embeddings": True}
    ),
    "glm4": Case(model_type="glm4", config=PAD),
    "phi3": Case(model_type="phi3", config=PAD | {"head_dim": None, "sliding_window": 9}),
    "phi3-long": Case(
        model_type="phi3",
        config=PAD
        | {"head_dim": None, "rope_parameters": LONG, "original_max_position_embeddings": 32},
    ),
    "phi3-short": Case(
        model_type="phi3",
        config=PAD
        | {
            "head_dim": None,
            "rope_parameters": LONG | {"original_max_position_embeddings": 100},
            "original_max_position_embeddings": 100,
            "tie_word_embeddings": True,
        },
    ),
    "gemma": Case(model_type="gemma", config=PAD | {"tie_word_embeddings": True}),
    "gemma2": Case(
        model_type="gemma2",
        config=PAD
        | {
            "tie_word_embeddings": True,
            "sliding_window": 9,
            "query_pre_attn_scalar": 40,
            "attn_logit_softcapping": 1.5,
            "final_logit_softcapping": 2.0,
        },
    ),
    "gemma2-plain": Case(
        model_type="gemma2",
        config=PAD
        | {
            "sliding_window": 128,
            "attn_logit_softcapping": None,
            "final_logit_softcapping": None,
            "num_hidden_layers": 3,
        },
    ),
    "internlm": Case(
        model_type="internlm", config={**OWN_SIZES, "bias": True}, reference=LlamaShaped
    ),
    "internlm-rotary": Case(
        model_type="internlm",
        config={
            "head_dim": None,
            "bias": False,
            "max_position_embeddings": 32,
            "rotary": ROTARY,
        },
        reference=LlamaShaped,
    ),
    "internlm2": Case(
        model_type="internlm2",
        config={
            "head_dim": None,
            "bias": False,
            "max_position_embeddings": 32,
            "rope_theta": 1e5,
            "rope_scaling": {"type": "dynamic", "factor": 2.0},
        },
        reference=InternLM2,
    ),
    "internlm2-bias": Case(
        model_type="internlm2",
        config={"head_dim": None, "bias": True, "rope_theta": 1e4},
        reference=InternLM2,
    ),
    "chatglm": Case(model_type="chatglm", config=CHATGLM, reference=ChatGLM),
    "chatglm-biases": Case(
        model_type="chatglm",
        config=CHATGLM | {"add_bias_linear": True, "rope_ratio": 50},
        reference=ChatGLM,
    ),
    "qwen": Case(model_type="qwen", config=QWEN, reference=Qwen),
    "qwen-biases": Case(model_type="qwen", config=QWEN | {"no_bias": False}, reference=Qwen),
    "baichuan": Case(model_type="baichuan", config=OWN_SIZES, reference=LlamaShaped),
    "aquila": Case(
        model_type="aquila", config={"head_dim": None, "rope_theta": 5e4}, reference=LlamaShaped
    ),
}
