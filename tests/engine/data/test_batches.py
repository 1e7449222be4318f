from __future__ import annotations

from itertools import islice, pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from msllm.config import DataConfig
from msllm.engine.data.batches import Batches
from msllm.engine.data.stream import IndexedStream, Sample, open_streams
from msllm.errors import InputError


class Numbers:
    """A stream whose sample says its own number."""

    def __getitem__(self, sample: int) -> Sample:
        return Sample(np.array([sample, sample + 1, sample + 2]), np.ones(2, np.float32))


def numbers(batches: Batches, count: int) -> list[int]:
    return [n for batch in islice(batches, count) for n in batch["tokens"][:, 0].tolist()]


def merged(stream, micro: int, dp: int, per_step: int, steps: int, consumed: int = 0) -> list:
    """What all ranks get, put into the order of the global batch."""
    ranks = [Batches(stream, micro, micro * dp * per_step, r, dp, consumed) for r in range(dp)]
    rows = []
    for _ in range(steps * per_step):
        for batches in ranks:
            rows += next(batches)["tokens"].tolist()
    assert len({batches.consumed_samples for batches in ranks}) == 1
    return rows


@settings(max_examples=100, deadline=None)
@given(
    micro=st.integers(1, 4),
    dp=st.integers(1, 5),
    per_step=st.integers(1, 4),
    steps=st.integers(1, 4),
    consumed=st.integers(0, 10**12),
)
def test_ranks_together_see_each_sample_once_in_order(micro, dp, per_step, steps, consumed):
    rows = merged(Numbers(), micro, dp, per_step, steps, consumed)
    step = micro * dp * per_step
    assert [row[0] for row in rows] == list(range(consumed, consumed + step * steps))


@settings(max_examples=60, deadline=None)
@given(
    micro=st.integers(1, 3),
    dp=st.integers(1, 3),
    per_step=st.integers(1, 3),
    before=st.integers(0, 4),
    rank=st.integers(0, 2),
)
def test_resuming_equals_going_straight_on(micro, dp, per_step, before, rank):
    rank %= dp
    size = micro * dp * per_step
    straight = Batches(Numbers(), micro, size, rank, dp)
    for _ in range(before * per_step):
        next(straight)
    resumed = Batches(Numbers(), micro, size, rank, dp, straight.consumed_samples)
    assert numbers(resumed, 2 * per_step) == numbers(straight, 2 * per_step)


def real_stream(tmp_path: Path, write_prefix) -> IndexedStream:
    lengths = np.random.default_rng(0).integers(1, 40, 60)
    bounds = np.concatenate([[0], np.cumsum(lengths)])
    texts = [list(range(a, b)) for a, b in pairwise(bounds)]
    data = DataConfig(paths=[str(write_prefix(texts))], seq_length=16, cache_dir=tmp_path / "cache")
    stream, _ = open_streams(data, 1, 60_000)
    assert isinstance(stream, IndexedStream)
    return stream


def test_another_dp_size_and_an_epochs_end_change_nothing(tmp_path, write_prefix):
    stream = real_stream(tmp_path, write_prefix)
    steps = 2 * stream.epoch_samples // 12 + 2
    straight = merged(stream, 12, 1, 1, steps)
    assert len(straight) > 2 * stream.epoch_samples
    for micro, dp, per_step in [(1, 2, 6), (2, 3, 2), (3, 4, 1), (1, 1, 12)]:
        assert merged(stream, micro, dp, per_step, steps) == straight
    half = steps // 2  # resumed with other sizes in the middle
    first, second = merged(stream, 2, 3, 2, half), merged(stream, 1, 4, 3, steps - half, half * 12)
    assert first + second == straight


def test_batch_holds_what_the_sample_holds(tmp_path, write_prefix):
    stream = real_stream(tmp_path, write_prefix)
    batch = next(Batches(stream, 3, 3))
    assert {name: (tuple(t.shape), t.dtype) for name, t in batch.items()} == {
        "tokens": ((3, 16), torch.int64),
        "labels": ((3, 16), torch.int64),
        "loss_mask": ((3, 16), torch.float32),
        "position_ids": ((3, 16), torch.int64),
    }
    assert all(tensor.is_contiguous() for tensor in batch.values())
    for j in range(3):
        assert batch["tokens"][j].tolist() == stream[j].tokens[:-1].tolist()
        assert batch["labels"][j].tolist() == stream[j].tokens[1:].tolist()
        assert batch["position_ids"][j].tolist() == list(range(16))


@pytest.mark.parametrize("workers", [1, 3])
def test_threads_change_neither_order_nor_count(workers, tmp_path, write_prefix):
    stream = real_stream(tmp_path, write_prefix)
    plain, ahead = Batches(stream, 2, 8, 1, 2), Batches(stream, 2, 8, 1, 2, workers=workers)
    try:
        for _ in range(stream.epoch_samples):
            assert next(plain)["tokens"].tolist() == next(ahead)["tokens"].tolist()
            assert plain.consumed_samples == ahead.consumed_samples
    finally:
        ahead.close()


def test_an_error_in_a_thread_arrives_at_the_batch_it_belongs_to():
    class Broken(Numbers):
        def __getitem__(self, sample: int) -> Sample:
            if sample == 5:
                raise ValueError("sample 5")
            return super().__getitem__(sample)

    batches = Batches(Broken(), 1, 1, workers=2)
    assert numbers(batches, 5) == [0, 1, 2, 3, 4]
    with pytest.raises(ValueError, match="sample 5"):
        next(batches)
    batches.close()


def test_consumed_samples_counts_whole_steps_only():
    batches = Batches(Numbers(), 2, 12, 0, 2, consumed_samples=24)
    counts = []
    for _ in range(6):
        next(batches)
        counts.append(batches.consumed_samples)
    assert counts == [24, 24, 36, 36, 36, 48]


def test_a_global_batch_that_does_not_divide_is_refused():
    with pytest.raises(InputError, match="global batch 10 is not a multiple of micro-batch 2 x"):
        Batches(Numbers(), 2, 10, 0, 2)
