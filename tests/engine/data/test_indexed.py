from __future__ import annotations

import struct

import numpy as np
import pytest

from msllm.engine.data import indexed as module
from msllm.engine.data.indexed import (
    IndexedTokens,
    IndexedWriter,
    byte_offsets,
    files_of,
    find_problem,
    token_dtype,
)
from msllm.errors import InputError

DOCUMENTS = [[1, 2, 3], [4], [], [5, 6, 7, 8]]


@pytest.mark.parametrize("dtype", [np.uint16, np.int32])
def test_megatron_reads_what_was_written(write_prefix, dtype):
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    prefix = write_prefix(DOCUMENTS, "a.b-c", dtype)
    theirs = IndexedDataset(str(prefix))
    assert [theirs[i].tolist() for i in range(len(theirs))] == DOCUMENTS
    assert theirs[0].dtype == dtype
    assert theirs.document_indices.tolist() == [0, 1, 2, 3, 4]
    ours = IndexedTokens(prefix)
    assert [ours.read(i).tolist() for i in range(len(ours))] == DOCUMENTS
    assert ours.read(3, 1, 2).tolist() == [6, 7]
    assert ours.num_tokens == 8


@pytest.mark.parametrize("vocab_size", [300, 65_000])
def test_what_megatron_wrote_is_read(tmp_path, vocab_size):
    import torch
    from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder

    dtype = DType.optimal_dtype(vocab_size)
    builder = IndexedDatasetBuilder(str(tmp_path / "m.bin"), dtype=dtype)
    for document in DOCUMENTS:
        builder.add_document(torch.tensor(document), [len(document)])
    builder.finalize(str(tmp_path / "m.idx"))
    ours = IndexedTokens(tmp_path / "m")
    assert [ours.read(i).tolist() for i in range(len(ours))] == DOCUMENTS
    assert ours.dtype == token_dtype(vocab_size) == dtype


def test_offsets_do_not_overflow():
    # 3 G tokens of 4 bytes: both tokens and bytes pass 2^31, bytes pass 2^32 too.
    lengths = np.full(1500, 2_000_000, np.int32)
    offsets = byte_offsets(lengths, 4)
    assert offsets.dtype == np.int64
    assert offsets.tolist() == [8_000_000 * i for i in range(1500)]
    assert byte_offsets(np.zeros(0, np.int32), 4).tolist() == []
    assert byte_offsets(np.full(5_000_000, 3, np.int32), 2)[-1] == 29_999_994


def test_damage_is_named(write_prefix, tmp_path):
    prefix = write_prefix(DOCUMENTS)
    binary, index = files_of(prefix)
    assert find_problem(prefix) is None
    whole_bin, whole_idx = binary.read_bytes(), index.read_bytes()

    def problem() -> str:
        found = find_problem(prefix)
        binary.write_bytes(whole_bin)
        index.write_bytes(whole_idx)
        assert found is not None
        return str(found)

    binary.write_bytes(whole_bin[:-2])
    assert "data.bin: truncated: 14 bytes of the 16 its .idx describes" in problem()
    binary.write_bytes(b"")
    assert "data.bin: truncated: 0 bytes" in problem()
    index.write_bytes(whole_idx[:-1])
    assert "data.idx: truncated: 121 bytes of 122" in problem()
    index.write_bytes(whole_idx[:20])
    assert "data.idx: truncated: 20 bytes" in problem()
    index.write_bytes(b"X" + whole_idx[1:])
    assert "not an index in Megatron's format" in problem()
    index.unlink()
    assert "data.idx: file not found" in problem()
    binary.unlink()
    assert "data.bin: file not found" in problem()
    assert "holds no documents" in str(find_problem(write_prefix([], "none")))
    assert "holds no tokens" in str(find_problem(write_prefix([[], []], "blank")))


@pytest.mark.parametrize("at_once", [2, 1000])
@pytest.mark.parametrize(
    ("array", "at", "value"),
    [
        ("length", 1, -1),
        ("length", 0, 9),
        ("length", 3, -5),
        ("offset", 1, -2),
        ("offset", 2, 1 << 40),
        ("offset", 1, 2**63 - 2),
        ("offset", 1, 7),
    ],
)
def test_a_document_that_lies_nowhere_is_named(
    write_prefix, monkeypatch, array, at, value, at_once
):
    monkeypatch.setattr(module, "AT_ONCE", at_once)
    prefix = write_prefix(DOCUMENTS)
    with files_of(prefix).idx.open("r+b") as stream:
        start = 34 + (4 * at if array == "length" else 4 * len(DOCUMENTS) + 8 * at)
        stream.seek(start)
        stream.write(struct.pack("<i" if array == "length" else "<q", value))
    problem = find_problem(prefix)
    assert problem is not None
    assert problem.problem.startswith(f"document {at} (from 0) has ")
    assert f"{value:,}" in problem.problem
    assert problem.where == f"{prefix}.idx"
    with pytest.raises(InputError, match=f"document {at} "):
        IndexedTokens(prefix)


@pytest.mark.parametrize(("offset", "length"), [(0, 5), (-1, 1), (4, 1), (5, None), (2, -1)])
def test_a_document_is_not_read_beyond_its_ends(write_prefix, offset, length):
    tokens = IndexedTokens(write_prefix(DOCUMENTS))
    with pytest.raises(IndexError, match="of a sequence of 4"):
        tokens.read(3, offset, length)


def test_files_appear_only_when_whole(tmp_path):
    prefix = tmp_path / "deep" / "data"

    def stop_half_way() -> None:
        with IndexedWriter(prefix, np.uint16) as writer:
            writer.append(np.array([1, 2]), np.array([2]))
            assert [path.name for path in prefix.parent.iterdir()] == ["data.bin.tmp"]
            raise ValueError("stop")

    with pytest.raises(ValueError, match="stop"):
        stop_half_way()
    assert list(prefix.parent.iterdir()) == []


def test_leftovers_of_a_killed_run_are_replaced_and_two_writers_refused(tmp_path):
    (tmp_path / "data.bin.tmp").write_bytes(b"left over" * 100)
    with IndexedWriter(tmp_path / "data", np.uint16) as writer:
        with (
            pytest.raises(InputError, match="another process is writing"),
            IndexedWriter(tmp_path / "data", np.uint16),
        ):
            pass
        writer.append(np.array([1, 2]), np.array([2]))
    assert IndexedTokens(tmp_path / "data").read(0).tolist() == [1, 2]
    assert (tmp_path / "data.bin").stat().st_size == 4
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data.bin", "data.idx"]
