"""Endless, indexable streams of samples: `stream[i]` is the same whatever was asked for before.

A stream goes on for ever, epoch after epoch, so its order does not depend on the number of steps:
nothing is repeated or skipped inside an epoch. Batches, ranks and resuming are left to `batches`,
checking of what the user typed to `sources`.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from msllm.config import DataConfig
from msllm.engine.data.blend import Blend
from msllm.engine.data.indexed import IndexedTokens
from msllm.engine.data.order import EpochOrder, samples_in, seed_words, shared_order
from msllm.engine.data.sources import (
    Source,
    cache_folder,
    end_of_document,
    groups_of,
    parse_sources,
    split_documents,
)
from msllm.errors import InputError, RunError

VALID_SEED = 0x5EED
"""Validation order does not depend on the run's seed, so that runs compare on the same samples."""


@dataclass(frozen=True)
class Sample:
    """One sample.

    Attributes:
        tokens: `[s + 1]` int64; the first s are the input, the last s the labels.
        loss_mask: `[s]` float32, 1 where the label is trained.
    """

    tokens: NDArray[np.int64]
    loss_mask: NDArray[np.float32]


class Stream(Protocol):
    """Samples by number, from 0 without end; safe to read from several threads."""

    def __getitem__(self, sample: int) -> Sample: ...


class MockStream:
    """Random tokens below `vocab_size`, from a generator keyed by (seed, sample number)."""

    def __init__(self, seq_length: int, vocab_size: int, seed: int):
        self._seq_length, self._vocab_size, self._seed = seq_length, vocab_size, seed

    def __getitem__(self, sample: int) -> Sample:
        key = np.array([self._seed & (2**64 - 1), sample], dtype=np.uint64)
        random = np.random.Generator(np.random.Philox(key=key))
        tokens = random.integers(0, self._vocab_size, self._seq_length + 1, dtype=np.int64)
        return Sample(tokens, np.ones(self._seq_length, np.float32))


class Pool:
    """Several indexed prefixes as one run of documents, numbered through.

    Attributes:
        lengths: Tokens of each document, `[d]` int32.
    """

    def __init__(self, files: list[IndexedTokens]):
        self._files = files
        self._firsts = np.cumsum([0, *(len(file) for file in files)])
        one = len(files) == 1
        self.lengths = files[0].lengths if one else np.concatenate([f.lengths for f in files])

    def read(self, document: int, offset: int, length: int) -> NDArray[Any]:
        """Tokens of one document."""
        return self._at(document).read(self._local(document), offset, length)

    def name(self, document: int) -> str:
        """Where a document is, for messages."""
        return f"{self._at(document).prefix}, document {self._local(document)}"

    def _file(self, document: int) -> int:
        return int(np.searchsorted(self._firsts, document, side="right")) - 1

    def _at(self, document: int) -> IndexedTokens:
        return self._files[self._file(document)]

    def _local(self, document: int) -> int:
        return document - int(self._firsts[self._file(document)])


class IndexedStream:
    """Documents of a pool, one epoch after another, cut into samples of seq_length + 1 tokens.

    Sample k of an epoch starts at token k * seq_length of the epoch's documents put end to end, so
    each label is trained once; the last, incomplete sample of an epoch is dropped.

    Args:
        documents: The documents of this stream, as numbers into the pool.
        seed: Seed words; each epoch's order also depends on its number. None: not shuffled.
        eod: Token whose prediction is not trained, if any.

    Raises:
        InputError: the documents have fewer tokens than one sample.
    """

    def __init__(
        self,
        pool: Pool,
        documents: NDArray[Any],
        seq_length: int,
        vocab_size: int,
        seed: list[int] | None,
        cache: Path,
        eod: int | None = None,
    ):
        self._pool, self._documents, self._seq_length = pool, documents, seq_length
        self._vocab_size, self._seed, self._cache, self._eod = vocab_size, seed, cache, eod
        tokens = int(pool.lengths[documents].sum(dtype=np.int64))
        self.epoch_samples = samples_in(tokens, seq_length)
        if self.epoch_samples == 0:
            raise InputError(
                f"{tokens:,} tokens in {len(documents):,} documents are fewer than one sample of "
                f"{seq_length:,} tokens and one label",
                "data.paths",
                "give more data or a smaller --seq-length",
            )
        self._orders: OrderedDict[int, EpochOrder] = OrderedDict()
        self._lock = threading.Lock()

    def __getitem__(self, sample: int) -> Sample:
        epoch, turn = divmod(sample, self.epoch_samples)
        order = self._order(epoch)
        tokens = self._cut(order, int(order.samples[turn]) * self._seq_length)
        mask = np.ones(self._seq_length, np.float32)
        if self._eod is not None:
            mask[tokens[1:] == self._eod] = 0.0
        return Sample(tokens, mask)

    def _cut(self, order: EpochOrder, start: int) -> NDArray[np.int64]:
        """Cut the seq_length + 1 tokens from the epoch's `start`-th on, over document bounds."""
        tokens = np.empty(self._seq_length + 1, dtype=np.int64)
        place, offset = order.place(start)
        filled = 0
        while filled < len(tokens):
            document = int(order.documents[place])
            left = int(self._pool.lengths[document]) - offset
            count = min(left, len(tokens) - filled)
            if count:
                part = self._pool.read(document, offset, count)
                self._check(part, document)
                tokens[filled : filled + count] = part
                filled += count
            place, offset = place + 1, 0
        return tokens

    def _check(self, tokens: NDArray[Any], document: int) -> None:
        """Refuse ids outside the vocabulary, which end in an unreadable error of the embedding."""
        largest = int(tokens.max())
        if largest >= self._vocab_size or int(tokens.min()) < 0:
            raise RunError(
                f"token {largest} is outside the model's vocabulary of {self._vocab_size}",
                self._pool.name(document),
                "the data was made with another tokenizer, or the file is damaged",
            )

    def _order(self, epoch: int) -> EpochOrder:
        """Return the epoch's order; two are kept, as threads work on both sides of its end."""
        if self._seed is None:
            epoch = 0
        with self._lock:
            if epoch not in self._orders:
                seed = None if self._seed is None else [*self._seed, *seed_words(epoch)]
                lengths = self._pool.lengths
                self._orders[epoch] = shared_order(
                    self._documents, lengths, self._seq_length, seed, self._cache
                )
                while len(self._orders) > 2:
                    self._orders.popitem(last=False)
            return self._orders[epoch]


class BlendedStream:
    """Weighted streams in one, each going through its own epochs."""

    def __init__(self, streams: list[Stream], weights: list[Fraction]):
        self._streams, self._blend = streams, Blend(weights)

    def __getitem__(self, sample: int) -> Sample:
        source, index = self._blend[sample]
        return self._streams[source][index]


def open_streams(data: DataConfig, seed: int, vocab_size: int) -> tuple[Stream, Stream | None]:
    """Open the training stream, and the validation stream if there is one.

    Args:
        data: With raw files already turned into prefixes by `prepare_data`.
        seed: Of the training order.
        vocab_size: Ids of the model, without padding.

    Raises:
        InputError: a source is missing, damaged, or too small for one sample.
    """
    opener = _Opener(data, vocab_size)
    split = data.valid_fraction
    train = opener.open(data.paths, seed, "train", split)
    if data.valid_paths:
        return train, opener.open(data.valid_paths, VALID_SEED, "valid", 1.0)
    if split:
        return train, opener.open(data.paths, VALID_SEED, "valid", split)
    return train, None


class _Opener:
    """Turns the words of `--data` into a stream."""

    def __init__(self, data: DataConfig, vocab_size: int):
        self._data, self._vocab_size = data, vocab_size
        self._cache = cache_folder(data) / "orders"
        self._eod = end_of_document(data) if data.eod_mask_loss else None

    def open(self, items: list[str], seed: int, part: str, split: float) -> Stream:
        """One stream over `items`; `split` is the share of documents that are for validation."""
        sources, problems = parse_sources(items, f"data.{part}")
        if problems:
            raise InputError(problems)
        groups = groups_of(sources)
        streams = [
            self._open_group(group, number, seed, part, split)
            for number, group in enumerate(groups)
        ]
        if len(streams) == 1:
            return streams[0]
        return BlendedStream(streams, [group[0].weight or Fraction(1) for group in groups])

    def _open_group(
        self, group: list[Source], number: int, seed: int, part: str, split: float
    ) -> Stream:
        if group[0].kind == "mock":
            # Seeds of streams that must not share samples: by place, and by part.
            key = seed + (number << 32) + ((part == "valid") << 63)
            return MockStream(self._data.seq_length, self._vocab_size, key)
        for source in group:
            if source.kind == "raw":
                raise InputError("raw data was not prepared", str(source.path), "call prepare_data")
        pool = Pool([IndexedTokens(source.path) for source in group])
        documents = split_documents(len(pool.lengths), split, part == "valid")
        words = seed_words(seed, number) if self._data.shuffle else None
        return IndexedStream(
            pool,
            documents,
            self._data.seq_length,
            self._vocab_size,
            words,
            self._cache,
            self._eod,
        )
