"""Family: what one kind of published config adds to the common decoder.

A family's module says in data how its keys are spelled, which values its config class assumes,
and, in one function, which fields of `Architecture` it sets differently.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from msllm.models.weight_map import TensorNames

Config = Mapping[str, Any]
Fields = dict[str, Any]


def nothing(_: Config) -> Fields:
    """Fields of a family that is the common decoder."""
    return {}


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One kind of config.

    Attributes:
        name: The family's name, mostly its only model type.
        model_types: Values of the config's `model_type` that are read this way.
        renames: Its keys that the common decoder spells otherwise, as {its key: common key}.
        defaults: What its config class assumes where a (common) key is absent.
        base: Reads the parts that the family shares with others; the common decoder when None.
        fields: Arguments of `Architecture` that it sets or overrides, from the config with common
            keys.
        trains: Features beyond the plain decoder (`msllm.models.support.features`) that its
            training tests, or parity tests of the operators behind them, cover; a model with any
            other is listed, not trained.
        tensors: How its published tensors are called; None where msllm can't read them yet.
    """

    name: str
    model_types: tuple[str, ...]
    renames: Mapping[str, str] = field(default_factory=dict)
    defaults: Config = field(default_factory=dict)
    base: Callable[[Config], Fields] | None = None
    fields: Callable[[Config], Fields] = nothing
    trains: frozenset[str] = frozenset()
    tensors: TensorNames | None = None
