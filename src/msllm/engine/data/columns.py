"""Readers of column files: parquet, and arrow in its file and stream forms (also .feather).

Rows are taken a few at a time, so memory is bounded by one row group's pages. The line of a record
is its row, from 1.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from msllm.engine.data.formats import pack
from msllm.engine.data.records import COMPRESSED, Block, Record, open_decompressed, text_record
from msllm.errors import InputError

ROWS = 256


def read_parquet(raw: IO[bytes], path: Path, keys: tuple[str, ...]) -> Iterator[Block]:
    """Read the columns `keys` of a parquet file."""
    import pyarrow.parquet as parquet

    with _seekable(raw, path) as stream:
        file = parquet.ParquetFile(stream)
        _check_columns(file.schema_arrow.names, path, keys)
        batches = file.iter_batches(batch_size=ROWS, columns=list(keys), use_threads=False)
        yield from pack(_records(batches, keys), raw, path)


def read_arrow(raw: IO[bytes], path: Path, keys: tuple[str, ...]) -> Iterator[Block]:
    """Read the columns `keys` of an arrow file or stream."""
    with _seekable(raw, path) as stream:
        yield from pack(_records(_arrow_batches(stream, path, keys), keys), raw, path)


def _arrow_batches(stream: IO[bytes], path: Path, keys: tuple[str, ...]) -> Iterator[Any]:
    import pyarrow as pa

    start = stream.read(6)
    stream.seek(0)
    if start == b"ARROW1":
        file = pa.ipc.open_file(stream)
        batches = (file.get_batch(i) for i in range(file.num_record_batches))
        names = file.schema.names
    else:
        batches = pa.ipc.open_stream(stream)
        names = batches.schema.names
    _check_columns(names, path, keys)
    for batch in batches:
        for first in range(0, batch.num_rows, ROWS):
            yield batch.slice(first, ROWS)


def _records(batches: Iterator[Any], keys: tuple[str, ...]) -> Iterator[Record]:
    row = 0
    for batch in batches:
        columns = [batch.column(key) for key in keys]
        for i in range(batch.num_rows):
            row += 1
            try:
                values = [column[i].as_py() for column in columns]
            except UnicodeDecodeError as error:
                yield Record(row, flaw=f"invalid UTF-8 at byte {error.start + 1}")
                continue
            yield text_record(dict(zip(keys, values, strict=True)), row, keys)


def _check_columns(names: list[str], path: Path, keys: tuple[str, ...]) -> None:
    for key in keys:
        if key not in names:
            there = ", ".join(names[:12])
            raise InputError(f"no column `{key}`", str(path), f"its columns: {there}; --text-key")


@contextmanager
def _seekable(raw: IO[bytes], path: Path) -> Iterator[IO[bytes]]:
    """Give the file itself, or its decompressed copy on disk: the formats need to seek."""
    if path.suffix.lower() not in COMPRESSED:
        yield raw
        return
    with tempfile.TemporaryFile() as copy:
        shutil.copyfileobj(open_decompressed(raw, path), copy, 1 << 20)
        copy.seek(0)
        yield copy
