"""What lies beside a model's weights and travels with them: config, tokenizer, templates.

A checkpoint keeps them in a folder of its own, byte for byte, so that an export needs nothing else.
Only what the config says of the numbers follows them: how they were quantised, and their type.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msllm.config import RunConfig
from msllm.engine.weights import matching, start
from msllm.engine.weights.source import open_weights
from msllm.errors import InputError
from msllm.models.architecture import Architecture
from msllm.models.hf_config import architecture_from_config, read_config
from msllm.models.plain_file import open_file, read_json
from msllm.models.resolve import Model, resolve_model

if TYPE_CHECKING:
    import torch

FOLDER = "hf"
CONFIG = "config.json"
FORM = ".weights.json"
"""How a checkpoint's weights were published; never copied beside exported ones."""
DTYPE_KEYS = ("dtype", "torch_dtype")
WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".msgpack", ".h5", ".onnx", ".ckpt")
TOKENIZER = (
    *("tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt"),
    *("chat_template*", "*.model", "*.tiktoken", "tokenization_*.py"),
)
LARGEST = 200 * 2**20
"""Bytes; what is larger is no tokenizer."""

Files = dict[str, bytes]
"""What files hold, by name."""


@dataclass(frozen=True, slots=True)
class Beside:
    """What goes beside weights.

    Attributes:
        files: Config, tokenizer, templates.
        fused_experts: Whether one published tensor holds all experts of a layer.
    """

    files: Files
    fused_experts: bool = False


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
        path.name: _content(path)
        for path in files(folder)
        if any(path.match(pattern) for pattern in patterns)
    }


def _content(path: Path) -> bytes:
    with open_file(path) as file:
        return file.read()


def write(beside: Files, folder: Path) -> None:
    """Write files into a folder, which is made if need be."""
    folder.mkdir(exist_ok=True)
    for name, content in beside.items():
        (folder / name).write_bytes(content)


def keep(beside: Beside, checkpoint: Path) -> None:
    """Write a model's files into a checkpoint, and note how its weights were published."""
    form = json.dumps({"fused_experts": beside.fused_experts}).encode()
    write(beside.files | {FORM: form}, checkpoint / FOLDER)


def kept(checkpoint: Path) -> Path | None:
    """The folder of a checkpoint's files; None if it has none."""
    folder = checkpoint / FOLDER
    return folder if (folder / CONFIG).is_file() else None


def had_fused_experts(folder: Path, architecture: Architecture) -> bool:
    """Whether the weights were published so: as a checkpoint's files note it, or weights show."""
    if (folder / FORM).exists():
        form = read_json(folder / FORM)
        if isinstance(form, dict) and isinstance(form.get("fused_experts"), bool):
            return form["fused_experts"]
        raise InputError("it can't be understood", str(folder / FORM), "convert the weights again")
    try:
        return matching.has_fused_experts(open_weights(folder), architecture)
    except InputError:
        return False  # no weights are needed there


def plain(beside: Files, dtype: torch.dtype | None) -> tuple[Files, tuple[str, ...]]:
    """The files for weights that are not quantised, of a type if one is given.

    Returns:
        The files, and what is changed in the config, in sentences.
    """
    if CONFIG not in beside:
        return beside, ()
    config, notes = _of_plain_numbers(json.loads(beside[CONFIG]), dtype)
    return (beside | {CONFIG: _as_file(config)} if notes else beside), notes


def _of_plain_numbers(
    config: dict[str, Any], dtype: torch.dtype | None
) -> tuple[dict[str, Any], tuple[str, ...]]:
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


def _as_file(config: dict[str, Any]) -> bytes:
    return (json.dumps(config, indent=2, ensure_ascii=False) + "\n").encode()


def config_file(model: Model) -> bytes:
    """The config.json of a model in the catalog."""
    return _as_file(model.config)


def of_run(run: RunConfig, resumed: Path | None = None) -> Beside:
    """Read what goes beside the weights that a run trains.

    The config is that by which the run computes, the tokenizer the one that made its tokens; the
    rest is what lay beside the weights that it started from, or that `resumed`, the checkpoint that
    it goes on from, has kept of it.
    """
    import torch

    model = resolve_model(run.model)
    found: Files = {}
    fused = False
    begun = _begun(run, resumed)
    if begun is not None:
        found, fused = read(begun), had_fused_experts(begun, model.architecture)
    if model.card is None:
        folder = Path(run.model).expanduser()
        found |= read(folder if folder.is_dir() else folder.parent)
    elif begun is None or not _is_config_of(begun, model):
        found[CONFIG] = config_file(model)
    if run.data.tokenizer is not None:
        found |= read(run.data.tokenizer.expanduser(), TOKENIZER)
    dtype = torch.bfloat16 if run.dtype == "bf16" else torch.float32
    return Beside(plain(found, dtype)[0], fused)


def _begun(run: RunConfig, resumed: Path | None) -> Path | None:
    """Where the files beside a run's first weights are; they may be gone when it goes on."""
    if resumed is not None:
        return kept(resumed)
    if run.checkpoint.init_from is None:
        return None
    folder = run.checkpoint.init_from
    checkpoint = start.locate(folder, f"--init-from {folder}")
    return folder.expanduser() if checkpoint is None else checkpoint / FOLDER


def _is_config_of(folder: Path, model: Model) -> bool:
    """Whether a folder's config is of the very model that is trained."""
    try:
        return architecture_from_config(read_config(folder)) == model.architecture
    except InputError:
        return False
