"""What lies beside a model's weights and travels with them: config, tokenizer, templates.

A checkpoint keeps them in a folder of its own, byte for byte, so that an export needs nothing else.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

FOLDER = "hf"
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


def keep(source: Path, checkpoint: Path) -> None:
    """Copy a model's files into a checkpoint."""
    kept = checkpoint / FOLDER
    kept.mkdir(exist_ok=True)
    copy(source, kept)


def keep_config(config: dict[str, Any], checkpoint: Path) -> None:
    """Write a model's config into a checkpoint, where no folder gives one."""
    kept = checkpoint / FOLDER
    kept.mkdir(exist_ok=True)
    (kept / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def kept(checkpoint: Path) -> Path | None:
    """The folder of a checkpoint's files; None if it has none."""
    folder = checkpoint / FOLDER
    return folder if (folder / "config.json").is_file() else None


def copy(source: Path, out: Path) -> None:
    """Copy a model's files beside its weights."""
    for path in files(source):
        shutil.copyfile(path, out / path.name)
