"""What `--data` names: parsing, and checking it all before anything starts.

`check_sources` collects every problem it finds from headers, sizes and the tokenizer, without
reading the data; turning raw files into indexed ones is `cache`'s work, reading them `stream`'s.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from msllm.config import DataConfig
from msllm.engine.data.indexed import IndexedTokens, files_of, find_problem
from msllm.engine.data.order import samples_in
from msllm.engine.data.records import find_files
from msllm.engine.data.summary import read_summary
from msllm.engine.data.tokens import Tokenizer
from msllm.errors import InputError, MsllmError, Problem

SMALLEST_WEIGHT = 1e-9
WEIGHT = re.compile(r"(?P<weight>\d+(\.\d*)?([eE][+-]?\d+)?|\.\d+):(?P<path>.+)")
SUFFIX = "_text_document"
SPLIT_AT_ONCE = 1 << 24
PEEK = 65_536
"""Tokens looked at, at both ends of a file that has no summary, for ids outside the vocabulary."""


@dataclass(frozen=True)
class Source:
    """One item of `--data`.

    Attributes:
        text: As it was typed.
        weight: Its share of the samples, if one was given.
        kind: `mock`; `indexed`, a prefix of .bin and .idx; `raw`, a file or folder of text.
        path: The prefix without .bin and .idx, the file or the folder; empty for mock.
    """

    text: str
    weight: Fraction | None
    kind: Literal["mock", "indexed", "raw"]
    path: Path

    def with_path(self, prefix: Path) -> str:
        """Write the item as it would be typed with `prefix` in place of its path."""
        return str(prefix) if self.weight is None else f"{self.text.partition(':')[0]}:{prefix}"


def parse_sources(items: list[str], where: str) -> tuple[list[Source], list[Problem]]:
    """Read the sources of a list of `--data` items, and what is wrong with the rest."""
    sources: list[Source] = []
    problems: list[Problem] = []
    for item in items:
        try:
            sources.append(_parse(item, where))
        except InputError as error:
            problems.extend(error.problems)
    weighted = sum(source.weight is not None for source in sources)
    if 0 < weighted < len(sources):
        bare = next(source.text for source in sources if source.weight is None)
        problems.append(
            Problem(f"`{bare}` has no weight but others have", where, "weigh all sources or none")
        )
    kinds = {source.kind == "mock" for source in sources if source.weight is None}
    if len(kinds) > 1:
        problems.append(
            Problem("mock beside real data needs weights", where, "such as 0.5:mock 0.5:code")
        )
    return sources, problems


def _parse(item: str, where: str) -> Source:
    match = WEIGHT.fullmatch(item)
    text = match["path"] if match else item
    if match and not SMALLEST_WEIGHT <= float(match["weight"]) <= 1 / SMALLEST_WEIGHT:
        raise InputError(
            f"weight {match['weight']} in `{item}`",
            where,
            f"weights go from {SMALLEST_WEIGHT:g} to {1 / SMALLEST_WEIGHT:g}; "
            "leave out what has none",
        )
    weight = Fraction(match["weight"]) if match else None
    if text == "mock":
        return Source(item, weight, "mock", Path())
    prefix = find_prefix(text)
    if prefix is not None:
        return Source(item, weight, "indexed", prefix)
    path = Path(text).expanduser()
    if not path.exists():
        raise InputError(
            f"`{text}` not found, neither {text}.idx, nor {text}{SUFFIX}.idx, nor a file or folder",
            where,
            "check the path; 0.7:PATH gives a weight",
        )
    return Source(item, weight, "raw", path)


def find_prefix(text: str) -> Path | None:
    """Find the indexed prefix that `text` names: as it is, less .bin/.idx, or with the suffix."""
    bare = str(Path(re.sub(r"\.(bin|idx)$", "", text)).expanduser())
    for prefix in (Path(bare), Path(bare + SUFFIX)):
        if any(path.exists() for path in files_of(prefix)):
            return prefix
    return None


def groups_of(sources: list[Source]) -> list[list[Source]]:
    """Put together what is one data set: sources without weights; weighted ones stay alone.

    So an epoch over unweighted sources holds each of their documents once.
    """
    if any(source.weight is not None or source.kind == "mock" for source in sources):
        return [[source] for source in sources]
    return [sources]


def split_documents(count: int, fraction: float, valid: bool) -> NDArray[Any]:
    """Numbers of the documents for validation (`valid`), or of all others.

    Every 1/fraction-th document is for validation: round(count * fraction) of them, spread over
    the whole set, and a document keeps its side when others are appended.
    """
    dtype = np.int32 if count < 2**31 - 1 else np.int64
    chosen = [np.zeros(0, dtype)]
    for first in range(0, count, SPLIT_AT_ONCE):
        numbers = np.arange(first, min(first + SPLIT_AT_ONCE, count), dtype=dtype)
        before, after = (
            np.floor(bound.astype(np.float64) * fraction + 0.5) for bound in (numbers, numbers + 1)
        )
        chosen.append(numbers[(after > before) == valid])
    return np.concatenate(chosen)


def cache_folder(data: DataConfig) -> Path:
    """Where tokenized data and large orders are kept."""
    return data.cache_dir or Path.home() / ".cache" / "msllm" / "data"


def end_of_document(data: DataConfig) -> int:
    """Look up the end-of-document token of the run's tokenizer.

    Raises:
        InputError: there is no tokenizer, or it has no such token.
    """
    if data.tokenizer is None:
        raise InputError(
            "eod_mask_loss needs a tokenizer to know the end-of-document token",
            "data.tokenizer",
            "give --tokenizer DIR",
        )
    return Tokenizer(data.tokenizer).eod_id


def check_sources(config: DataConfig, vocab_size: int) -> list[Problem]:
    """Everything wrong with a run's data that can be known without reading it.

    Args:
        config: The run's data section.
        vocab_size: Ids of the model, without padding.
    """
    if not config.paths:
        return [Problem("no training data", "--data", "give PREFIX, text files, or mock")]
    problems = []
    if config.valid_paths and config.valid_fraction:
        problems.append(
            Problem("both valid_paths and valid_fraction are set", "data", "set one of them")
        )
    train, found = parse_sources(config.paths, "--data")
    problems += found
    valid, found = parse_sources(config.valid_paths, "--valid-data")
    problems += found
    problems += _check_tokenizer(config, [*train, *valid], vocab_size)
    for source in [*train, *valid]:
        problems += _check_source(source, vocab_size)
    if not problems:
        problems += _check_sizes(config, train, "train", config.valid_fraction)
        if config.valid_fraction:
            problems += _check_sizes(config, train, "valid", config.valid_fraction)
        problems += _check_sizes(config, valid, "valid", 1.0)
    return problems


def _check_tokenizer(config: DataConfig, sources: list[Source], vocab_size: int) -> list[Problem]:
    raw = next((source for source in sources if source.kind == "raw"), None)
    if config.tokenizer is None:
        if raw is not None:
            hint = "give --tokenizer DIR, or `msllm preprocess` it first"
            return [Problem(f"raw data `{raw.text}` needs a tokenizer", "--data", hint)]
        if config.eod_mask_loss:
            hint = "give --tokenizer DIR"
            return [Problem("eod_mask_loss needs a tokenizer", "data.eod_mask_loss", hint)]
        return []
    try:
        tokenizer = Tokenizer(config.tokenizer)
    except MsllmError as error:
        return error.problems
    problems = []
    if tokenizer.vocab_size > vocab_size:
        problems.append(
            Problem(
                f"the tokenizer has {tokenizer.vocab_size:,} ids, the model's vocabulary only "
                f"{vocab_size:,}",
                f"--tokenizer {config.tokenizer}",
                "use the model's own tokenizer, or train one with --vocab-size "
                f"{vocab_size} or fewer",
            )
        )
    if raw is not None or config.eod_mask_loss:
        try:
            _ = tokenizer.eod_id
        except InputError as error:
            problems += error.problems
    return problems


def _check_source(source: Source, vocab_size: int) -> list[Problem]:
    if source.kind == "mock":
        return []
    if source.kind == "raw":
        try:
            find_files([source.path])
        except InputError as error:
            return error.problems
        return []
    problem = find_problem(source.path)
    if problem is not None:
        return [problem]
    largest = _largest_token(source.path)
    if largest < vocab_size:
        return []
    return [
        Problem(
            f"holds token {largest:,}, outside the model's vocabulary of {vocab_size:,}",
            f"{source.path}.bin",
            "preprocess the text with the model's own tokenizer",
        )
    ]


def _largest_token(prefix: Path) -> int:
    """Largest id of the file's summary; of its first and last tokens if it has none."""
    summary, file = read_summary(prefix), IndexedTokens(prefix)
    if summary is not None and summary.tokens == file.num_tokens:
        return summary.largest_token
    tokens = np.memmap(files_of(prefix).bin, file.dtype, "r")
    return int(max(tokens[:PEEK].max(), tokens[-PEEK:].max()))


def _check_sizes(
    config: DataConfig, sources: list[Source], part: str, split: float
) -> list[Problem]:
    """Find groups too small for one sample; raw data is only known once it is tokenized."""
    problems = []
    for group in groups_of(sources) if sources else []:
        if any(source.kind != "indexed" for source in group):
            continue
        lengths = np.concatenate([IndexedTokens(source.path).lengths for source in group])
        documents = split_documents(len(lengths), split, part == "valid")
        tokens = int(lengths[documents].sum(dtype=np.int64))
        if samples_in(tokens, config.seq_length) == 0:
            name = ", ".join(source.text for source in group)
            problems.append(
                Problem(
                    f"{tokens:,} {part} tokens in {len(documents):,} documents are fewer than one "
                    f"sample of {config.seq_length:,} tokens and one label",
                    name,
                    "give more data or a smaller --seq-length"
                    + (" or another valid_fraction" if split else ""),
                )
            )
    return problems
