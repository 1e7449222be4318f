"""A Hugging Face `config.json` -> Architecture, for every family that msllm knows.

Reading is driven by the registry of `msllm.models.families`: aliases and a family's own spellings
are brought to common keys, then the common decoder and the family's fields are read from those.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from msllm.errors import InputError, closest
from msllm.models.architecture import Architecture
from msllm.models.families import families
from msllm.models.families.decoder import ALIASES, decoder
from msllm.models.families.family import Config, Family
from msllm.models.plain_file import read_json

MOST_PARTS = 500_000
"""Heads, or experts, of all layers together; the largest models have some 25,000."""


def read_config(folder: Path | str) -> dict[str, Any]:
    """The `config.json` of a model's folder.

    Raises:
        InputError: No such folder or file, or a file that is not a JSON object.
    """
    path = Path(folder) / "config.json"
    if _is_missing(path):
        hint = "give a folder with a Hugging Face model's config.json"
        beside = Path(folder) / "hf"  # of a checkpoint, see msllm.engine.weights.sidecar
        if (beside / "config.json").is_file():
            hint = f"it is a checkpoint: its model's config and tokenizer are in {beside}"
        raise InputError(f"no config.json in {str(folder)!r}", where=str(folder), hint=hint)
    config = read_json(path)
    if not isinstance(config, dict):
        raise InputError("not a JSON object", where=str(path))
    return config


def _is_missing(path: Path) -> bool:
    try:
        return not path.exists()
    except OSError:  # told when it is opened
        return False


def architecture_from_config(config: Config) -> Architecture:
    """The shape that a config describes.

    Args:
        config: The content of a `config.json`; a `text_config` in it is the language model.

    Raises:
        InputError: A model type, activation or rope scaling that is not known, or a size that is
            missing or impossible.
    """
    config = _text_part(config)
    family = family_of(config)
    common = _common_keys(config, family)
    base = (family.base or decoder)(common)
    own = family.fields(common)
    extra = base.get("extra", ()) + own.get("extra", ())
    model_type = config.get("model_type", family.model_types[0])
    found = Architecture(**{**base, **own, "model_type": model_type, "extra": extra})
    _refuse_endless(found)
    return found


def _refuse_endless(found: Architecture) -> None:
    """Refuse a model with so many parts that they would be listed for ever."""
    experts = 0 if found.moe is None else found.moe.num_experts
    parts = found.num_layers * max(found.num_attention_heads, found.num_query_groups, experts)
    if parts > MOST_PARTS:
        problem = f"its layers have {parts:,} heads or experts together"
        raise InputError(problem, "config.json", f"no model has more than {MOST_PARTS:,}")


def family_of(config: Config) -> Family:
    """The family that reads a config.

    Raises:
        InputError: `model_type` is missing or not known.
    """
    if "model_type" not in config and "ssm_cfg" in config:
        return families()["mamba2"]
    name = config.get("model_type")
    if not isinstance(name, str):
        raise InputError("model_type is missing", "config.json", "it names the kind of model")
    family = families().get(name)
    if family is None:
        near = ", ".join(closest(name, list(families())))
        raise InputError(
            f"unknown model type {name!r}",
            "config.json: model_type",
            f"closest are {near}; with transformers' own code --backend fsdp2 may train it",
        )
    return family


def _text_part(config: Config) -> Config:
    text = config.get("text_config")
    if not isinstance(text, dict):
        return config
    return {"tie_word_embeddings": config.get("tie_word_embeddings"), **text}


def _common_keys(config: Config, family: Family) -> dict[str, Any]:
    """Bring keys to the common spelling.

    A family's own spelling is the one its code goes by and wins; of mere aliases the common wins.
    """
    common = {key: value for key, value in config.items() if value is not None}
    common.update({key: common[own] for own, key in family.renames.items() if own in common})
    for own, key in ALIASES.items():
        if own in common:
            common.setdefault(key, common[own])
    for key, value in family.defaults.items():
        common.setdefault(key, value)
    return common
