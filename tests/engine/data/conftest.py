from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from msllm.engine.data.indexed import IndexedWriter
from msllm.engine.data.train_tokenizer import train_tokenizer

WritePrefix = Callable[..., Path]


@pytest.fixture
def write_prefix(tmp_path: Path) -> WritePrefix:
    """Writes an indexed prefix out of documents given as lists of tokens."""

    def write(
        documents: list[list[int]], name: str = "data", dtype: type[np.generic] = np.uint16
    ) -> Path:
        prefix = tmp_path / name
        with IndexedWriter(prefix, dtype) as writer:
            for document in documents:
                writer.append(np.array(document, dtype), np.array([len(document)], np.int32))
        return prefix

    return write


SPEECH = (
    "def greet(name):\n    return f'Hello, {name}!'\n\n",
    "Ein kurzer Satz über Bäume, Flüsse und Straßen.\n",
    "敏捷的棕色狐狸跳过懒狗。\n",
    "Numbers: 1234567890, and   runs of  spaces\t tabs.\r\n",
)


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """JSON lines of made-up text with a few thousand different words."""
    random = np.random.default_rng(0)
    words = ["".join(map(chr, random.integers(97, 123, random.integers(2, 9)))) for _ in range(900)]
    path = tmp_path_factory.mktemp("corpus") / "corpus.jsonl"
    with path.open("w", encoding="utf-8") as stream:
        for number in range(600):
            text = " ".join(random.choice(words, random.integers(1, 120)))
            row = {"text": SPEECH[number % len(SPEECH)] + text, "id": number}
            stream.write(json.dumps(row, ensure_ascii=number % 2 == 0) + "\n")
    return path


@pytest.fixture(scope="session")
def tokenizer_folder(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A byte-level BPE of 600 ids."""
    folder = tmp_path_factory.mktemp("tokenizer") / "tok"
    train_tokenizer([corpus], 600, folder)
    return folder
