"""Short marks of what a run reads: the cache finds text again by them, a run its own data.

No mark costs more than a fixed amount of reading, however large a file is.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import IO

from msllm.config import DataConfig
from msllm.engine.data.indexed import files_of
from msllm.engine.data.sources import parse_sources
from msllm.engine.data.tokens import Tokenizer
from msllm.errors import InputError

WHOLE = 64 << 20
SLICES = 64
FEW = 16
SLICE = 1 << 16


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
        for data in _slices(stream, stat.st_size, SLICES):
            digest.update(data)
    return digest.digest()


def fingerprint(data: DataConfig) -> dict[str, str]:
    """Mark each file of tokens, and the tokenizer, that a run reads; by whole path.

    A file's mark is its size and a hash of 16 slices, so that one restored from a copy is the same
    and a thousand files take seconds. What is missing, or is text still, has none.

    Raises:
        InputError: the tokenizer can't be loaded.
    """
    sources, _ = parse_sources([*data.paths, *data.valid_paths], "--data")
    prefixes = {source.path.resolve() for source in sources if source.kind == "indexed"}
    files = (file for prefix in sorted(prefixes) for file in files_of(prefix))
    marks = {str(file): _mark(file) for file in files if file.is_file()}
    if data.tokenizer is not None:
        marks[str(data.tokenizer.expanduser().resolve())] = _mark_tokenizer(data.tokenizer)
    return marks


def _mark(path: Path) -> str:
    size = path.stat().st_size
    digest = hashlib.blake2b(digest_size=16)
    with path.open("rb") as stream:
        for data in _slices(stream, size, FEW):
            digest.update(data)
    return f"{size} {digest.hexdigest()}"


def _mark_tokenizer(folder: Path) -> str:
    tokenizer = Tokenizer(folder)
    with suppress(InputError):  # indexed documents have their ends already
        return f"{tokenizer.fingerprint} {tokenizer.eod_id}"
    return tokenizer.fingerprint


def _slices(stream: IO[bytes], size: int, count: int) -> Iterator[bytes]:
    """Read `count` slices spread over a file, both ends among them; or all of a small one."""
    if size <= count * SLICE:
        yield stream.read()
        return
    for number in range(count):
        stream.seek((size - SLICE) * number // (count - 1))
        yield stream.read(SLICE)
