r"""Megatron's indexed format: PREFIX.bin holds tokens, PREFIX.idx says where documents lie.

Reading is by memory map, writing is a stream of documents that appears by rename, the index last.
What the tokens mean, and how they are cut into samples, is left to others.

Layout of .idx, little-endian: `MMIDIDX\0\0`, version u64 = 1, dtype code u8, number of sequences
u64, number of document bounds u64, lengths i32, byte offsets i64, document bounds i64.
"""

from __future__ import annotations

import fcntl
import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Any, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from msllm.errors import InputError, Problem, RunError

MAGIC = b"MMIDIDX\x00\x00"
HEADER = struct.Struct("<9sQBQQ")
DTYPES: dict[int, type[np.generic]] = {
    1: np.uint8,
    2: np.int8,
    3: np.int16,
    4: np.int32,
    5: np.int64,
    8: np.uint16,
}
CODES = {dtype: code for code, dtype in DTYPES.items()}
AT_ONCE = 1 << 22
"""Sequences checked at a time: a hundred megabytes of numbers."""
REBUILD = "run `msllm preprocess` again, or copy the file again"


class Files(NamedTuple):
    """The two files of one prefix."""

    bin: Path
    idx: Path


def files_of(prefix: Path) -> Files:
    """PREFIX.bin and PREFIX.idx (the prefix may itself contain dots)."""
    return Files(Path(f"{prefix}.bin"), Path(f"{prefix}.idx"))


def token_dtype(vocab_size: int) -> type[np.generic]:
    """Return the dtype Megatron expects: uint16 below 65,500 ids, int32 otherwise."""
    return np.uint16 if vocab_size < 65_500 else np.int32


def byte_offsets(lengths: NDArray[Any], itemsize: int) -> NDArray[np.int64]:
    """Byte at which each sequence starts, `[n]` int64 however large the file is."""
    offsets = np.zeros(len(lengths), dtype=np.int64)
    np.cumsum(lengths[:-1], dtype=np.int64, out=offsets[1:])
    offsets *= itemsize
    return offsets


@dataclass(frozen=True)
class Header:
    """What the first 34 bytes of an .idx say."""

    dtype: type[np.generic]
    sequences: int
    bounds: int

    @property
    def idx_bytes(self) -> int:
        """Smallest size of a whole .idx with this header."""
        return HEADER.size + self.sequences * 12 + self.bounds * 8


def find_problem(prefix: Path) -> Problem | None:
    """Say what is wrong with PREFIX's files, without reading tokens; None if nothing."""
    try:
        IndexedTokens(prefix)
    except InputError as error:
        return error.problems[0]
    return None


def _read_header(prefix: Path) -> Header:
    """Read and check the header.

    Raises:
        InputError: a file is missing, unreadable, of another kind, empty or truncated.
    """
    binary, index = files_of(prefix)
    for path in (binary, index):
        if not path.is_file():
            raise InputError("file not found", str(path), "both .bin and .idx are needed")
    try:
        with index.open("rb") as stream:
            head = stream.read(HEADER.size)
            header = _parse_header(head, index)
            _check_sizes(header, stream, binary, index)
        with binary.open("rb"):
            pass
    except OSError as error:
        raise InputError(f"cannot be read: {error.strerror}", str(error.filename)) from error
    return header


def _parse_header(head: bytes, index: Path) -> Header:
    if len(head) < HEADER.size:
        raise InputError(f"truncated: {len(head)} bytes", str(index), REBUILD)
    magic, version, code, sequences, bounds = HEADER.unpack(head)
    if magic != MAGIC or version != 1 or code not in DTYPES:
        raise InputError(
            "not an index in Megatron's format, version 1", str(index), "see `msllm preprocess`"
        )
    return Header(DTYPES[code], sequences, bounds)


def _check_sizes(header: Header, stream: IO[bytes], binary: Path, index: Path) -> None:
    size = os.fstat(stream.fileno()).st_size
    if size < header.idx_bytes:
        found = f"truncated: {size:,} bytes of {header.idx_bytes:,}"
        raise InputError(found, str(index), REBUILD)
    if header.sequences == 0:
        raise InputError("holds no documents", str(index), "preprocess some text")
    # The last sequence's end is the .bin's size; reading two numbers is enough to know it.
    n = header.sequences
    stream.seek(HEADER.size + 4 * (n - 1))
    (length,) = struct.unpack("<i", stream.read(4))
    stream.seek(HEADER.size + 4 * n + 8 * (n - 1))
    (offset,) = struct.unpack("<q", stream.read(8))
    needed = offset + length * np.dtype(header.dtype).itemsize
    found_bytes = binary.stat().st_size
    if found_bytes < needed:
        found = f"truncated: {found_bytes:,} bytes of the {needed:,} its .idx describes"
        raise InputError(found, str(binary), REBUILD)
    if found_bytes == 0:
        raise InputError("holds no tokens", str(binary), "preprocess some text")


class IndexedTokens:
    """One prefix, memory-mapped. Sequences are what Megatron's GPTDataset calls documents.

    Attributes:
        prefix: Path without .bin and .idx.
        lengths: Tokens of each sequence, `[n]` int32.

    Raises:
        InputError: the files are missing, truncated, or not in this format.
    """

    def __init__(self, prefix: Path):
        header = _read_header(prefix)
        binary, index = files_of(prefix)
        n = header.sequences
        self.prefix = prefix
        self.lengths: NDArray[np.int32] = np.memmap(index, np.int32, "r", HEADER.size, n)
        self._offsets: NDArray[np.int64] = np.memmap(index, np.int64, "r", HEADER.size + 4 * n, n)
        self._tokens: NDArray[Any] = np.memmap(binary, header.dtype, "r")
        self._check_documents(index)

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def dtype(self) -> np.dtype[Any]:
        """Type of the tokens on disk."""
        return self._tokens.dtype

    @property
    def num_tokens(self) -> int:
        """Tokens of all sequences."""
        return int(self.lengths.sum(dtype=np.int64))

    def _check_documents(self, index: Path) -> None:
        """Refuse sequences that don't lie inside .bin; some millions are looked at a time."""
        size, itemsize = self._tokens.nbytes, self._tokens.itemsize
        for first in range(0, len(self), AT_ONCE):
            lengths = self.lengths[first : first + AT_ONCE].astype(np.int64)
            offsets = self._offsets[first : first + AT_ONCE]
            # An offset near 2^63 must not wrap around, so nothing is added to it.
            wrong = (lengths < 0) | (offsets < 0) | (offsets > size - lengths * itemsize)
            wrong |= offsets % itemsize != 0
            if wrong.any():
                at = int(wrong.argmax())
                raise InputError(
                    f"document {first + at:,} (from 0) has {lengths[at]:,} tokens at byte "
                    f"{offsets[at]:,}, which is no place in {size:,} bytes of {itemsize} a token",
                    str(index),
                    REBUILD,
                )

    def read(self, sequence: int, offset: int = 0, length: int | None = None) -> NDArray[Any]:
        """Tokens `[offset, offset + length)` of one sequence, a view of the map.

        Raises:
            IndexError: the sequence has no such tokens.
        """
        whole = int(self.lengths[sequence])
        count = whole - offset if length is None else length
        if not 0 <= offset <= offset + count <= whole:
            raise IndexError(f"tokens {offset} to {offset + count} of a sequence of {whole}")
        start = int(self._offsets[sequence]) // self._tokens.itemsize + offset
        return self._tokens[start : start + count]


class IndexedWriter:
    """Writes PREFIX.bin and PREFIX.idx, which appear only on a clean end of the `with` block.

    Documents are appended in blocks: all their tokens in one array and their lengths in another.
    Lengths are kept as int32, four bytes a document. A run that is killed leaves only
    `PREFIX.bin.tmp`, which the next one replaces; two at once are refused.

    Raises:
        InputError: on entering, if another process is writing the same prefix.
    """

    def __init__(self, prefix: Path, dtype: type[np.generic]):
        self.dtype = dtype
        self.tokens = 0
        self._files = files_of(prefix)
        self._lengths: list[NDArray[np.int32]] = []

    @property
    def documents(self) -> int:
        """Documents written so far."""
        return sum(map(len, self._lengths))

    def __enter__(self) -> Self:
        self._files.bin.parent.mkdir(parents=True, exist_ok=True)
        self._stream = _temporary(self._files.bin).open("ab")
        try:
            fcntl.flock(self._stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self._stream.close()
            raise InputError(
                "another process is writing this output", str(self._files.bin), "wait for it"
            ) from error
        self._stream.truncate(0)
        return self

    def append(self, tokens: NDArray[Any], lengths: NDArray[np.int32]) -> None:
        """Append documents: `tokens` of all of them in a row, and the `lengths` that cut them."""
        self._stream.write(tokens.astype(self.dtype, copy=False).tobytes())
        self._lengths.append(lengths.astype(np.int32, copy=False))
        self.tokens += len(tokens)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is not None:
            self._stream.close()
            for path in self._files:
                _temporary(path).unlink(missing_ok=True)
            return
        _close_durably(self._stream)
        with _temporary(self._files.idx).open("wb") as stream:
            self._write_index(stream)
            _close_durably(stream)
        # An old .idx must not be seen beside a new .bin: it goes first, and the new one comes last.
        self._files.idx.unlink(missing_ok=True)
        for path in self._files:
            _temporary(path).replace(path)
        sync_folder(self._files.bin.parent)

    def _write_index(self, stream: IO[bytes]) -> None:
        lengths = np.concatenate([np.zeros(0, np.int32), *self._lengths])
        n = len(lengths)
        stream.write(HEADER.pack(MAGIC, 1, CODES[self.dtype], n, n + 1))
        stream.write(lengths.tobytes())
        stream.write(byte_offsets(lengths, np.dtype(self.dtype).itemsize).tobytes())
        stream.write(np.arange(n + 1, dtype=np.int64).tobytes())


def _temporary(path: Path) -> Path:
    return path.with_name(path.name + ".tmp")


def _close_durably(stream: IO[bytes]) -> None:
    stream.flush()
    os.fsync(stream.fileno())
    stream.close()


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn a full disk, or a folder that can't be written, into an error that names it."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        raise RunError(
            f"can't be written: {reason}", str(error.filename or path), "give another place"
        ) from error


def sync_folder(folder: Path) -> None:
    """Make renames inside `folder` survive a power cut."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
