"""Llama and what is Llama under another name. The common decoder is theirs."""

from __future__ import annotations

from msllm.models.families.family import Family
from msllm.models.weight_map import TensorNames

SCALED_ROPE = frozenset({"rope: linear", "rope: dynamic", "rope: llama3", "rope: yarn"})
BIASES = frozenset({"qkv bias", "attention output bias", "mlp bias"})

FAMILIES = (
    Family(
        name="llama",
        model_types=("llama",),
        trains=SCALED_ROPE | BIASES,
        tensors=TensorNames(),
    ),
    Family(
        name="aquila",
        model_types=("aquila", "aquila2"),
        trains=SCALED_ROPE,
        tensors=TensorNames(),
    ),
)
