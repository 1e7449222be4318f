"""Tiny models of the families with experts."""

from __future__ import annotations

from tests.parity.case import Case

EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 40}
MIXTRAL = {"num_local_experts": 4, "num_experts_per_tok": 2}
EACH = {"moe": {"grouped_gemm": False}}

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
}
