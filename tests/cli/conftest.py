"""What the tests of `msllm pretrain` share: a folder of their own, small inputs, refusals."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from msllm.cli import app
from msllm.engine import launch
from msllm.engine.data.indexed import IndexedWriter
from msllm.engine.data.train_tokenizer import train_tokenizer


@pytest.fixture
def own_folder(tmp_path, monkeypatch):
    """Run in an empty folder, with a cache of its own, and outside any scheduler."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    for name in ("SLURM_NODEID", "PET_NNODES", "PET_NODE_RANK", "MASTER_ADDR", "MSLLM_DEBUG"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


@pytest.fixture
def no_workers(monkeypatch):
    """Fail if workers would be started."""

    def refuse(*_, **__):
        raise AssertionError("workers were started")

    monkeypatch.setattr(launch, "launch", refuse)


BASE = ["pretrain", "--model", "tiny-qwen3", "--device", "cpu", "--data", "mock"]


def model_folder(path: Path, **changes) -> Path:
    """A folder with a small Qwen3's config.json."""
    config = {
        "model_type": "qwen3", "hidden_size": 64, "num_hidden_layers": 4,
        "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 8,
        "intermediate_size": 96, "vocab_size": 300, "max_position_embeddings": 128,
    }  # fmt: skip
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps({**config, **changes}))
    return path


def prefix(path: Path, documents=((1, 2, 3) * 40,)) -> Path:
    with IndexedWriter(path, np.uint16) as writer:
        for document in documents:
            writer.append(np.array(document, np.uint16), np.array([len(document)], np.int32))
    return path


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("tok")
    text = folder / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog. " * 50)
    train_tokenizer([text], 290, folder / "tok")
    return folder / "tok"


def refused(capsys, *arguments: str, base=BASE) -> str:
    """Run a command that must be refused, leaving nothing behind; gives what it says."""
    before = sorted(Path().rglob("*"))
    status = app.run([*base, *arguments])
    captured = capsys.readouterr()
    assert status == 2, captured
    assert sorted(Path().rglob("*")) == before
    assert captured.out == ""
    return captured.err
