from __future__ import annotations

import logging
from collections import Counter
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from msllm.config import DataConfig
from msllm.engine.data import order as order_module
from msllm.engine.data.order import build_order, seed_words, shared_order
from msllm.engine.data.stream import IndexedStream, MockStream, Pool, open_streams
from msllm.errors import InputError, RunError

VOCAB = 60_000


def documents(count: int, seed: int = 0, longest: int = 40) -> list[list[int]]:
    """Documents of distinct tokens, so that a token tells where it came from."""
    random = np.random.default_rng(seed)
    lengths = random.integers(0, longest, count)
    bounds = np.concatenate([[0], np.cumsum(lengths)])
    return [list(range(a, b)) for a, b in pairwise(bounds)]


def config(tmp_path: Path, paths: list[object], seq_length: int = 16, **more: object) -> DataConfig:
    words = [str(path) for path in paths]
    return DataConfig(paths=words, seq_length=seq_length, cache_dir=tmp_path / "cache", **more)


def epoch_by_hand(texts: list[list[int]], seq_length: int, seed: list[int]) -> list[list[int]]:
    """One epoch cut with lists alone: the oracle."""
    random = np.random.RandomState(seed)
    order = np.arange(len(texts))
    random.shuffle(order)
    tokens = [token for document in order for token in texts[document]]
    count = (len(tokens) - 1) // seq_length
    samples = [tokens[k * seq_length : (k + 1) * seq_length + 1] for k in range(count)]
    turns = np.arange(count)
    random.shuffle(turns)
    return [samples[turn] for turn in turns]


def test_samples_are_the_cut_of_the_shuffled_documents_epoch_after_epoch(tmp_path, write_prefix):
    texts = documents(60)
    stream, _ = open_streams(config(tmp_path, [write_prefix(texts)]), 7, VOCAB)
    expected = [
        sample for epoch in range(3) for sample in epoch_by_hand(texts, 16, seed_words(7, 0, epoch))
    ]
    assert [stream[i].tokens.tolist() for i in range(len(expected))] == expected
    assert expected[: len(expected) // 3] != expected[len(expected) // 3 : 2 * len(expected) // 3]


def test_each_token_is_an_input_once_an_epoch(tmp_path, write_prefix):
    texts = documents(60)
    stream, _ = open_streams(config(tmp_path, [write_prefix(texts)]), 7, VOCAB)
    assert isinstance(stream, IndexedStream)
    for epoch in range(3):
        first = epoch * stream.epoch_samples
        seen = Counter(
            int(token)
            for i in range(stream.epoch_samples)
            for token in stream[first + i].tokens[:-1]
        )
        assert set(seen.values()) == {1}
        assert len(seen) == stream.epoch_samples * 16 > sum(map(len, texts)) - 17


def test_one_epoch_is_megatrons_own_gpt_dataset(tmp_path, write_prefix):
    from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
    from megatron.core.datasets.utils import Split

    texts = documents(200, seed=3, longest=90)
    prefix = write_prefix(texts)
    stream, _ = open_streams(config(tmp_path, [prefix], seq_length=32), 11, VOCAB)
    assert isinstance(stream, IndexedStream)

    class Ids:
        vocab_size, eod, pad, unique_identifiers = VOCAB, 0, -1, {}

    logging.getLogger("megatron").setLevel(logging.ERROR)
    theirs_config = GPTDatasetConfig(
        random_seed=seed_words(11, 0, 0),  # type: ignore[arg-type]
        sequence_length=32,
        split="1,0,0",
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
        tokenizer=Ids(),  # type: ignore[arg-type]
        path_to_cache=str(tmp_path / "theirs"),
    )
    low = GPTDataset.build_low_level_dataset(str(prefix), theirs_config)
    theirs = GPTDataset(
        low, str(prefix), np.arange(len(texts), dtype=np.int32), None, Split.train, theirs_config
    )
    assert len(theirs) == stream.epoch_samples > 100
    for i in range(len(theirs)):
        tokens = stream[i].tokens
        assert theirs[i]["tokens"].tolist() == tokens[:-1].tolist()
        assert theirs[i]["labels"].tolist() == tokens[1:].tolist()


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 30), min_size=1, max_size=40),
    seq_length=st.integers(1, 50),
    seed=st.one_of(st.none(), st.integers(0, 2**40)),
)
def test_order_covers_every_place_once(lengths, seq_length, seed):
    array = np.array(lengths, np.int32)
    words = None if seed is None else seed_words(seed)
    order = build_order(np.arange(len(lengths)), array, seq_length, words)
    total = sum(lengths)
    assert sorted(order.documents) == list(range(len(lengths)))
    assert sorted(order.samples) == list(range(max(0, (total - 1) // seq_length)))
    concatenated = [(int(d), o) for d in order.documents for o in range(lengths[d])]
    for token, (document, offset) in enumerate(concatenated):
        place, found = order.place(token)
        assert (int(order.documents[place]), found) == (document, offset)


def test_a_sample_does_not_depend_on_what_was_read_before(tmp_path, write_prefix):
    # Megatron's own dataset fails this for the loss mask of samples read after a short one.
    data = config(tmp_path, [write_prefix(documents(60))])
    forward, _ = open_streams(data, 7, VOCAB)
    one_by_one = [forward[i] for i in range(150)]
    backward, _ = open_streams(data, 7, VOCAB)
    for i in reversed(range(150)):
        again = backward[i]
        assert again.tokens.tolist() == one_by_one[i].tokens.tolist()
        assert again.loss_mask.sum() == 16
        again.loss_mask[:] = 0
        again.tokens[:] = 0


def test_orders_on_disk_equal_orders_in_memory(tmp_path, monkeypatch):
    lengths = np.array([len(d) for d in documents(300)], np.int32)
    numbers = np.arange(300, dtype=np.int32)
    expected = build_order(numbers, lengths, 16, [1, 2])
    monkeypatch.setattr(order_module, "ON_DISK_FROM", 10)
    for _ in range(2):
        found = shared_order(numbers, lengths, 16, [1, 2], tmp_path)
        for name in ("documents", "ends", "samples"):
            assert isinstance(getattr(found, name), np.memmap)
            assert np.array_equal(getattr(found, name), getattr(expected, name))
    other = shared_order(numbers, lengths, 16, [1, 3], tmp_path)
    assert not np.array_equal(other.documents, found.documents)
    assert not list(tmp_path.rglob("*.tmp"))


def test_unweighted_prefixes_are_one_data_set(tmp_path, write_prefix):
    texts = documents(80)
    parts = [write_prefix(texts[:30], "a"), write_prefix(texts[30:], "b")]
    split, _ = open_streams(config(tmp_path, parts), 5, VOCAB)
    whole, _ = open_streams(config(tmp_path, [write_prefix(texts, "c")]), 5, VOCAB)
    for i in range(120):
        assert split[i].tokens.tolist() == whole[i].tokens.tolist()


def test_weighted_prefixes_are_blended_and_each_goes_through_its_own_epochs(tmp_path, write_prefix):
    low, high = documents(30), [[t + 30_000 for t in d] for d in documents(90, seed=4)]
    paths = [f"0.7:{write_prefix(low, 'low')}", f"0.3:{write_prefix(high, 'high')}"]
    stream, _ = open_streams(config(tmp_path, paths), 5, VOCAB)
    samples = [stream[i].tokens.tolist() for i in range(200)]
    from_low = [s for s in samples if s[0] < 30_000]
    assert len(from_low) == 140
    expected = [s for e in range(8) for s in epoch_by_hand(low, 16, seed_words(5, 0, e))]
    assert from_low == expected[:140]


def test_loss_mask_is_one_everywhere_unless_eod_is_not_trained(tmp_path, write_prefix):
    eod = 0
    texts = [[*range(1 + 9 * k, 9 + 9 * k), eod] for k in range(40)]
    prefix = write_prefix(texts)
    data = config(tmp_path, [prefix])
    stream, _ = open_streams(data, 1, VOCAB)
    pool = Pool([*stream._pool._files])  # type: ignore[attr-defined]
    masked = IndexedStream(pool, np.arange(40), 16, VOCAB, seed_words(1, 0), tmp_path, eod=eod)
    seen = 0
    for i in range(20):
        assert stream[i].loss_mask.tolist() == [1.0] * 16
        labels = stream[i].tokens[1:]
        assert masked[i].loss_mask.tolist() == [float(label != eod) for label in labels]
        seen += int((labels == eod).sum())
    assert seen > 20


def test_split_is_by_documents_disjoint_and_complete(tmp_path, write_prefix):
    texts = documents(100)
    data = config(tmp_path, [write_prefix(texts)], seq_length=4, valid_fraction=0.1)
    train, valid = open_streams(data, 1, VOCAB)
    assert isinstance(train, IndexedStream)
    assert isinstance(valid, IndexedStream)
    assert len(valid._documents) == 10
    assert sorted([*train._documents, *valid._documents]) == list(range(100))
    seen = [{int(t) for i in range(s.epoch_samples) for t in s[i].tokens} for s in (train, valid)]
    assert not seen[0] & seen[1]
    # The order of training changes with the seed, the validation samples do not.
    other_train, other_valid = open_streams(data, 2, VOCAB)
    assert other_train[0].tokens.tolist() != train[0].tokens.tolist()
    assert other_valid is not None
    assert other_valid[0].tokens.tolist() == valid[0].tokens.tolist()


def test_validation_from_its_own_paths(tmp_path, write_prefix):
    train_prefix = write_prefix(documents(50), "train")
    valid_prefix = write_prefix([[9999] * 40], "valid")
    data = config(tmp_path, [train_prefix], valid_paths=[str(valid_prefix)])
    train, valid = open_streams(data, 1, VOCAB)
    assert valid is not None
    assert set(valid[0].tokens.tolist()) == {9999}
    assert 9999 not in train[0].tokens


def test_without_shuffling_documents_come_as_they_are(tmp_path, write_prefix):
    texts = documents(50)
    stream, _ = open_streams(config(tmp_path, [write_prefix(texts)], shuffle=False), 1, VOCAB)
    assert [int(stream[i].tokens[0]) for i in range(10)] == [16 * i for i in range(10)]


def test_mock_is_random_below_the_vocabulary_and_keyed_by_seed_and_number(tmp_path):
    train, valid = open_streams(config(tmp_path, ["mock"], valid_fraction=0.1), 3, 97)
    assert isinstance(train, MockStream)
    tokens = np.concatenate([train[i].tokens for i in range(200)])
    assert tokens.min() == 0
    assert tokens.max() == 96
    assert train[5].tokens.tolist() == train[5].tokens.tolist() != train[6].tokens.tolist()
    other, _ = open_streams(config(tmp_path, ["mock"]), 4, 97)
    assert other[5].tokens.tolist() != train[5].tokens.tolist()
    assert valid is not None
    assert valid[5].tokens.tolist() != train[5].tokens.tolist()


def test_too_little_data_and_foreign_tokens_are_named(tmp_path, write_prefix):
    prefix = write_prefix([[1, 2, 3]])
    with pytest.raises(InputError, match="3 tokens in 1 documents are fewer than one sample of 16"):
        open_streams(config(tmp_path, [prefix]), 1, VOCAB)
    stream, _ = open_streams(config(tmp_path, [write_prefix([[5] * 17, [99] * 17], "b")]), 1, 50)
    with pytest.raises(RunError, match=r"b, document 1: token 99 is outside .* vocabulary of 50"):
        [stream[i] for i in range(2)]
