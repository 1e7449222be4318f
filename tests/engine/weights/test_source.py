"""Logical tensors of a folder, against whole tensors that transformers' own code dequantises."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from safetensors.torch import save_file
from transformers.integrations.finegrained_fp8 import _dequantize_fp8_weight
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from msllm.engine.weights import transform
from msllm.engine.weights.source import Source, open_weights
from msllm.errors import InputError
from msllm.models.weight_map import Run
from tests.engine.weights.published_forms import Tensors, float8


def opened(folder: Path, tensors: Tensors, quantisation: object = None) -> Source:
    save_file(tensors, folder / "model.safetensors")
    if quantisation is not None:
        config = {"quantization_config": quantisation}
        (folder / "config.json").write_text(json.dumps(config))
    return open_weights(folder)


def fp8(block: object) -> dict[str, object]:
    return {"quant_method": "fp8", "weight_block_size": block}


# --- 8-bit floats -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def weight() -> torch.Tensor:
    torch.manual_seed(0)
    return torch.randn(300, 500) * torch.linspace(0.01, 30, 300)[:, None]


@pytest.mark.parametrize("block", [None, (128, 128), (32, 48)])
def test_8_bit_floats(tmp_path, weight, block):
    size = block or (128, 128)
    numbers, scales = float8(weight, size)
    tensors = {"a.weight": numbers, "a.weight_scale_inv": scales}
    source = opened(tmp_path, tensors, fp8(block) if block else None)
    assert list(source.tensors) == ["a.weight"]
    assert source.tensors["a.weight"].shape == (300, 500)
    assert source.dtype("a.weight") == torch.bfloat16
    truth = _dequantize_fp8_weight(numbers, scales, size, torch.float32).bfloat16()
    assert (truth.float() - weight).abs().max() < weight.abs().max() / 16
    for first, count, step in [(0, 300, 1), (127, 2, 1), (299, 1, 1), (1, 100, 2), (130, 57, 3)]:
        run = Run("a.weight", first, count, step)
        rows = truth[first : first + (count - 1) * step + 1 : step]
        assert torch.equal(source.rows(run), rows)
        for cut in [(0, 500), (0, 1), (127, 2), (130, 370), (499, 1)]:
            assert torch.equal(source.rows(run, cut), rows.narrow(1, *cut))
    turned = Run("a.weight", 3, 200, 2, transposed=True)
    assert torch.equal(source.rows(turned, (7, 250)), truth.t()[3:403:2, 7:257])


def test_8_bit_floats_of_all_experts(tmp_path):
    torch.manual_seed(1)
    numbers, scales = float8(torch.randn(3, 40, 50), (16, 16))
    tensors = {"experts.down_proj": numbers, "experts.down_proj_scale_inv": scales}
    source = opened(tmp_path, tensors, fp8([16, 16]))
    for expert in range(3):
        truth = _dequantize_fp8_weight(
            numbers[expert], scales[expert], (16, 16), torch.float32
        ).bfloat16()
        run = Run("experts.down_proj", 5, 30, expert=expert)
        assert torch.equal(source.rows(run), truth[5:35])


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"a.weight_scale_inv": None}, "a.weight_scale_inv is not there"),
        ({"a.weight_scale_inv": torch.ones(3, 3)}, "is [3, 3], and [3, 4] are needed"),
        ({"a.weight_scale_inv": torch.ones(3, 4).int()}, "is stored as I32"),
        ({"a.weight_scale_inv": None, "a.weight_scale": torch.ones(1)}, "is not there"),
    ],
)
def test_scales_that_are_missing_or_do_not_fit(tmp_path, weight, change, said):
    numbers, scales = float8(weight, (128, 128))
    tensors = {"a.weight": numbers, "a.weight_scale_inv": scales} | change
    with pytest.raises(InputError) as caught:
        opened(tmp_path, {k: v for k, v in tensors.items() if v is not None})
    assert said in str(caught.value)


def test_a_scale_of_nothing_is_a_tensor_like_others(tmp_path):
    tensors = {"a.weight": torch.ones(4, 4), "a.weight_scale_inv": torch.ones(1, 1)}
    assert opened(tmp_path, tensors).tensors.keys() == tensors.keys()


@pytest.mark.parametrize(
    ("quantisation", "said"),
    [
        ({"quant_method": "gptq", "bits": 4}, "quantised by 'gptq'"),
        ({}, "quantised by None"),
        ("fp8 or so", "quantised by 'fp8 or so'"),
        (fp8([128]), r"weight_block_size is [128]"),
        (fp8([0, 128]), r"weight_block_size is [0, 128]"),
        (fp8(["a", 1]), "weight_block_size is"),
        (fp8(128), "weight_block_size is 128"),
    ],
)
def test_quantisations_that_are_not_read(tmp_path, quantisation, said):
    with pytest.raises(InputError) as caught:
        opened(tmp_path, {"a": torch.ones(1)}, quantisation)
    assert said in str(caught.value)


# --- 4-bit floats -----------------------------------------------------------------------------


def test_4_bit_floats(tmp_path):
    """gpt-oss' experts: gate and up rows in turn, a matrix an expert."""
    torch.manual_seed(2)
    blocks = torch.randint(0, 256, (3, 20, 2, 16), dtype=torch.uint8)
    scales = torch.randint(110, 140, (3, 20, 2), dtype=torch.uint8)
    name = "mlp.experts.gate_up_proj"
    bias = {f"{name}_bias": torch.ones(3, 20)}
    tensors = {f"{name}_blocks": blocks, f"{name}_scales": scales, **bias}
    source = opened(tmp_path, tensors, {"quant_method": "mxfp4"})
    assert {n: (t.shape, t.dtype) for n, t in source.tensors.items()} == {
        name: ((3, 64, 20), "BF16"),
        f"{name}_bias": ((3, 20), "F32"),
    }
    truth = convert_moe_packed_tensors(blocks, scales)
    assert truth.shape == (3, 64, 20)
    for expert in range(3):
        for run in (
            Run(name, 0, 10, 2, expert, transposed=True),
            Run(name, 1, 10, 2, expert, transposed=True),
            Run(name, 3, 5, 1, expert, transposed=True),
            Run(name, 5, 33, 1, expert),
            Run(name, 1, 20, 3, expert),
        ):
            wanted = transform.rows(truth, run)
            assert torch.equal(source.rows(run), wanted)
            assert torch.equal(source.rows(run, (2, 7)), wanted[:, 2:9])


@pytest.mark.parametrize(
    ("blocks", "scales", "said"),
    [
        ((2, 4, 3, 16), None, "a_blocks is there, and a_scales is not"),
        ((2, 4, 3, 16), (2, 4, 2), "a_scales is [2, 4, 2] of U8, and [2, 4, 3]"),
        ((2, 4, 3, 8), (2, 4, 3), "a group has 16 bytes"),
    ],
)
def test_blocks_and_scales_that_do_not_fit(tmp_path, blocks, scales, said):
    tensors = {"a_blocks": torch.zeros(blocks, dtype=torch.uint8)}
    if scales is not None:
        tensors["a_scales"] = torch.zeros(scales, dtype=torch.uint8)
    with pytest.raises(InputError) as caught:
        opened(tmp_path, tensors)
    assert said in str(caught.value)


# --- files ------------------------------------------------------------------------------------


def test_safetensors_are_preferred_to_pickles(tmp_path):
    torch.save({"a": torch.zeros(2, 3)}, tmp_path / "pytorch_model.bin")
    run = Run("a", 1, 1)
    source = open_weights(tmp_path)
    assert source.dtype("a") == torch.float32
    assert torch.equal(source.rows(run, (1, 2)), torch.zeros(1, 2))
    save_file({"a": torch.ones(2, 3)}, tmp_path / "model.safetensors")
    assert torch.equal(open_weights(tmp_path).rows(run, (1, 2)), torch.ones(1, 2))


def test_pickles_may_be_quantised_too(tmp_path):
    numbers, scales = float8(torch.randn(20, 30), (128, 128))
    torch.save({"a": numbers, "a_scale_inv": scales}, tmp_path / "pytorch_model.bin")
    truth = (numbers.float() * scales[0, 0]).bfloat16()
    assert torch.equal(open_weights(tmp_path).rows(Run("a", 3, 9)), truth[3:12])


@contextmanager
def another_user() -> Iterator[None]:
    """Be someone who may not read everything, as root may."""
    if (before := os.geteuid()) == 0:
        os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(before)


@pytest.mark.parametrize(
    "name",
    [
        "model.safetensors",
        "model.safetensors.index.json",
        "pytorch_model.bin",
        "pytorch_model.bin.index.json",
        "",
    ],
)
def test_what_may_not_be_read(name):
    with TemporaryDirectory() as made:
        folder = Path(made)
        folder.chmod(0o755)
        if name:
            (folder / name).write_text("{}")
        (folder / name).chmod(0)
        with another_user(), pytest.raises(InputError) as caught:
            open_weights(folder)
        folder.chmod(0o755)
    (found,) = caught.value.problems
    assert (found.problem, found.where) == ("you may not read it", str(folder / name))
