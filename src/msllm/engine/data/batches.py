"""Micro-batches of one data parallel rank, in an order that one integer describes.

The global batch after `c` consumed samples is the stream's samples [c, c + global_batch), whatever
the number of ranks; so a run resumes at any data parallel size from `consumed_samples` alone. What
the samples are is the stream's business, and moving tensors to a device is the trainer's.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import torch

from msllm.engine.data.stream import Stream
from msllm.errors import InputError

AHEAD_PER_WORKER = 2


class Batches:
    """Endless iterator over this rank's micro-batches.

    Each is a dict of `tokens`, `labels`, `position_ids` (int64) and `loss_mask` (float32), all
    `[b, s]`. Micro-batch m of rank r holds, for j in [0, micro_batch), the samples
    `c + (m * dp_size + r) * micro_batch + j`.

    Args:
        stream: Samples by number.
        micro_batch: Samples of one forward pass on one rank.
        global_batch: Samples of one step over all ranks.
        dp_rank: This rank's place among the data parallel ranks.
        dp_size: Number of data parallel ranks.
        consumed_samples: Where to go on; 0 for a new run.
        workers: Threads that prepare micro-batches ahead; 0 prepares each when asked for.

    Attributes:
        consumed_samples: Samples of all steps whose last micro-batch was handed out: what to save.

    Raises:
        InputError: the global batch is not a multiple of micro_batch * dp_size.
    """

    def __init__(
        self,
        stream: Stream,
        micro_batch: int,
        global_batch: int,
        dp_rank: int = 0,
        dp_size: int = 1,
        consumed_samples: int = 0,
        workers: int = 0,
    ):
        if global_batch % (micro_batch * dp_size):
            raise InputError(
                f"global batch {global_batch} is not a multiple of micro-batch {micro_batch} "
                f"x data parallel size {dp_size}",
                "train.global_batch",
                f"use a multiple of {micro_batch * dp_size}",
            )
        self.consumed_samples = consumed_samples
        self.micro_batches = global_batch // (micro_batch * dp_size)
        self._stream, self._micro_batch, self._global_batch = stream, micro_batch, global_batch
        self._dp_rank, self._dp_size = dp_rank, dp_size
        self._start = consumed_samples
        self._handed_out = 0  # micro-batches since _start
        self._asked_for = 0
        self._ahead = workers * AHEAD_PER_WORKER
        self._pending: deque[Future[dict[str, torch.Tensor]]] = deque()
        self._pool = ThreadPoolExecutor(workers, "msllm-batches") if workers else None

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        return self

    def __next__(self) -> dict[str, torch.Tensor]:
        if self._pool is None:
            batch = self._load(self._handed_out)
        else:
            while len(self._pending) < self._ahead:
                self._pending.append(self._pool.submit(self._load, self._asked_for))
                self._asked_for += 1
            batch = self._pending.popleft().result()
        self._handed_out += 1
        if self._handed_out % self.micro_batches == 0:
            self.consumed_samples += self._global_batch
        return batch

    def first_sample(self, number: int) -> int:
        """Return the first sample of this rank's `number`-th micro-batch since the start."""
        step, micro = divmod(number, self.micro_batches)
        place = (micro * self._dp_size + self._dp_rank) * self._micro_batch
        return self._start + step * self._global_batch + place

    def close(self) -> None:
        """Stop the threads; what they prepared ahead is dropped and not counted as consumed."""
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)
            self._pending.clear()

    def _load(self, number: int) -> dict[str, torch.Tensor]:
        first = self.first_sample(number)
        samples = [self._stream[first + j] for j in range(self._micro_batch)]
        tokens = torch.from_numpy(np.stack([sample.tokens for sample in samples]))
        return {
            "tokens": tokens[:, :-1].contiguous(),
            "labels": tokens[:, 1:].contiguous(),
            "loss_mask": torch.from_numpy(np.stack([sample.loss_mask for sample in samples])),
            "position_ids": torch.arange(tokens.shape[1] - 1).repeat(self._micro_batch, 1),
        }
