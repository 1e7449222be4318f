"""Raw text given straight to training: tokenized once into a cache, found again by its content.

The key is made of the files, the tokenizer and the settings that decide the tokens. One process
tokenizes while others that want the same data wait for it.
"""

from __future__ import annotations

import fcntl
import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from msllm.config import DataConfig
from msllm.engine.data.fingerprint import digest_file
from msllm.engine.data.indexed import find_problem, writing
from msllm.engine.data.preprocess import Progress, preprocess
from msllm.engine.data.records import find_files, kind_of, split_keys
from msllm.engine.data.sources import SUFFIX, Source, cache_folder, parse_sources
from msllm.engine.data.tokens import Tokenizer
from msllm.errors import InputError

FORMAT = 1
"""Raised when the same text would give other tokens or files than before."""


def prepare_data(config: DataConfig, progress: Progress = lambda report: None) -> DataConfig:
    """Tokenize the raw files among the paths; return a config that names only prefixes and mock.

    Runs in the process that starts the workers, before it does. Broken records are left out and
    counted in the reports that `progress` gets.

    Raises:
        InputError: a source is wrong, or there is raw data and no tokenizer.
        RunError: a tokenizing worker died.
    """
    return _each_source(config, lambda source: _tokenize(source, config, progress))


def locate_data(config: DataConfig) -> DataConfig:
    """Name the prefixes that `prepare_data` would, but make none.

    Raises:
        InputError: as `prepare_data`.
    """
    return _each_source(config, lambda source: _prefix(source, config))


def _each_source(config: DataConfig, of_raw: Callable[[Source], Path]) -> DataConfig:
    """Write sources with whole paths, raw ones as the prefix that `of_raw` gives."""

    def name(source: Source) -> str:
        if source.kind == "mock":
            return source.text
        prefix = of_raw(source) if source.kind == "raw" else source.path
        return source.with_path(prefix.resolve())

    named = {}
    for field, where in (("paths", "--data"), ("valid_paths", "--valid-data")):
        sources, problems = parse_sources(getattr(config, field), where)
        if problems:
            raise InputError(problems)
        named[field] = [name(source) for source in sources]
    return config.model_copy(update=named)


def _prefix(source: Source, config: DataConfig) -> Path:
    """Where the tokens of a raw source are, or would be."""
    if config.tokenizer is None:
        raise InputError(
            f"raw data `{source.text}` needs a tokenizer", "--data", "give --tokenizer DIR"
        )
    key = _key(source.path, config, config.tokenizer)
    return cache_folder(config) / "tokens" / key / f"data{SUFFIX}"


def _tokenize(source: Source, config: DataConfig, progress: Progress) -> Path:
    """Return the prefix of a raw source, made now if the cache has none."""
    prefix = _prefix(source, config)
    assert config.tokenizer is not None
    with writing(prefix.parent):
        prefix.parent.mkdir(parents=True, exist_ok=True)
    with _locked(prefix.parent / "lock"):
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


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold a lock file; the system lets go of it when the process ends, however it ends."""
    with path.open("w") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        yield
