"""Reads values of a config: each of its kind and within bounds, or refused with its key's name."""

from __future__ import annotations

import math
from typing import Any

from msllm.errors import InputError
from msllm.models.families.family import Config

WHERE = "config.json"
LARGEST = 10**8
"""No size of a model is beyond; what follows from it would never be counted out."""
LARGEST_OF = {
    "num_hidden_layers": 10_000,
    "num_nextn_predict_layers": 100,
    "num_attention_heads": 100_000,
    "num_key_value_heads": 100_000,
    "num_experts": 100_000,
    "num_experts_per_tok": 100_000,
    "n_shared_experts": 10_000,
    "max_position_embeddings": 10**10,
}


def size(config: Config, key: str) -> int:
    """A size that must be there: a positive whole number.

    Raises:
        InputError: It is missing, too large, or something else.
    """
    value = config.get(key)
    if isinstance(value, int) and not isinstance(value, bool) and value > 0:
        return _bounded(value, key)
    problem = f"{key} is missing" if value is None else f"{key} is {_shown(value)}"
    raise InputError(problem, WHERE, f"{key} must be a positive whole number")


def optional_size(config: Config, key: str) -> int | None:
    """A size that may be absent or null."""
    return None if config.get(key) is None else size(config, key)


def whole(config: Config, key: str, default: int, least: int = 0) -> int:
    """A whole number, at least `least`; `default` where it is absent or null.

    Raises:
        InputError: It is too large, or something else.
    """
    value = number(config, key, default)
    if value != int(value) or value < least:
        hint = f"{key} must be a whole number, {least} or more"
        raise InputError(f"{key} is {_shown(config[key])}", WHERE, hint)
    return _bounded(int(value), key)


def number(
    config: Config, key: str, default: float, least: float = -math.inf, above: float = -math.inf
) -> float:
    """A finite number, at least `least` and more than `above`; `default` where absent or null.

    Raises:
        InputError: It is something else.
    """
    value = config.get(key)
    if value is None:
        return default
    if not is_number(value):
        raise InputError(f"{key} is {_shown(value)}", WHERE, f"{key} must be a number")
    if not (value >= least and value > above):
        hint = f"{key} must be {f'more than {above:g}' if above >= least else f'{least:g} or more'}"
        raise InputError(f"{key} is {_shown(value)}", WHERE, hint)
    return float(value)


def is_number(value: Any) -> bool:
    """Whether it is a number that a float can hold."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return abs(value) < 1e300  # false for what is no number, too


def flag(config: Config, key: str, default: bool = False) -> bool:
    """A switch; `default` where it is absent or null.

    Raises:
        InputError: It is something else.
    """
    value = config.get(key)
    if value is None:
        return default
    if isinstance(value, bool) or (type(value) is int and value in (0, 1)):
        return bool(value)
    raise InputError(f"{key} is {_shown(value)}", WHERE, f"{key} must be true or false")


def names(config: Config, key: str) -> list[str] | None:
    """A list of words, one for each layer mostly; None where it is absent or null.

    Raises:
        InputError: It is something else.
    """
    value = config.get(key)
    if value is None or _is_list_of(value, str):
        return value
    raise InputError(f"{key} is {_shown(value)}", WHERE, f"{key} must be a list of words")


def numbers(config: Config, key: str) -> list[int]:
    """A list of whole numbers; empty where it is absent or null.

    Raises:
        InputError: It is something else.
    """
    value = config.get(key)
    if value is None:
        return []
    if _is_list_of(value, int):
        return list(value)
    raise InputError(f"{key} is {_shown(value)}", WHERE, f"{key} must be a list of whole numbers")


def record(config: Config, key: str) -> dict[str, Any]:
    """Settings that belong together; empty where they are absent or null.

    Raises:
        InputError: It is something else.
    """
    value = config.get(key)
    if value is None:
        return {}
    if isinstance(value, dict):
        return value
    raise InputError(f"{key} is {_shown(value)}", WHERE, f"{key} must be an object")


def _is_list_of(value: Any, kind: type) -> bool:
    return isinstance(value, list | tuple) and all(isinstance(each, kind) for each in value)


def _bounded(value: int, key: str) -> int:
    most = LARGEST_OF.get(key, LARGEST)
    if value <= most:
        return value
    raise InputError(f"{key} is {_shown(value)}", WHERE, f"no model has more than {most:,}")


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
