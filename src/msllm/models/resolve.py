"""A model by what the user called it: a name in the catalog, or a folder with a config.json.

From here on both go one way: a config and the Architecture derived from it.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from msllm.errors import InputError, Problem
from msllm.models import hf_config
from msllm.models.architecture import Architecture
from msllm.models.catalog import ModelCard, catalog


@dataclass(frozen=True, slots=True)
class Model:
    """A model that was asked for.

    Attributes:
        name: As the user called it, or the catalog's spelling of it.
        config: Its config in Hugging Face's vocabulary.
        architecture: Its shape.
        card: Its entry in the catalog; None for a folder.
    """

    name: str
    config: dict[str, Any]
    architecture: Architecture
    card: ModelCard | None = None


def resolve_model(name: str) -> Model:
    """Find a model by catalog name, alias or folder.

    A name in the catalog wins over a folder of the same name.

    Raises:
        InputError: There is no such model, its shape is not known, or its config can't be read.
    """
    card = catalog().find(name)
    folder = Path(name).expanduser()
    if card is None and (folder.is_dir() or (folder.name == "config.json" and folder.is_file())):
        config = hf_config.read_config(folder if folder.is_dir() else folder.parent)
        return Model(name, config, hf_config.architecture_from_config(config))
    if card is None and ("/" in name or name.startswith(".")) and not _looks_like_repo(name):
        raise InputError(Problem(f"there is no folder `{name}`", "--model", "check the path"))
    card = catalog().get(name)
    architecture = card.architecture
    return Model(card.name, dict(card.config or {}), architecture, card)


def _looks_like_repo(name: str) -> bool:
    """Whether a name could be a repository's id: one slash, and no path's beginning."""
    return name.count("/") == 1 and not name.startswith((".", "/", "~"))
