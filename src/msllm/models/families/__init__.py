"""The families msllm knows, one short module a line of models.

A module lists its `FAMILIES`: how their configs are read, and (with convert) their weight names.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module

from msllm.models.families.family import Family

MODULES = (
    "llama",
    "mistral",
    "qwen",
    "qwen2",
    "qwen3",
    "qwen3_next",
    "baichuan",
    "bloom",
    "chatglm",
    "glm",
    "internlm",
    "gemma",
    "minicpm",
    "phi",
    "plm",
    "seed_oss",
    "deepseek",
    "deepseek_v4",
    "bailing",
    "hunyuan",
    "longcat",
    "gpt_oss",
    "minimax",
    "step",
    "grok",
    "gpt",
    "mamba",
)


@cache
def families() -> dict[str, Family]:
    """Every family by each model type it reads."""
    found: dict[str, Family] = {}
    for module in MODULES:
        for family in import_module(f"{__name__}.{module}").FAMILIES:
            found.update(dict.fromkeys(family.model_types, family))
    return found
