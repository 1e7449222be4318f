"""Which files of a repository make up a model: its config, its tokenizer, one form of its weights.

Published repositories hold the same weights several times over (safetensors, pickles, the
publisher's own format, ONNX, GGUF), and Python code that msllm does not run.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path

from msllm.engine.hub.repository import RemoteFile, Repository
from msllm.errors import InputError, Problem

CONFIG = "config.json"
PICKLE = ".bin"

_DESCRIBES = re.compile(
    r"""(generation_)?config\.json
    | tokenizer[\w.-]*\.(json|model|txt|jinja)
    | (special_tokens_map|added_tokens|vocab|tekken)\.json
    | vocab\.txt | merges\.txt
    | [\w.-]+\.(tiktoken|spm)
    | (spiece|sentencepiece[\w.]*)\.model
    | chat_template\.(json|jinja)
    | additional_chat_templates/[\w.-]+\.jinja""",
    re.VERBOSE,
)
_FORMS = (
    ("model.safetensors.index.json", "model.safetensors"),
    ("pytorch_model.bin.index.json", "pytorch_model.bin"),
)
"""Index and single file of each form of weights, the best first."""


def describing(repository: Repository, weights: bool) -> list[RemoteFile]:
    """Choose the small files: config, tokenizer and, with weights, the index of their shards.

    Raises:
        InputError: The repository holds no model in this form.
    """
    chosen = [f for name, f in repository.files.items() if _DESCRIBES.fullmatch(name)]
    where = repository.name
    if weights and CONFIG not in repository.files:
        raise InputError(
            "the repository has no config.json, so it is no model that transformers could load",
            where,
            "look for the one with the same weights converted for transformers",
        )
    if not chosen:
        raise InputError("the repository has neither a config nor a tokenizer", where)
    if weights and (index := _index(repository)):
        chosen.append(index)
    return chosen


def weights(repository: Repository, folder: Path) -> list[RemoteFile]:
    """Choose the files of the weights; `folder` has what `describing` chose.

    Raises:
        InputError: There are none that msllm reads, or shards of the index are missing.
    """
    index = _index(repository)
    if index is None:
        single = next((repository.files[s] for _, s in _FORMS if s in repository.files), None)
        if single is None:
            raise InputError(
                f"the repository has no weights that msllm reads{_others(repository.files)}",
                repository.name,
                "--no-weights fetches config and tokenizer only",
            )
        return [single]
    try:
        listed = json.loads((folder / index.name).read_text(encoding="utf-8"))["weight_map"]
        names = sorted({str(name) for name in listed.values()})
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(f"{index.name} can't be read", repository.name) from error
    # shards lie beside their index: a name with a folder in it is no shard's
    if missing := [name for name in names if name not in repository.files or "/" in name]:
        raise InputError(
            [Problem(f"{name} is in the index but not there", repository.name) for name in missing]
        )
    return [repository.files[name] for name in names]


def own_code(folder: Path) -> bool:
    """Whether the model or its tokenizer says that it needs Python code of its repository."""
    found = (folder / name for name in (CONFIG, "tokenizer_config.json"))
    for path in found:
        try:
            if "auto_map" in json.loads(path.read_text(encoding="utf-8")):
                return True
        except (OSError, ValueError, TypeError):
            continue
    return False


def _index(repository: Repository) -> RemoteFile | None:
    """The index of the best form of weights, unless that is a single file."""
    for index, single in _FORMS:
        if index in repository.files:
            return repository.files[index]
        if single in repository.files:
            return None
    return None


def _others(names: Iterable[str]) -> str:
    """What is there instead."""
    kinds = (".safetensors", ".bin", ".pth", ".pt", ".gguf", ".ckpt", ".msgpack", ".onnx")
    found = sorted({Path(name).suffix for name in names} & set(kinds))
    return f" (it has {', '.join(found)} files under other names)" if found else ""
