from __future__ import annotations

import copy

import numpy as np
import pytest
import tokenizers
from tokenizers import normalizers, pre_tokenizers

from msllm.engine.data import long_text, tokens
from msllm.engine.data.long_text import pieces
from msllm.engine.data.tokens import Tokenizer

GPT4 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@pytest.fixture
def short(monkeypatch):
    """Texts count as long from 300 characters on."""
    monkeypatch.setattr(long_text, "LONG", 300)
    monkeypatch.setattr(long_text, "WINDOW", 40)
    monkeypatch.setattr(tokens, "LONG", 300)


@pytest.fixture
def library(tokenizer_folder):
    return tokenizers.Tokenizer.from_file(str(tokenizer_folder / "tokenizer.json"))


def text_of(seed: int) -> str:
    """Words, numbers, brackets and all kinds of white space, in no order."""
    random = np.random.default_rng(seed)
    some = [
        "def ",
        "word",
        "  ",
        "\n",
        "\n\n",
        "\t",
        " ",
        "12345",
        "})\n",
        "é",
        "狐狸",
        "'s",
        "\r\n",
        ".",
    ]
    return "".join(random.choice(some, 2500))


@pytest.mark.parametrize("kind", ["gpt2", "gpt4", "qwen"])
@pytest.mark.parametrize("seed", range(6))
def test_pieces_have_the_ids_of_the_whole(library, short, kind, seed):
    if kind != "gpt2":
        split = pre_tokenizers.Split(tokenizers.Regex(GPT4), "isolated")
        byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        library.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    if kind == "qwen":
        library.normalizer = normalizers.NFC()
    text = text_of(seed)
    cut = list(pieces(text, library))
    assert "".join(cut) == text
    assert len(cut) > 10
    assert max(map(len, cut)) <= 300
    ids = [i for piece in cut for i in library.encode(piece).ids]
    assert ids == library.encode(text).ids


def test_a_tokenizer_that_marks_the_start_of_a_text_is_given_it_whole(library, short):
    text = text_of(0)
    for change in ("prefix space", "normalizer", "none"):
        other = copy.deepcopy(library)
        if change == "prefix space":
            other.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always", split=False)
        elif change == "normalizer":
            other.normalizer = normalizers.Prepend("_")
        else:
            other.pre_tokenizer = None
        assert list(pieces(text, other)) == [text]


def test_long_documents_among_short_ones(tokenizer_folder, library, short):
    texts = ["a", text_of(1), "", text_of(2), "b"]
    found, lengths = Tokenizer(tokenizer_folder).encode_documents(texts, 0)
    want = [library.encode(text).ids for text in texts]
    assert found.tolist() == [i for ids in want if ids for i in [*ids, 0]]
    assert lengths.tolist() == [len(ids) + 1 if ids else 0 for ids in want]
