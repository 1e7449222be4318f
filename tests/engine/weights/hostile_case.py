"""A tiny model in each format, made without transformers, to be damaged by tests."""

from __future__ import annotations

import json
import pickle
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from msllm.cli.app import run
from msllm.models.hf_config import architecture_from_config
from msllm.models.weight_map import published_shapes

CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 300,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}


def tensors() -> dict[str, torch.Tensor]:
    """Random weights of the model."""
    from msllm.engine.weights import matching

    weights = matching.mapped(architecture_from_config(CONFIG))
    assert weights is not None
    shapes = published_shapes(weights)
    return {name: torch.randn(shape).bfloat16() for name, shape in shapes.items()}


def write_hf(folder: Path, weights: dict[str, torch.Tensor] | None = None) -> Path:
    """A folder of published weights."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    save_file(weights or tensors(), folder / "model.safetensors")
    return folder


@dataclass(frozen=True, slots=True)
class Folders:
    """The model as published, as a checkpoint, and as files of ranks."""

    hf: Path
    checkpoint: Path
    ranks: Path


def write_all(folder: Path) -> Folders:
    """The model in each format."""
    made = Folders(write_hf(folder / "hf"), folder / "checkpoint", folder / "ranks")
    assert convert("hf-to-mcore", "--model", made.hf, "--out", made.checkpoint) == 0
    sizes = ("--tp", 2, "--pp", 2)
    given = ("--checkpoint", made.checkpoint, "--out", made.ranks)
    assert convert("mcore-to-mindspeed", *given, *sizes) == 0
    return made


def convert(*arguments: object) -> int:
    """Run a command of `msllm convert`."""
    return run(["convert", *map(str, arguments)])


def change_index(checkpoint: Path, change: Callable[[Any], Any]) -> None:
    """Change a checkpoint's index, and have no manifest that would tell."""
    (checkpoint / "complete.json").unlink(missing_ok=True)
    path = checkpoint / ".metadata"
    index = pickle.loads(path.read_bytes())
    change(index)
    path.write_bytes(pickle.dumps(index))


def change_rank(ranks: Path, name: str, change: Callable[[dict[str, Any]], Any]) -> None:
    """Change the weights in a rank's file."""
    path = ranks / "iter_0000001" / name / "model_optim_rng.pt"
    state = torch.load(path, weights_only=True)
    change(state["model"])
    torch.save(state, path)


def refused(capsys: Any, *arguments: object) -> str:
    """What a command says that refuses its input."""
    capsys.readouterr()
    status = convert(*arguments)
    said = capsys.readouterr().err
    assert status == 2, said
    assert "defect" not in said
    return said


def header_with(folder: Path, **changes: object) -> None:
    """Change what a safetensors file's header says of its first tensor."""
    path = folder / "model.safetensors"
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    first = min(header, key=lambda k: header[k]["data_offsets"] if k != "__metadata__" else [1e9])
    said = header.pop(first)
    for key, value in changes.items():
        changes[key] = [float(n) for n in said[key]] if value is float else value
    header[str(changes.pop("name", first))] = said | changes
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + length :])
