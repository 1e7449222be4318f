"""Damaged and hostile weights are refused with a panel: no defect, no wait, no wrong number."""

from __future__ import annotations

import json
import math
import struct
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from msllm.engine.weights.tiling import tiles
from tests.engine.weights.hostile_case import (
    change_index,
    change_rank,
    convert,
    header_with,
    refused,
    tensors,
    write_hf,
)

EMBEDDING = "embedding.word_embeddings.weight"


def from_checkpoint(folder: Path) -> list[tuple[object, ...]]:
    """Commands that read a checkpoint."""
    out = folder.parent / "out"
    return [
        ("mcore-to-hf", "--checkpoint", folder, "--out", out),
        ("cast", folder, "--dtype", "fp32", "--out", out),
        ("mcore-to-mindspeed", "--checkpoint", folder, "--out", out),
    ]


def test_a_pieces_type_is_that_of_the_index(copies, capsys):
    def change(index):
        index.state_dict_metadata[EMBEDDING].properties.dtype = torch.float16

    change_index(copies.checkpoint, change)
    for command in from_checkpoint(copies.checkpoint):
        assert "the index says torch.float16" in refused(capsys, *command)


def test_integers_are_no_weights(copies, capsys):
    def narrow(index):
        index.state_dict_metadata[EMBEDDING].properties.dtype = torch.int8

    change_index(copies.checkpoint, narrow)
    export, _, spread = from_checkpoint(copies.checkpoint)
    assert "stored as torch.int8" in refused(capsys, *export)
    assert "stored as torch.int8" in refused(capsys, *spread)
    assert not (copies.hf.parent / "out").exists()


def moved(index):
    """Move a chunk by a row, onto the one behind it."""
    held = index.state_dict_metadata["decoder.layers.mlp.linear_fc2.weight"]
    first = next(k for k in index.storage_data if k.fqn == "decoder.layers.mlp.linear_fc2.weight")
    place = index.storage_data.pop(first)
    offset = torch.Size((1 - first.offset[0], 1, 0))
    index.storage_data[type(first)(first.fqn, offset)] = place
    chunk = next(c for c in held.chunks if c.offsets == first.offset)
    held.chunks.append(type(chunk)(offset, chunk.sizes))


def test_parts_that_overlap(copies, capsys):
    change_index(copies.checkpoint, moved)
    for command in from_checkpoint(copies.checkpoint):
        assert "overlap" in refused(capsys, *command)


def test_tiling():
    grid = [((r, c), (1, 2)) for r in range(300) for c in range(0, 200, 2)]
    assert tiles((300, 200), grid)
    assert not tiles((300, 200), [*grid[1:], ((0, 1), (1, 2))])
    assert not tiles((300, 200), [*grid[1:], ((0, 0), (2, 1))])
    pinwheel = [((0, 0), (1, 2)), ((0, 2), (2, 1)), ((2, 1), (1, 2)), ((1, 0), (2, 1))]
    assert tiles((3, 3), [*pinwheel, ((1, 1), (1, 1))])
    assert not tiles((3, 3), [*pinwheel, ((0, 0), (1, 1))])
    assert tiles((), [((), ())])
    assert not tiles((), [((), ()), ((), ())])


@pytest.mark.parametrize("file", ["../other/model.safetensors", "/etc/passwd", "", "..", 5])
def test_an_index_names_plain_files(tmp_path, capsys, file):
    folder = write_hf(tmp_path / "hf")
    listed = dict.fromkeys(load_file(folder / "model.safetensors"), file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": listed}))
    said = refused(capsys, "hf-to-mcore", "--model", folder, "--out", tmp_path / "out")
    assert "no plain file name" in said


def odd(kind: str) -> torch.Tensor:
    values = torch.ones(256, 64)
    return {
        "int32": lambda: values.int(),
        "complex": lambda: values.to(torch.complex64),
        "fp8": lambda: values.to(torch.float8_e4m3fn),
        "scalar": lambda: torch.tensor(1.0),
        "sparse": lambda: values.to_sparse(),
        "quantized": lambda: torch.quantize_per_tensor(values, 1.0, 0, torch.qint8),
    }[kind]()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["int32", "complex", "fp8", "scalar", "sparse", "quantized"])
def test_odd_tensors_in_files_of_ranks(copies, capsys, kind):
    change_rank(copies.ranks, "mp_rank_00_000", lambda model: model.update({EMBEDDING: odd(kind)}))
    out = copies.hf.parent / "out"
    said = refused(capsys, "mindspeed-to-mcore", "--checkpoint", copies.ranks, "--out", out)
    assert "mp_rank_00_000" in said or "no file has a matrix" in said


def test_copies_that_differ_are_told(copies, capsys):
    name = "decoder.layers.0.input_layernorm.weight"
    change_rank(copies.ranks, "mp_rank_01_000", lambda model: model[name].add_(1))
    out = copies.hf.parent / "out"
    assert convert("mindspeed-to-mcore", "--checkpoint", copies.ranks, "--out", out) == 0
    assert f"{name} in mp_rank_01_000 is not as in" in capsys.readouterr().err


def test_layers_of_several_types_are_told(tmp_path, capsys):
    weights = {k: v.float() if "layers.1.input" in k else v for k, v in tensors().items()}
    folder = write_hf(tmp_path / "hf", weights)
    assert convert("hf-to-mcore", "--model", folder, "--out", tmp_path / "out") == 0
    said = capsys.readouterr().out
    assert "layer_norm_weight is stored as float32, its parts are bfloat16 and float32" in said
    assert said.count("is stored as") == 1


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_cast_tells_of_values_that_are_no_numbers(tmp_path, capsys, value):
    weights = tensors()
    weights["lm_head.weight"][0, 0] = value
    folder = write_hf(tmp_path / "hf", weights)
    command = ("cast", folder, "--dtype", "fp16", "--out", tmp_path / "out")
    assert "not all values are finite" in refused(capsys, *command, "--strict")
    assert not (tmp_path / "out").exists()
    assert convert(*command) == 0
    said = capsys.readouterr().err
    assert "not all values of lm_head.weight are finite numbers" in said
    assert "can't hold" not in said


@pytest.mark.parametrize(
    "changes",
    [
        {"data_offsets": float},
        {"shape": float},
        {"shape": 5},
        {"data_offsets": None},
        {"dtype": "U16"},
        {"dtype": "XX"},
        {"dtype": ["F32"]},
    ],
)
def test_headers(copies, capsys, changes):
    header_with(copies.hf, **changes)
    out = copies.hf.parent / "out"
    refused(capsys, "verify", copies.hf, copies.checkpoint)
    refused(capsys, "hf-to-mcore", "--model", copies.hf, "--out", out)
    refused(capsys, "cast", copies.hf, "--dtype", "fp32", "--out", out)


@pytest.mark.parametrize("part", ["header", "index", "config.json"])
@pytest.mark.parametrize("content", [b"[" * 100_000, b'{"a": ' + b"7" * 5000 + b"}", b"\xff\xfe{"])
def test_json_that_is_none(copies, capsys, part, content):
    if part == "header":
        data = struct.pack("<Q", len(content)) + content
        (copies.hf / "model.safetensors").write_bytes(data)
    else:
        name = "model.safetensors.index.json" if part == "index" else part
        (copies.hf / name).write_bytes(content)
    out = copies.hf.parent / "out"
    refused(capsys, "hf-to-mcore", "--model", copies.hf, "--out", out)
    refused(capsys, "cast", copies.hf, "--dtype", "fp32", "--out", out)
    assert not [path for path in copies.hf.parent.iterdir() if "out" in path.name]
