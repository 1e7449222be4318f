"""A tokenizer folder as pretraining uses it: text to ids, the end-of-document id, a fingerprint.

Reads tokenizer.json through the `tokenizers` library alone, which starts in a tenth of the time of
transformers; other kinds of folders go through AutoTokenizer, never with remote code. Documents get
no BOS or other special tokens; chat templates are not here.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from msllm.engine.data.long_text import LONG, pieces
from msllm.errors import InputError

EOS_FILES = ("tokenizer_config.json", "special_tokens_map.json")
EOS_ID_FILES = ("generation_config.json", "config.json")
OTHER_KINDS = ("*.model", "*.txt", "*.tiktoken", "vocab.json", "added_tokens.json", *EOS_FILES)


class Tokenizer:
    """A tokenizer folder.

    Raises:
        InputError: there is no such folder, or no tokenizer in it that can be loaded, or one of
            the files that name its special tokens is broken.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self._file = folder / "tokenizer.json"
        if not folder.is_dir():
            raise InputError("tokenizer folder not found", f"--tokenizer {folder}", "give a folder")
        self._settings = {name: _read_json(folder / name) for name in EOS_FILES}
        self._fast, self._slow = self._load()
        if self._fast is not None:
            # A tokenizer.json may carry the lengths it was last used with.
            self._fast.no_truncation()
            self._fast.no_padding()

    def _load(self) -> tuple[Any, Any]:
        """Return (a `tokenizers` tokenizer, None), or (None, a slow one of transformers)."""
        try:
            if self._file.is_file():
                import tokenizers

                return tokenizers.Tokenizer.from_file(str(self._file)), None
            from transformers import AutoTokenizer

            auto = AutoTokenizer.from_pretrained(
                str(self.folder), trust_remote_code=False, local_files_only=True
            )
        except Exception as error:  # both libraries raise bare exceptions of many kinds
            reason = str(error).strip().splitlines()
            raise InputError(
                f"no tokenizer could be loaded: {reason[0] if reason else type(error).__name__}",
                f"--tokenizer {self.folder}",
                "the folder needs a tokenizer.json, or another kind that transformers reads",
            ) from error
        return (auto.backend_tokenizer, None) if auto.is_fast else (None, auto)

    def encode_batch(self, texts: list[str]) -> list[list[int]]:
        """Ids of each text, without special tokens."""
        if self._fast is None:
            ids: list[list[int]] = self._slow(texts, add_special_tokens=False)["input_ids"]
            return ids
        # The fast variant leaves out offsets into the text, which nobody here reads.
        encodings = self._fast.encode_batch_fast(texts, add_special_tokens=False)
        return [encoding.ids for encoding in encodings]

    def encode_documents(
        self, texts: list[str], eod: int | None
    ) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """Tokens of all texts in a row, each closed by `eod` unless None; and their lengths.

        A text without a single token gets length 0 and no `eod`.
        """
        short = iter(self.encode_batch([text for text in texts if len(text) <= LONG]))
        end = np.array([] if eod is None else [eod], np.int32)
        parts = [np.zeros(0, np.int32)]
        lengths = np.zeros(len(texts), np.int32)
        for number, text in enumerate(texts):
            long = len(text) > LONG
            ids = self._encode_long(text) if long else np.array(next(short), np.int32)
            if len(ids):
                parts += [ids, end]
                lengths[number] = len(ids) + len(end)
        return np.concatenate(parts), lengths

    def _encode_long(self, text: str) -> NDArray[np.int32]:
        """Ids of a long text, encoded piece by piece if this tokenizer allows that."""
        texts = [text] if self._fast is None else pieces(text, self._fast)
        parts = [np.array(self.encode_batch([piece])[0], np.int32) for piece in texts]
        return np.concatenate(parts)

    def decode(self, ids: Iterable[int]) -> str:
        """Text of ids, special tokens left out."""
        coder = self._slow if self._fast is None else self._fast
        return str(coder.decode(list(ids), skip_special_tokens=True))

    @cached_property
    def vocab_size(self) -> int:
        """One more than the largest id, added tokens included."""
        vocabulary = (self._slow if self._fast is None else self._fast).get_vocab()
        return 1 + max(vocabulary.values(), default=-1)

    @cached_property
    def eod_id(self) -> int:
        """Id that ends a document: the tokenizer's EOS.

        Raises:
            InputError: no file of the folder names one, or the vocabulary lacks it.
        """
        for name, settings in self._settings.items():
            token = settings.get("eos_token")
            token = token.get("content") if isinstance(token, dict) else token
            if isinstance(token, str):
                return self._id_of(token, name)
        for name in EOS_ID_FILES:
            eos = _read_json(self.folder / name).get("eos_token_id")
            eos = eos[0] if isinstance(eos, list) and eos else eos
            if isinstance(eos, int):
                return eos
        raise InputError(
            "the tokenizer has no EOS token, which documents end with",
            f"--tokenizer {self.folder}",
            'add "eos_token" to its tokenizer_config.json (or preprocess with --no-eod)',
        )

    def _id_of(self, token: str, name: str) -> int:
        vocabulary = self._slow if self._fast is None else self._fast
        found = vocabulary.get_vocab().get(token)
        if found is None:
            raise InputError(
                f"EOS token `{token}` is not in the tokenizer's vocabulary",
                str(self.folder / name),
                "correct eos_token there",
            )
        return int(found)

    @cached_property
    def fingerprint(self) -> str:
        """Hash of the files that decide the ids; the same for a copy of the folder."""
        digest = hashlib.blake2b(digest_size=16)
        files = [self._file]
        if not self._file.is_file():
            files = sorted({file for kind in OTHER_KINDS for file in self.folder.glob(kind)})
        for file in files:
            digest.update(file.name.encode() + b"\0" + file.read_bytes())
        return digest.hexdigest()


def _read_json(path: Path) -> dict[str, Any]:
    """Read the object in a file; empty if there is no such file.

    Raises:
        InputError: the file is not JSON.
    """
    if not path.is_file():
        return {}
    try:
        found = json.loads(path.read_text("utf-8"))
    except ValueError as error:
        raise InputError(f"not valid JSON: {error}", str(path), "repair the file") from error
    return found if isinstance(found, dict) else {}
