"""Readers of text files: JSON lines, JSON, plain text, CSV. Each yields blocks of records.

CSV is read by the standard library and not by pyarrow, because it knows on which line a broken row
is. A .txt file is one document; nothing cuts it.
"""

from __future__ import annotations

import codecs
import csv
import json
import sys
from collections.abc import Iterable, Iterator
from json import JSONDecodeError
from pathlib import Path
from typing import IO

from msllm.engine.data.records import (
    BLOCK_BYTES,
    Block,
    Record,
    open_decompressed,
    plain_record,
    text_record,
)

READ_BYTES = 1 << 18
NEAR_END = 16
"""An error this close to the end of what was read may only mean that the rest is still to come:
longer than any literal or escape that can be cut."""


def pack(records: Iterable[Record], raw: IO[bytes], path: Path) -> Iterator[Block]:
    """Group records into blocks of about BLOCK_BYTES."""
    waiting: list[Record] = []
    size = before = 0
    for record in records:
        waiting.append(record)
        size += len(record.text) + 64
        if size >= BLOCK_BYTES:
            yield Block(path, raw.tell() - before, parsed=waiting)
            waiting, size, before = [], 0, raw.tell()
    yield Block(path, raw.tell() - before, parsed=waiting)


def read_jsonl(raw: IO[bytes], path: Path, keys: tuple[str, ...]) -> Iterator[Block]:
    """Cut the file at line ends; the lines are parsed where the block is used."""
    stream = open_decompressed(raw, path)
    rest: list[bytes] = []
    line, before = 1, 0
    while data := stream.read(BLOCK_BYTES):
        end = data.rfind(b"\n") + 1
        if not end:
            rest.append(data)
            continue
        lines = b"".join([*rest, data[:end]])
        yield Block(path, raw.tell() - before, line, lines)
        before = raw.tell()
        line += lines.count(b"\n")
        rest = [data[end:]]
    yield Block(path, raw.tell() - before, line, b"".join(rest))


def read_txt(raw: IO[bytes], path: Path, keys: tuple[str, ...]) -> Iterator[Block]:
    """Read the whole file as one document."""
    data = open_decompressed(raw, path).read()
    try:
        record = plain_record(data.decode("utf-8-sig"), 1)
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        record = Record(line, flaw=f"invalid UTF-8 at byte {error.start + 1}")
    yield from pack([record], raw, path)


def read_csv(raw: IO[bytes], path: Path, keys: tuple[str, ...]) -> Iterator[Block]:
    """Read rows under the names in the first one."""
    stream = open_decompressed(raw, path)
    yield from pack(_csv_records(stream, keys), raw, path)


def _csv_records(stream: IO[bytes], keys: tuple[str, ...]) -> Iterator[Record]:
    # The default of 128 KiB a field is less than many documents; the limit is the module's own.
    csv.field_size_limit(sys.maxsize)
    # Invalid bytes become lone surrogates, which plain_record finds, so that one row is lost and
    # not the file.
    text = (line.decode("utf-8", "surrogateescape") for line in _without_bom(_lines(stream)))
    rows = csv.reader(text, strict=True)
    header: list[str] | None = None
    while True:
        line = rows.line_num + 1
        try:
            row = next(rows)
        except StopIteration:
            return
        except csv.Error as error:
            yield Record(line, flaw=f"invalid CSV: {error}")
            continue
        if header is None:
            header = row
        elif not row:
            yield Record(line)
        elif len(row) != len(header):
            yield Record(line, flaw=f"{len(row)} fields, the header has {len(header)}")
        else:
            yield text_record(dict(zip(header, row, strict=True)), line, keys)


def _lines(stream: IO[bytes]) -> Iterator[bytes]:
    """Yield lines with their ends; a decompressor of zstandard has no readline."""
    rest: list[bytes] = []
    while data := stream.read(READ_BYTES):
        if b"\n" not in data:
            rest.append(data)
            continue
        *lines, last = b"".join([*rest, data]).split(b"\n")
        yield from (line + b"\n" for line in lines)
        rest = [last]
    if last := b"".join(rest):
        yield last


def _without_bom(lines: Iterator[bytes]) -> Iterator[bytes]:
    for number, line in enumerate(lines):
        yield line.removeprefix(codecs.BOM_UTF8) if number == 0 else line


def read_json(raw: IO[bytes], path: Path, keys: tuple[str, ...]) -> Iterator[Block]:
    """Read an array of objects, or objects one after another (also one a line)."""
    stream = open_decompressed(raw, path)
    yield from pack(_JsonReader(stream, keys).records(), raw, path)


class _JsonReader:
    """Decodes one value after another from a window that grows only while a value is cut."""

    def __init__(self, stream: IO[bytes], keys: tuple[str, ...]):
        self._stream, self._keys = stream, keys
        self._decode = codecs.getincrementaldecoder("utf-8")("surrogateescape").decode
        self._json = json.JSONDecoder()
        self._window, self._at, self._line = "", 0, 1
        self._ended = False

    def records(self) -> Iterator[Record]:
        self._window = self._more().removeprefix("\ufeff")
        in_array = self._next_character() == "["
        if in_array:
            self._advance(self._at + 1)
        while character := self._next_character(also="," if in_array else ""):
            if in_array and character == "]":
                in_array = False
                self._advance(self._at + 1)
                continue
            line = self._line
            try:
                found = self._value()
            except (JSONDecodeError, RecursionError) as error:
                yield Record(line, flaw=f"invalid JSON: {error}")
                self._skip_line()
                continue
            yield text_record(found, line, self._keys)
        if in_array:
            yield Record(self._line, flaw="the array is not closed; the file may be truncated")

    def _value(self) -> object:
        while True:
            try:
                value, end = self._json.raw_decode(self._window, self._at)
            except JSONDecodeError as error:
                cut = "Unterminated string" in error.msg or (
                    error.pos >= len(self._window) - NEAR_END
                )
                if not cut or not self._grow(len(self._window) - self._at):
                    raise
            else:
                self._advance(end)
                return value

    def _next_character(self, also: str = "") -> str:
        """Return the next character that is neither blank nor in `also`, without taking it."""
        while True:
            at, window = self._at, self._window
            while at < len(window) and (window[at].isspace() or window[at] in also):
                at += 1
            self._advance(at)
            if at < len(window):
                return window[at]
            if not self._grow(1):
                return ""

    def _skip_line(self) -> None:
        """Go on after the line of a broken value: in one-a-line files the next one is whole."""
        while (end := self._window.find("\n", self._at)) < 0:
            self._advance(len(self._window))
            if not self._grow(1):
                return
        self._advance(end + 1)

    def _advance(self, to: int) -> None:
        self._line += self._window.count("\n", self._at, to)
        self._at = to

    def _grow(self, least: int) -> bool:
        """Drop what was read and read at least as much as is left, so that time stays linear."""
        left = self._window[self._at :]
        parts: list[str] = []
        size = 0
        while size < least and not self._ended:
            parts.append(self._more())
            size += len(parts[-1])
        self._window, self._at = "".join([left, *parts]), 0
        return size > 0

    def _more(self) -> str:
        data = self._stream.read(READ_BYTES)
        self._ended = not data
        return self._decode(data, final=self._ended)
