"""What lies beside a model's weights and travels with them: config, tokenizer, templates.

A checkpoint keeps them in a folder of its own, byte for byte, so that an export needs nothing else.
"""

from __future__ import annotations

import json
from pathlib import Path

from msllm.config import RunConfig
from msllm.engine.weights import start
from msllm.errors import InputError
from msllm.models.hf_config import architecture_from_config, read_config
from msllm.models.resolve import Model, resolve_model

FOLDER = "hf"
CONFIG = "config.json"
WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".msgpack", ".h5", ".onnx", ".ckpt")
TOKENIZER = (
    *("tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt"),
    *("chat_template*", "*.model", "*.tiktoken", "tokenization_*.py"),
)
LARGEST = 200 * 2**20
"""Bytes; what is larger is no tokenizer."""

Files = dict[str, bytes]
"""What files hold, by name."""


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


def read(folder: Path, patterns: tuple[str, ...] = ("*",)) -> Files:
    """Read a model's files that are not weights, of names that match."""
    if not folder.is_dir():
        return {}
    return {
        path.name: path.read_bytes()
        for path in files(folder)
        if any(path.match(pattern) for pattern in patterns)
    }


def write(beside: Files, folder: Path) -> None:
    """Write files into a folder, which is made if need be."""
    folder.mkdir(exist_ok=True)
    for name, content in beside.items():
        (folder / name).write_bytes(content)


def keep(beside: Files, checkpoint: Path) -> None:
    """Write a model's files into a checkpoint."""
    write(beside, checkpoint / FOLDER)


def kept(checkpoint: Path) -> Path | None:
    """The folder of a checkpoint's files; None if it has none."""
    folder = checkpoint / FOLDER
    return folder if (folder / CONFIG).is_file() else None


def of_run(run: RunConfig) -> Files:
    """Read what goes beside the weights that a run trains.

    The config is that by which the run computes, the tokenizer the one that made its tokens; the
    rest is what lay beside the weights that it started from.
    """
    model = resolve_model(run.model)
    found: Files = {}
    if run.checkpoint.init_from is not None:
        found = read(_of_start(run.checkpoint.init_from))
    if model.card is None:
        folder = Path(run.model).expanduser()
        found |= read(folder if folder.is_dir() else folder.parent)
    elif not _is_config_of(run):
        found[CONFIG] = config_file(model)
    if run.data.tokenizer is not None:
        found |= read(run.data.tokenizer.expanduser(), TOKENIZER)
    return found


def config_file(model: Model) -> bytes:
    """The config.json of a model in the catalog."""
    return (json.dumps(model.config, indent=2) + "\n").encode()


def _of_start(folder: Path) -> Path:
    """Where the files of what a run starts from are."""
    checkpoint = start.locate(folder, f"--init-from {folder}")
    return folder.expanduser() if checkpoint is None else checkpoint / FOLDER


def _is_config_of(run: RunConfig) -> bool:
    """Whether the config beside the weights that the run starts from is of the model trained."""
    if run.checkpoint.init_from is None:
        return False
    try:
        found = architecture_from_config(read_config(_of_start(run.checkpoint.init_from)))
    except InputError:
        return False
    return found == resolve_model(run.model).architecture
