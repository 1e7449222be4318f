"""Training a byte-level BPE tokenizer, written as a folder that transformers loads."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

from msllm.engine.data.indexed import sync_folder, writing
from msllm.engine.data.records import find_files, read_blocks, split_keys
from msllm.engine.output_path import check_parent
from msllm.errors import InputError

END = "<|endoftext|>"
PAD = "<|pad|>"
SPECIAL = (END, PAD)
SMALLEST = 256 + len(SPECIAL)
LARGEST = 10_000_000
"""All bytes and the special tokens: any text can be written with these."""


def train_tokenizer(
    paths: list[Path],
    vocab_size: int,
    out: Path,
    *,
    text_key: str = "text",
    on_error: Literal["skip", "fail"] = "skip",
    progress: Callable[[int], None] = lambda text_bytes: None,
) -> int:
    """Train on the text of `paths`, and write tokenizer.json and its companions to `out`.

    Spaces, digits and punctuation are kept as they are: decoding gives the very text back.

    Args:
        paths: Files and folders; see `records` for the kinds.
        vocab_size: Ids in all, bytes and special tokens included.
        out: Folder to write; must not hold anything yet.
        text_key: As for `preprocess`.
        on_error: What to do about a broken record.
        progress: Called with the characters read so far.

    Returns:
        Ids of the tokenizer.

    Raises:
        InputError: bad arguments, no text, or too little text for so many ids; nothing is written.
        RunError: the output can't be written.
    """
    if vocab_size < SMALLEST:
        raise InputError(
            f"a vocabulary of {vocab_size} can't hold the 256 bytes and {len(SPECIAL)} special "
            "tokens",
            f"--vocab-size {vocab_size}",
            f"use at least {SMALLEST}",
        )
    if vocab_size > LARGEST:
        raise InputError(
            f"a vocabulary of {vocab_size:,}", f"--vocab-size {vocab_size}", f"at most {LARGEST:,}"
        )
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise InputError("output is there already", f"--out {out}", "give a new folder")
    if problems := check_parent(out, f"--out {out}"):
        raise InputError(problems)
    files, keys = find_files(paths), split_keys(text_key)
    tokenizer, trainer = _blank(vocab_size)
    characters = 0

    def count(read: int) -> None:
        nonlocal characters
        characters = read
        progress(read)

    tokenizer.train_from_iterator(_texts(files, keys, on_error, count), trainer)
    if characters == 0:
        raise InputError("no text found", f"--data {paths[0]}", f"is `{text_key}` the text's key?")
    found = int(tokenizer.get_vocab_size())
    if found < vocab_size:
        raise InputError(
            f"the text only gives {found:,} tokens, not {vocab_size:,}",
            f"--vocab-size {vocab_size}",
            f"give more text, or --vocab-size {found}",
        )
    with writing(out):
        _write(tokenizer, out)
    return found


def _blank(vocab_size: int) -> tuple[Any, Any]:
    """Return an untrained tokenizer and its trainer."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    return tokenizer, trainer


def _texts(
    files: list[Path],
    keys: tuple[str, ...],
    on_error: str,
    progress: Callable[[int], None],
) -> Iterator[str]:
    read = 0
    for file in files:
        for block in read_blocks(file, keys):
            for record in block.records(keys):
                if record.flaw and on_error == "fail":
                    raise InputError(f"broken record: {record.flaw}", f"{file}:{record.line}")
                if record.text:
                    read += len(record.text)
                    yield record.text
            progress(read)


def _write(tokenizer: Any, out: Path) -> None:
    """Write the folder under another name, then rename it."""
    temporary = out.with_name(f"{out.name}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    tokenizer.save(str(temporary / "tokenizer.json"))
    special = {"eos_token": END, "pad_token": PAD}
    config = {
        **special,
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": 10**30,  # transformers' own way to say that there is no limit
    }
    for name, content in (
        ("tokenizer_config.json", config),
        ("special_tokens_map.json", special),
    ):
        (temporary / name).write_text(json.dumps(content, indent=2) + "\n", "utf-8")
    for file in temporary.iterdir():
        with file.open("rb") as stream:
            os.fsync(stream.fileno())
    temporary.replace(out)
    sync_folder(out.parent)
