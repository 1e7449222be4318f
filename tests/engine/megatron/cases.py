"""What the layout tests train: small models of each family, and the layouts to compare."""

from __future__ import annotations

from typing import Any

BASE: dict[str, Any] = {
    "hidden_size": 64,
    "num_layers": 5,
    "num_attention_heads": 4,
    "num_query_groups": 2,
    "head_dim": 24,
    "intermediate_size": 96,
    "vocab_size": 131,
    "max_position_embeddings": 256,
}
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 40, "aux_loss_coef": 0.05}
GEMMA2 = {
    "norm_zero_centered": True,
    "sandwich_norm": True,
    "activation": "gelu_tanh",
    "sliding_window": 8,
    "sliding_layers": (0, 2, 4),
    "attention_scale": 0.2,
    "attention_softcap": 2.0,
    "logit_softcap": 3.0,
    "embedding_scale": 8.0,
    "tie_word_embeddings": True,
}
BIASES = {"qkv_bias": True, "attention_out_bias": True, "mlp_bias": True}

MODELS: dict[str, dict[str, Any]] = {
    "llama": BASE | {"model_type": "llama"},
    "mistral": BASE | {"model_type": "mistral", "sliding_window": 8},
    "gemma2": BASE | GEMMA2 | BIASES | {"model_type": "gemma2"},
    "qwen2": BASE | {"model_type": "qwen2", "qkv_bias": True, "tie_word_embeddings": True},
    "qwen3": BASE | {"model_type": "qwen3", "qk_norm": "head"},
    "qwen3_moe": BASE | {"model_type": "qwen3_moe", "qk_norm": "head", "moe": MOE},
    "mixtral": BASE | {"model_type": "mixtral", "moe": MOE},
}

DENSE_LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "tp2": (2, {"tp": 2, "sequence_parallel": False}),
    "tp2-sp": (2, {"tp": 2}),
    "pp2": (2, {"pp": 2}),
    "pp2-vpp2": (2, {"pp": 2, "vpp": 2}),
    "dp2": (2, {"distributed_optimizer": False}),
    "dp2-distributed-optimizer": (2, {}),
    "tp2-pp2": (4, {"tp": 2, "pp": 2}),
}
MOE_LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "ep2": (2, {"ep": 2}),
    "ep2-one-matmul-each": (2, {"ep": 2, "grouped_gemm": False}),
    "ep2-allgather": (2, {"ep": 2, "dispatcher": "allgather"}),
    "tp2-sp": (2, {"tp": 2}),
    "pp2": (2, {"pp": 2}),
    "dp2-distributed-optimizer": (2, {}),
    "tp2-ep2-pp2": (4, {"tp": 2, "ep": 2, "pp": 2}),
}
"""Name -> world size and settings."""

RECOMPUTE: dict[str, dict[str, Any]] = {
    "full": {"recompute": "full"},
    "core-attn": {"recompute": "selective"},
    "mlp-layernorm": {"recompute": "selective", "recompute_modules": ["mlp", "layernorm"]},
}
MOE_RECOMPUTE: dict[str, dict[str, Any]] = {
    "moe": {"recompute": "selective", "recompute_modules": ["moe"]},
    "moe-act": {"recompute": "selective", "recompute_modules": ["moe_act", "core_attn"]},
}


def layouts_of(family: str) -> dict[str, tuple[int, dict[str, Any]]]:
    """The layouts that a family is tried at; the full set for one of each kind."""
    full = MOE_LAYOUTS if "moe" in MODELS[family] else DENSE_LAYOUTS
    if family in ("qwen3", "qwen3_moe"):
        return full
    few = ("tp2-sp", "pp2-vpp2", "ep2")  # tests/parity has all families at four processes
    return {name: layout for name, layout in full.items() if name in few}


def _cases() -> dict[int, list[dict[str, Any]]]:
    cases: dict[int, list[dict[str, Any]]] = {1: [], 2: [], 4: []}
    for family in MODELS:
        cases[1].append({"name": family, "family": family})
        for name, (world, layout) in layouts_of(family).items():
            cases[world].append({"name": f"{family}/{name}", "family": family, "layout": layout})
    for name, train in RECOMPUTE.items():
        cases[1].append({"name": f"qwen3/recompute-{name}", "family": "qwen3", "train": train})
        cases[1].append({"name": f"gemma2/recompute-{name}", "family": "gemma2", "train": train})
    for name, train in MOE_RECOMPUTE.items():
        case = {"name": f"qwen3_moe/recompute-{name}", "family": "qwen3_moe", "train": train}
        cases[1].append(case)
    cases[1].append({"name": "qwen3/bf16", "family": "qwen3", "dtype": "bf16"})
    for size in (1, 4):
        name = f"qwen3/micro-batch-{size}"
        cases[1].append({"name": name, "family": "qwen3", "train": {"micro_batch": size}})
    cases[1].append({"name": "qwen3/masked", "family": "qwen3", "masked": True})
    cases[2].append({"name": "qwen3/masked-dp2", "family": "qwen3", "masked": True})
    overlap = {"overlap_grad_reduce": True, "overlap_param_gather": True}
    cases[2].append({"name": "qwen3/overlap-dp2", "family": "qwen3", "train": overlap})
    return cases


CASES = _cases()
