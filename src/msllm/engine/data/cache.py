"""Raw text given straight to training: tokenized once into a cache, found again by its content.

The key is made of the files, the tokenizer and the settings that decide the tokens. One process
tokenizes while others that want the same data wait for it.
"""

from __future__ import annotations

import fcntl
import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from msllm.config import DataConfig
from msllm.engine.data.indexed import find_problem, writing
from msllm.engine.data.preprocess import Progress, preprocess
from msllm.engine.data.records import find_files, kind_of, split_keys
from msllm.engine.data.sources import SUFFIX, Source, cache_folder, parse_sources
from msllm.engine.data.tokens import Tokenizer
from msllm.errors import InputError

FORMAT = 1
"""Raised when the same text would give other tokens or files than before."""
WHOLE = 64 << 20
SLICES = 64
SLICE = 1 << 16


def prepare_data(config: DataConfig, progress: Progress = lambda report: None) -> DataConfig:
    """Tokenize the raw files among the paths; return a config that names only prefixes and mock.

    Runs in the process that starts the workers, before it does. Broken records are left out and
    counted in the reports that `progress` gets.

    Raises:
        InputError: a source is wrong, or there is raw data and no tokenizer.
        RunError: a tokenizing worker died.
    """
    return config.model_copy(
        update={
            "paths": _prepare(config.paths, "--data", config, progress),
            "valid_paths": _prepare(config.valid_paths, "--valid-data", config, progress),
        }
    )


def _prepare(items: list[str], where: str, config: DataConfig, progress: Progress) -> list[str]:
    sources, problems = parse_sources(items, where)
    if problems:
        raise InputError(problems)
    return [
        source.with_path(_tokenize(source, config, progress)) if source.kind == "raw" else item
        for source, item in zip(sources, items, strict=True)
    ]


def _tokenize(source: Source, config: DataConfig, progress: Progress) -> Path:
    """Return the prefix of a raw source, made now if the cache has none."""
    if config.tokenizer is None:
        raise InputError(
            f"raw data `{source.text}` needs a tokenizer", "--data", "give --tokenizer DIR"
        )
    folder = cache_folder(config) / "tokens" / _key(source.path, config, config.tokenizer)
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
    prefix = folder / f"data{SUFFIX}"
    with _locked(folder / "lock"):
        if find_problem(prefix) is not None:
            preprocess(
                [source.path],
                config.tokenizer,
                prefix,
                workers=config.workers,
                text_key=config.text_key,
                overwrite=True,
                progress=progress,
            )
    return prefix


def _key(path: Path, config: DataConfig, tokenizer_folder: Path) -> str:
    tokenizer = Tokenizer(tokenizer_folder)
    digest = hashlib.blake2b(digest_size=16)
    settings = (FORMAT, tokenizer.fingerprint, tokenizer.eod_id, split_keys(config.text_key))
    digest.update(repr(settings).encode())
    for file in find_files([path]):
        digest.update(f"{kind_of(file)} {file.suffix}".encode())
        digest.update(digest_file(file))
    return digest.hexdigest()


def digest_file(path: Path) -> bytes:
    """Hash a file: all of it up to 64 MiB, else its size, time of change and 64 slices.

    Hashing a terabyte would take twenty minutes at every start. A larger file that was changed
    has another time of change; the slices catch most of those whose times were set back by a copy.
    What remains keeps size and time and misses the slices, which does not happen by accident.
    """
    stat = path.stat()
    digest = hashlib.blake2b(digest_size=16)
    with path.open("rb") as stream:
        if stat.st_size <= WHOLE:
            while data := stream.read(1 << 20):
                digest.update(data)
            return digest.digest()
        digest.update(f"{stat.st_size} {stat.st_mtime_ns}".encode())
        for number in range(SLICES):
            stream.seek((stat.st_size - SLICE) * number // (SLICES - 1))
            digest.update(stream.read(SLICE))
    return digest.digest()


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold a lock file; the system lets go of it when the process ends, however it ends."""
    with path.open("w") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        yield
