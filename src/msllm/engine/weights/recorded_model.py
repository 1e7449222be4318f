"""Holds a model against the one that a checkpoint was written as.

Another number of heads leaves every shape as it is and makes other weights of the same numbers, so
shapes alone do not tell whether a config is the checkpoint's.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from msllm.engine.training.checkpoint_folder import MANIFEST, Manifest
from msllm.errors import Problem
from msllm.models.architecture import Architecture

FIELDS = (
    "model_type",
    "num_layers",
    "hidden_size",
    "num_attention_heads",
    "num_query_groups",
    "head_dim",
    "intermediate_size",
    "vocab_size",
    "qk_norm",
    "tie_word_embeddings",
    "mla",
    "moe.num_experts",
    "moe.intermediate_size",
    "moe.shared_expert_intermediate_size",
    "moe.first_dense_layers",
)
"""What decides which number means what; other settings may change, such as a longer context."""


def differences(checkpoint: Path, architecture: Architecture, where: str) -> Iterator[Problem]:
    """List what the checkpoint's manifest says otherwise; nothing where it has none."""
    try:
        manifest = Manifest.model_validate_json((checkpoint / MANIFEST).read_bytes())
    except FileNotFoundError:
        return
    given = json.loads(json.dumps(asdict(architecture)))
    for field in FIELDS:
        theirs, ours = _value(manifest.architecture, field), _value(given, field)
        if theirs is not _UNKNOWN and theirs != ours:
            yield Problem(
                f"the checkpoint is of a model with {field} {theirs}, and the config says {ours}",
                where,
                "give the config that it was written with",
            )


_UNKNOWN = object()


def _value(shape: Mapping[str, Any] | None, field: str) -> Any:
    """A field's value; `_UNKNOWN` where another version has written none."""
    first, _, inner = field.partition(".")
    if not shape or first not in shape:
        return _UNKNOWN
    value = shape[first]
    if not inner:
        return value
    return None if value is None else value.get(inner, _UNKNOWN)
