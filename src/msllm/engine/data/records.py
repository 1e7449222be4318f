"""Raw text files: which ones a path names, and their records, read in blocks of bounded size.

A record is one text with its line, or what is wrong with it. Each kind of file has its reader in
`formats` (text) or `columns` (parquet, arrow); this module picks it and knows compression.
"""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, cast

from msllm.errors import InputError, Problem

KINDS = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "json",
    ".txt": "txt",
    ".csv": "csv",
    ".parquet": "parquet",
    ".arrow": "arrow",
    ".feather": "arrow",
}
COMPRESSED = (".gz", ".zst")
SUPPORTED = " ".join(kind for kind in KINDS) + ", each also .gz or .zst"
BLOCK_BYTES = 1 << 20
"""Bytes of text after which a block is closed; one record is never cut."""


@dataclass(frozen=True, slots=True)
class Record:
    """One text.

    Attributes:
        line: Line (rows of parquet and arrow), from 1.
        text: The text; blank for an empty record.
        flaw: What is wrong with a broken record, else empty.
    """

    line: int
    text: str = ""
    flaw: str = ""


@dataclass(frozen=True, slots=True)
class Block:
    """Some records of one file, in order.

    Lines of JSON are left as bytes, so that worker processes parse them and not the one that reads.

    Attributes:
        file: The file.
        read_bytes: Bytes of the file, as it is on disk, read since the block before.
        first_line: Line of the first of `lines`.
        lines: Lines of JSON, if this is a block of them.
        parsed: The records otherwise.
    """

    file: Path
    read_bytes: int
    first_line: int = 1
    lines: bytes = b""
    parsed: list[Record] = field(default_factory=list)

    def records(self, keys: tuple[str, ...]) -> Iterator[Record]:
        """Yield the block's records; `keys` hold the text of JSON lines."""
        yield from self.parsed
        if self.lines:
            # Only \n ends a line: splitlines() would cut at \r and form feeds too.
            ended = self.lines.removesuffix(b"\n").split(b"\n")
            for line, data in enumerate(ended, self.first_line):
                yield json_record(data, line, keys)


def json_record(data: bytes, line: int, keys: tuple[str, ...]) -> Record:
    """Read the record in one line of JSON."""
    if line == 1:
        data = data.removeprefix(b"\xef\xbb\xbf")
    if not data.strip():
        return Record(line)
    try:
        found = json.loads(data.decode("utf-8"))
    except UnicodeDecodeError as error:
        return Record(line, flaw=f"invalid UTF-8 at byte {error.start + 1}")
    except (ValueError, RecursionError) as error:
        return Record(line, flaw=f"invalid JSON: {error}")
    return text_record(found, line, keys)


def text_record(found: Any, line: int, keys: tuple[str, ...]) -> Record:
    """Take the text under `keys` of an object; several are joined by a newline."""
    if not isinstance(found, dict):
        return Record(line, flaw=f"not an object but {_kind(found)}")
    parts = []
    for key in keys:
        if key not in found:
            there = ", ".join(map(str, list(found)[:8])) or "none"
            return Record(line, flaw=f"no key `{key}`; keys there: {there}")
        value = found[key]
        if value is not None and not isinstance(value, str):
            return Record(line, flaw=f"`{key}` is {_kind(value)}, not text")
        parts.append(value or "")
    return plain_record("\n".join(parts), line)


def plain_record(text: str, line: int) -> Record:
    """Make the record of a text, broken if it can't be written as UTF-8."""
    if not text.isascii():
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            return Record(line, flaw=f"half a surrogate pair at character {error.start + 1}")
    return Record(line, text if text.strip() else "")


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "text", bool: "true or false"}
    return names.get(type(value), "null" if value is None else "a number")


def split_keys(text_key: str) -> tuple[str, ...]:
    """Split the keys of `--text-key title,text`."""
    keys = tuple(key.strip() for key in text_key.split(",") if key.strip())
    if not keys:
        raise InputError("no key given", f"--text-key {text_key!r}", "such as --text-key text")
    return keys


def kind_of(path: Path) -> str | None:
    """Tell a file's kind by its name: `jsonl` for corpus.jsonl.gz; None if not supported."""
    suffixes = [suffix.lower() for suffix in path.suffixes]
    if suffixes and suffixes[-1] in COMPRESSED:
        suffixes.pop()
    return KINDS.get(suffixes[-1]) if suffixes else None


def find_files(paths: list[Path]) -> list[Path]:
    """List the files that `paths` name, in their order; those of a folder by name, at any depth.

    Raises:
        InputError: a path is missing, unreadable, empty, or not of a supported kind; all of these
            are reported together.
    """
    files: list[Path] = []
    problems: list[Problem] = []
    for path in paths:
        found, wrong = _in_folder(path) if path.is_dir() else ([path], _check_file(path))
        files += found
        problems += wrong
    if problems:
        raise InputError(problems)
    return files


def _in_folder(folder: Path) -> tuple[list[Path], list[Problem]]:
    files = sorted(
        path
        for path in folder.rglob("*")
        if kind_of(path)
        and not any(part.startswith(".") for part in path.relative_to(folder).parts)
        and path.is_file()
    )
    if not any(path.stat().st_size for path in files):
        what = "only empty data files" if files else "no data files"
        return [], [Problem(f"{what} in the folder", str(folder), f"supported: {SUPPORTED}")]
    unreadable = [path for path in files if not os.access(path, os.R_OK)]
    return files, [_unreadable(path) for path in unreadable]


def _check_file(path: Path) -> list[Problem]:
    if not path.exists():
        return [Problem("file not found", str(path), "check the path")]
    if kind_of(path) is None:
        return [Problem("not a kind of file msllm reads", str(path), f"supported: {SUPPORTED}")]
    if not os.access(path, os.R_OK):
        return [_unreadable(path)]
    if path.is_file() and path.stat().st_size == 0:
        return [Problem("the file is empty", str(path), "leave it out")]
    return []


def _unreadable(path: Path) -> Problem:
    return Problem("no permission to read the file", str(path), "change its permissions")


def open_decompressed(raw: IO[bytes], path: Path) -> IO[bytes]:
    """Decompress `raw` if the file's name says that it is compressed."""
    suffix = path.suffix.lower()
    if suffix == ".gz":
        return cast(IO[bytes], gzip.GzipFile(fileobj=raw))
    if suffix == ".zst":
        # The zstandard package's own stream takes the end of a cut file for the end of its content.
        import pyarrow as pa

        # pyarrow closes what it was given when it is done; the same file under another number
        # leaves `raw` open to be asked for its position.
        same = open(os.dup(raw.fileno()), "rb", buffering=0)  # noqa: SIM115
        return cast(IO[bytes], pa.CompressedInputStream(pa.PythonFile(same, "r"), "zstd"))
    return raw


def read_blocks(path: Path, keys: tuple[str, ...]) -> Iterator[Block]:
    """Yield the records of one file, in order, about BLOCK_BYTES at a time.

    Raises:
        InputError: the file as a whole can't be read: damaged compression, or columns missing.
    """
    from msllm.engine.data import columns, formats

    readers = {
        "jsonl": formats.read_jsonl,
        "json": formats.read_json,
        "txt": formats.read_txt,
        "csv": formats.read_csv,
        "parquet": columns.read_parquet,
        "arrow": columns.read_arrow,
    }
    kind = kind_of(path)
    if kind is None:
        raise InputError("not a kind of file msllm reads", str(path), f"supported: {SUPPORTED}")
    try:
        with path.open("rb") as raw:
            yield from readers[kind](raw, path, keys)
    except InputError:
        raise
    except Exception as error:  # gzip, zstandard and pyarrow each have their own kinds
        raise InputError(
            f"can't be read: {error}", str(path), "the file is damaged, or not what its name says"
        ) from error
