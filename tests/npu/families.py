"""The tiny models that are trained on pretended NPUs: one of each family that msllm trains."""

from __future__ import annotations

import json
from pathlib import Path

from tests.parity import dense_cases, latent_cases, moe_cases
from tests.parity.case import Case

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
    (where / "config.json").write_text(
        json.dumps({"model_type": case.model_type, **case._settings()})
    )
    return where
