"""Raw text files to one indexed prefix: read in blocks, tokenized by workers, written in order.

The order of documents is that of the input whatever the number of workers, and the files appear
whole or not at all. Showing progress is left to the caller.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, field
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from msllm.engine.data.indexed import IndexedWriter, files_of, token_dtype, writing
from msllm.engine.data.records import Block, find_files, read_blocks, split_keys
from msllm.engine.data.sources import SUFFIX
from msllm.engine.data.summary import Summary, write_summary
from msllm.engine.data.tokens import Tokenizer
from msllm.engine.data.workers import map_in_order
from msllm.engine.output_path import check_prefix
from msllm.errors import InputError, Problem

EXAMPLES = 5
"""Empty and broken records that are named; all are counted."""
AHEAD = 3
"""Blocks in flight for each worker: enough that none waits for the reader."""


@dataclass
class Report:
    """What was done so far, and in the end.

    Attributes:
        prefix: What to give to `--data`.
        documents: Documents written.
        tokens: Their tokens, end-of-document tokens included.
        text_bytes: Their text as UTF-8.
        empty: Records without text, left out.
        broken: Records that could not be read, left out.
        examples: The first few of these as `file:line: reason`.
        read_bytes: Bytes read of the files as they are on disk.
        total_bytes: Bytes of all files on disk.
        seconds: Since the start.
    """

    prefix: str
    total_bytes: int
    documents: int = 0
    tokens: int = 0
    text_bytes: int = 0
    empty: int = 0
    broken: int = 0
    examples: list[str] = field(default_factory=list)
    read_bytes: int = 0
    seconds: float = 0.0


Progress = Callable[[Report], None]


@dataclass(frozen=True)
class _Encoded:
    """What a worker makes of a block."""

    tokens: NDArray[Any]
    lengths: NDArray[np.int32]
    text_bytes: int
    empty: list[int]
    broken: list[tuple[int, str]]


@dataclass(frozen=True)
class _Task:
    """What a worker needs to know beside the block; the same for all blocks."""

    tokenizer: Path
    keys: tuple[str, ...]
    eod: int | None
    dtype: type[np.generic]


def preprocess(
    paths: list[Path],
    tokenizer: Path,
    out: str | Path,
    *,
    workers: int,
    text_key: str = "text",
    append_eod: bool = True,
    on_error: Literal["skip", "fail"] = "skip",
    overwrite: bool = False,
    progress: Progress = lambda report: None,
) -> Report:
    """Tokenize text files into `out`_text_document.bin and .idx (and .json, a summary).

    Args:
        paths: Files and folders; see `records` for the kinds.
        tokenizer: Tokenizer folder.
        out: Prefix; `_text_document` is added unless it is there.
        workers: Processes that parse and tokenize.
        text_key: Field or column of the text; several, separated by commas, are joined by newlines.
        append_eod: End each document with the tokenizer's EOS.
        on_error: What to do about a broken record.
        overwrite: Replace finished output.
        progress: Called after each block with the counts so far.

    Raises:
        InputError: nothing was written, because of the files, the tokenizer, finished output that
            is there already, a broken record with `on_error="fail"`, or because no text is left.
        RunError: a worker died, or the output can't be written.
    """
    if problems := check_prefix(out, f"--out {out}"):
        raise InputError(problems)
    out = Path(out)
    prefix = out if out.name.endswith(SUFFIX) else out.with_name(out.name + SUFFIX)
    keys = split_keys(text_key)
    files, loaded, eod = _check_inputs(paths, tokenizer, prefix, append_eod, overwrite)
    task = _Task(tokenizer, keys, eod, token_dtype(loaded.vocab_size))
    report = Report(str(prefix), sum(file.stat().st_size for file in files))
    started = time.perf_counter()
    largest = 0
    encoded_blocks = map_in_order(
        partial(_encode, task), _blocks(files, keys), workers, workers * AHEAD
    )
    with writing(prefix), IndexedWriter(prefix, task.dtype) as writer, closing(encoded_blocks):
        for block, encoded in encoded_blocks:
            _count(report, block, encoded, on_error)
            writer.append(encoded.tokens, encoded.lengths)
            largest = max(largest, int(encoded.tokens.max(initial=0)))
            report.seconds = time.perf_counter() - started
            progress(report)
        if report.tokens == 0:
            raise InputError(_nothing_left(report, paths))
        write_summary(
            prefix,
            Summary(
                documents=report.documents,
                tokens=report.tokens,
                largest_token=largest,
                tokenizer=loaded.fingerprint,
                eod=eod,
            ),
        )
    return report


def _check_inputs(
    paths: list[Path], tokenizer: Path, prefix: Path, append_eod: bool, overwrite: bool
) -> tuple[list[Path], Tokenizer, int | None]:
    """Check everything before any work; all problems are raised together."""
    problems: list[Problem] = []
    files: list[Path] = []
    loaded: Tokenizer | None = None
    eod: int | None = None
    if not overwrite and all(file.exists() for file in files_of(prefix)):
        problems.append(
            Problem("output is there already", f"{prefix}.idx", "give --overwrite to replace it")
        )
    try:
        files = find_files(paths)
    except InputError as error:
        problems += error.problems
    try:
        loaded = Tokenizer(tokenizer)
        eod = loaded.eod_id if append_eod else None
    except InputError as error:
        problems += error.problems
    if problems or loaded is None:
        raise InputError(problems)
    return files, loaded, eod


def _blocks(files: list[Path], keys: tuple[str, ...]) -> Iterator[Block]:
    for file in files:
        yield from read_blocks(file, keys)


@lru_cache(maxsize=1)
def _tokenizer(folder: Path) -> Tokenizer:
    return Tokenizer(folder)


def _encode(task: _Task, block: Block) -> _Encoded:
    """Parse and tokenize one block, in a worker."""
    texts: list[str] = []
    lines: list[int] = []
    empty: list[int] = []
    broken: list[tuple[int, str]] = []
    for record in block.records(task.keys):
        if record.flaw:
            broken.append((record.line, record.flaw))
        elif not record.text:
            empty.append(record.line)
        else:
            texts.append(record.text)
            lines.append(record.line)
    tokens, lengths = _tokenizer(task.tokenizer).encode_documents(texts, task.eod)
    # A text that the tokenizer's normalizer makes nothing of is empty too.
    empty += [line for line, length in zip(lines, lengths, strict=True) if length == 0]
    return _Encoded(
        tokens.astype(task.dtype),
        lengths[lengths > 0],
        sum(len(text) if text.isascii() else len(text.encode()) for text in texts),
        sorted(empty),
        broken,
    )


def _count(report: Report, block: Block, encoded: _Encoded, on_error: str) -> None:
    """Add a block to the report.

    Raises:
        InputError: a record is broken and none may be.
    """
    if encoded.broken and on_error == "fail":
        line, flaw = encoded.broken[0]
        raise InputError(
            f"broken record: {flaw}",
            f"{block.file}:{line}",
            "repair it, or give --on-error skip; nothing was written",
        )
    report.documents += len(encoded.lengths)
    report.tokens += len(encoded.tokens)
    report.text_bytes += encoded.text_bytes
    report.empty += len(encoded.empty)
    report.broken += len(encoded.broken)
    report.read_bytes += block.read_bytes
    left_out = sorted([*encoded.broken, *((line, "empty") for line in encoded.empty)])
    room = max(0, EXAMPLES - len(report.examples))
    report.examples += [f"{block.file}:{line}: {why}" for line, why in left_out[:room]]


def _nothing_left(report: Report, paths: list[Path]) -> Problem:
    named = ", ".join(str(path) for path in paths[:3])
    found = f"no text found: {report.empty} empty and {report.broken} broken records"
    return Problem(found, named, "; ".join(report.examples) or "the files hold no records")
