"""What lies beside a model's weights and travels with them: config, tokenizer, templates.

A checkpoint keeps them in a folder of its own, byte for byte, so that an export needs nothing else.
Only what the config says of the numbers follows them: how they were quantised, and their type.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msllm.models.hf_config import read_config

if TYPE_CHECKING:
    import torch

FOLDER = "hf"
FORM = ".weights.json"
"""How a checkpoint's weights were published; never copied beside exported ones."""
DTYPE_KEYS = ("dtype", "torch_dtype")
WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".msgpack", ".h5", ".onnx", ".ckpt")
LARGEST = 200 * 2**20
"""Bytes; what is larger is no tokenizer."""


def files(folder: Path) -> list[Path]:
    """The files of a model's folder that are not weights."""
    return [
        path
        for path in sorted(folder.iterdir())
        if path.is_file() and not _is_weights(path) and not path.name.startswith(".")
    ]


def _is_weights(path: Path) -> bool:
    index = path.name.endswith(".index.json")
    return index or path.suffix in WEIGHTS or path.stat().st_size > LARGEST


def keep(
    source: Path, checkpoint: Path, dtype: torch.dtype | None = None, fused_experts: bool = False
) -> tuple[str, ...]:
    """Copy a model's files into a checkpoint, and note how its weights were published.

    Args:
        source: The model's folder.
        checkpoint: The checkpoint's folder.
        dtype: Type of the checkpoint's numbers, if it was asked for.
        fused_experts: Whether one tensor held all experts of a layer.

    Returns:
        What is changed in the config, in sentences.
    """
    kept = checkpoint / FOLDER
    kept.mkdir(exist_ok=True)
    (kept / FORM).write_text(json.dumps({"fused_experts": fused_experts}), encoding="utf-8")
    return copy(source, kept, dtype)


def fused_experts(beside: Path) -> bool | None:
    """Whether the published weights had fused experts; None for a folder that does not say."""
    try:
        return bool(json.loads((beside / FORM).read_text(encoding="utf-8"))["fused_experts"])
    except FileNotFoundError:
        return None


def keep_config(config: dict[str, Any], checkpoint: Path) -> None:
    """Write a model's config into a checkpoint, where no folder gives one."""
    kept = checkpoint / FOLDER
    kept.mkdir(exist_ok=True)
    (kept / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def kept(checkpoint: Path) -> Path | None:
    """The folder of a checkpoint's files; None if it has none."""
    folder = checkpoint / FOLDER
    return folder if (folder / "config.json").is_file() else None


def copy(source: Path, out: Path, dtype: torch.dtype | None = None) -> tuple[str, ...]:
    """Copy a model's files beside its weights; returns what is changed in the config."""
    for path in files(source):
        shutil.copyfile(path, out / path.name)
    config, notes = _of_plain_numbers(read_config(source), dtype)
    if notes:
        text = json.dumps(config, indent=2, ensure_ascii=False)
        (out / "config.json").write_text(text + "\n", encoding="utf-8")
    return notes


def _of_plain_numbers(
    config: dict[str, Any], dtype: torch.dtype | None
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The config of weights that are not quantised, of a type if one is given; and its changes."""
    changed, notes = dict(config), []
    if changed.pop("quantization_config", None) is not None:
        notes.append("config.json: quantization_config is dropped")
    name = str(dtype).removeprefix("torch.")
    for key in DTYPE_KEYS:
        if dtype is not None and changed.get(key) not in (None, name):
            notes.append(f"config.json: {key} is {name}, was {changed[key]}")
            changed[key] = name
    text = config.get("text_config")
    if isinstance(text, dict):
        changed["text_config"], inner = _of_plain_numbers(text, dtype)
        notes += [note.replace("config.json:", "config.json: text_config:") for note in inner]
    return changed, tuple(notes)
