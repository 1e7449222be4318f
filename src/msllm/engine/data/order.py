"""The order of one epoch: how documents are shuffled, cut into samples, and samples shuffled.

It is the order of Megatron's GPTDataset built for exactly one epoch with the same random seed (a
test holds the two equal), computed with vectorised NumPy alone, so that it needs neither compiled
helpers, nor process groups, nor a file written by rank 0. What a sample holds is `stream`'s matter.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

ON_DISK_FROM = 4_000_000
"""Documents plus samples from which an order is kept on disk, where ranks share its pages."""


@dataclass(frozen=True)
class EpochOrder:
    """One epoch's order.

    Attributes:
        documents: Document at each place, `[d]`.
        ends: Tokens up to and including that document, `[d]` int64, rising.
        samples: Sample (counted along the documents) served at each turn, `[n]`.
    """

    documents: NDArray[Any]
    ends: NDArray[np.int64]
    samples: NDArray[Any]

    def place(self, token: int) -> tuple[int, int]:
        """Where the epoch's `token`-th token is: (place in `documents`, offset in it)."""
        place = int(np.searchsorted(self.ends, token, side="right"))
        return place, token - (int(self.ends[place - 1]) if place else 0)


def samples_in(tokens: int, seq_length: int) -> int:
    """Count the samples in `tokens`: each is seq_length tokens, and one more as last label."""
    return max(0, (tokens - 1) // seq_length)


def seed_words(*numbers: int) -> list[int]:
    """Numbers below 2^64 as 32-bit words for RandomState, different for different numbers."""
    return [word & 0xFFFFFFFF for number in numbers for word in (number, number >> 32)]


def build_order(
    documents: NDArray[Any],
    lengths: NDArray[np.int32],
    seq_length: int,
    seed: list[int] | None,
) -> EpochOrder:
    """Shuffle `documents` (numbers into `lengths`) and their samples, or neither without a seed.

    RandomState and not Generator: NumPy promises that RandomState's streams never change, so a run
    resumes in the same order under any NumPy.
    """
    order = documents.astype(np.int32 if len(lengths) < 2**31 else np.int64)
    state = None if seed is None else np.random.RandomState(seed)
    if state is not None:
        state.shuffle(order)
    ends = np.cumsum(lengths[order], dtype=np.int64)
    count = samples_in(int(ends[-1]) if len(ends) else 0, seq_length)
    samples = np.arange(count, dtype=np.uint32 if count < 2**32 - 2 else np.int64)
    if state is not None:
        state.shuffle(samples)
    return EpochOrder(order, ends, samples)


def shared_order(
    documents: NDArray[Any],
    lengths: NDArray[np.int32],
    seq_length: int,
    seed: list[int] | None,
    cache: Path,
) -> EpochOrder:
    """`build_order`, kept in `cache` as memory maps when it is large.

    An order of a billion documents takes 16 GB, which sixteen ranks of a machine must not each
    hold. Ranks need no lock: each that finds none builds its own and renames it into place, and
    whichever comes last wins with the same bytes.
    """
    if len(documents) + samples_in(int(lengths.sum(dtype=np.int64)), seq_length) < ON_DISK_FROM:
        return build_order(documents, lengths, seq_length, seed)
    key = hashlib.blake2b(f"{seq_length} {seed}".encode(), digest_size=16)
    key.update(np.ascontiguousarray(documents).data)
    key.update(np.ascontiguousarray(lengths).data)
    folder = cache / key.hexdigest()
    names = [folder / f"{name}.npy" for name in ("documents", "ends", "samples")]
    if not all(name.exists() for name in names):
        built = build_order(documents, lengths, seq_length, seed)
        folder.mkdir(parents=True, exist_ok=True)
        for name, array in zip(names, (built.documents, built.ends, built.samples), strict=True):
            _save(name, array)
    return EpochOrder(*(np.load(name, mmap_mode="r") for name in names))


def _save(path: Path, array: NDArray[Any]) -> None:
    handle, temporary = tempfile.mkstemp(dir=path.parent, suffix=".tmp")
    try:
        with os.fdopen(handle, "wb") as stream:
            np.save(stream, array)
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
