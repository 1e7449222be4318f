from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save

from tests.engine.hub.hub_server import Hub, Repo, serve

REPO = "someone/Small-Model"
SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
BIG = 24_000_000
"""Bytes of the first shard: the clients write pieces of up to 10 MB."""


def model_files() -> dict[str, bytes]:
    """A repository as they are: what makes up the model, and much else."""
    noise = np.random.default_rng(5).integers(0, 1 << 31, BIG // 4, dtype=np.int32)
    first = save({"embed": noise.view(np.float32).reshape(1000, -1)})
    second = save({"norm": np.ones(16, np.float32), "head": np.ones((4, 16), np.float32)})
    index = {
        "metadata": {},
        "weight_map": {"embed": SHARDS[0], "norm": SHARDS[1], "head": SHARDS[1]},
    }
    wanted = {
        "config.json": json.dumps({"model_type": "qwen3", "hidden_size": 16}).encode(),
        "generation_config.json": b"{}",
        "tokenizer.json": b'{"version": "1.0"}',
        "tokenizer_config.json": b'{"model_max_length": 1}',
        "chat_template.jinja": b"{{ messages }}",
        "merges.txt": "#version é\n".encode(),
        "model.safetensors.index.json": json.dumps(index).encode(),
        SHARDS[0]: first,
        SHARDS[1]: second,
    }
    return wanted | dict.fromkeys(UNWANTED, b"not wanted")


UNWANTED = (
    "README.md",
    ".gitattributes",
    "modeling_small.py",
    "tokenization_small.py",
    "pytorch_model-00001-of-00001.bin",
    "pytorch_model.bin.index.json",
    "consolidated.safetensors",
    "original/consolidated.00.pth",
    "onnx/model.onnx",
    "onnx/config.json",
    "small-q4.gguf",
)


@pytest.fixture(scope="session")
def files() -> dict[str, bytes]:
    return model_files()


@pytest.fixture
def hub(files: dict[str, bytes]) -> Iterator[Hub]:
    with serve() as server:
        server.repos[REPO] = Repo(dict(files))
        yield server


Start = Callable[..., "subprocess.Popen[str]"]
Run = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def environment(hub: Hub, tmp_path: Path) -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("HF_", "MODELSCOPE_"))}
    return {
        **kept,
        "HF_ENDPOINT": hub.url,
        "HF_HOME": str(tmp_path / "hf_home"),
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "MODELSCOPE_ENDPOINT": hub.url,
        "MODELSCOPE_HOME": str(tmp_path / "ms_home"),
        "MODELSCOPE_CACHE": str(tmp_path / "ms_cache"),
        "NO_PROXY": "127.0.0.1",
    }


@pytest.fixture
def start(environment: dict[str, str]) -> Iterator[Start]:
    """Start `msllm download` with arguments and settings of the environment."""
    processes = []

    def start(*arguments: str | Path, **settings: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-m", "msllm", "download", *map(str, arguments)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment | settings,
        )
        processes.append(process)
        return process

    yield start
    for process in processes:
        process.kill()
        process.communicate()


@pytest.fixture
def run(start: Start) -> Run:
    """Run `msllm download` to its end."""

    def run(*arguments: str | Path, **settings: str) -> subprocess.CompletedProcess[str]:
        process = start(*arguments, **settings)
        out, err = process.communicate(timeout=900)
        return subprocess.CompletedProcess(process.args, process.returncode, out, err)

    return run
