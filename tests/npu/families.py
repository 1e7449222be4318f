"""The tiny models that are trained on pretended NPUs: one of each family that msllm trains."""

from __future__ import annotations

import json
from pathlib import Path

from tests.parity import dense_cases, latent_cases, moe_cases
from tests.parity.case import Case

LAYERS = 2
"""Enough for a dense layer before those with experts, and a window in one of two."""

ALL: dict[str, Case] = dense_cases.CASES | moe_cases.CASES | latent_cases.CASES
FAMILIES = [name for name, case in ALL.items() if name == case.model_type]
"""Named as their model type; the parity cases with a suffix vary one thing of a family."""
VARIANTS = [
    "llama-biases", "llama-dynamic", "qwen3_moe-each", "glm4_moe-groups", "glm4_moe-further",
    "gpt_oss-all-again", "minimax_m2-again",
]  # fmt: skip
"""What no family's first case has: biases, other tables, single experts, groups, recompute."""


def write(name: str, folder: Path) -> Path:
    """Write a model's config, as its publisher would, to a folder of its own."""
    case = ALL[name]
    where = folder / name
    where.mkdir(parents=True, exist_ok=True)
    settings = case._settings()
    layers = next(key for key in ("num_hidden_layers", "num_layers") if key in settings)
    settings = {"model_type": case.model_type, **settings, layers: LAYERS}
    (where / "config.json").write_text(json.dumps(settings))
    return where


def _with_gradient(*names: str) -> set[str]:
    return {*names, *(f"{name}_backward" for name in names)}


def expected_operators(name: str) -> set[str]:
    """The `npu::` operators that a step of the case calls: no fewer, or one is missing, no more."""
    case = ALL[name]
    family = case.model_type
    found = _with_gradient("npu_rotary_mul")
    if family != "phimoe":  # its norms are LayerNorm, which is torch's
        found |= _with_gradient("npu_rms_norm")
    if family != "gemma2":  # a soft cap is in no kernel
        found |= {"npu_fusion_attention", "npu_fusion_attention_grad"}
    if family in ("gemma", "gemma2"):  # whose backward pass is msllm's own
        found |= {"npu_geglu"}
    elif family != "gpt_oss":  # nor is a limit of SwiGLU
        found |= _with_gradient("npu_swiglu")
    if case.has_experts:
        found |= {
            "npu_moe_token_permute_with_routing_map",
            "npu_moe_token_permute_with_routing_map_grad",
            "_npu_moe_token_unpermute_with_routing_map",
            "npu_moe_token_unpermute_with_routing_map_grad",
        }
        if family != "gpt_oss" and case.run.get("moe", {}).get("grouped_gemm", True):
            found |= {"npu_grouped_matmul"}
    return found


TORCHS = frozenset({"npu_gather_backward", "repeat_interleave_backward_int", "npu_format_cast"})
"""What torch_npu calls for torch's own operators."""
