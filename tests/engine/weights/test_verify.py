"""Comparing weights: across formats, with what differs named."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from msllm.cli.app import run
from msllm.engine.weights.to_hf import mcore_to_hf
from msllm.engine.weights.to_mcore import hf_to_mcore
from msllm.engine.weights.verify import verify
from tests.parity.all_cases import CASES

SOME = ("qwen3", "llama-rope3-tied", "glm4", "mixtral", "chatglm")


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture
def hf(models):
    def make(name: str = "qwen3") -> Path:
        if not (models / name).exists():
            CASES[name].write(models / name)
        return models / name

    return make


def edited(source: Path, out: Path, edit) -> Path:
    """A copy of a folder's weights in one file, changed."""
    tensors = {k: v for file in source.glob("*.safetensors") for k, v in load_file(file).items()}
    edit(tensors)
    out.mkdir()
    save_file({k: v.contiguous() for k, v in tensors.items()}, out / "model.safetensors")
    (out / "config.json").write_bytes((source / "config.json").read_bytes())
    return out


def halved(tensors: dict[str, torch.Tensor]) -> None:
    tensors.update({k: v.to(torch.bfloat16) for k, v in tensors.items()})


def nudged(tensors: dict[str, torch.Tensor]) -> None:
    tensors["model.layers.1.self_attn.k_proj.weight"][3, 5] += 0.5


@pytest.mark.parametrize("name", [name for name in SOME if name in CASES])
def test_formats_of_the_same_weights(hf, tmp_path, name):
    hf_to_mcore(hf(name), tmp_path / "mcore")
    mcore_to_hf(tmp_path / "mcore", tmp_path / "back", shard_bytes=50_000)
    assert verify(hf(name), tmp_path / "back").same
    across = verify(hf(name), tmp_path / "mcore")
    assert across.same
    assert across.tensors > 20
    assert verify(tmp_path / "mcore", tmp_path / "back").same


def test_one_changed_value_is_found_in_any_format(hf, tmp_path):
    other = edited(hf(), tmp_path / "other", nudged)
    (found,) = verify(hf(), other).differences
    assert found.name == "model.layers.1.self_attn.k_proj.weight"
    assert (found.count, found.largest) == (1, pytest.approx(0.5))
    hf_to_mcore(other, tmp_path / "mcore")
    (found,) = verify(tmp_path / "mcore", hf()).differences
    assert found.name == "decoder.layers.1.self_attention.linear_qkv.weight"
    assert (found.count, found.largest) == (1, pytest.approx(0.5))


def test_the_sign_of_zero_and_no_numbers_count_as_bits(hf, tmp_path):
    def zero(tensors):
        tensors["model.norm.weight"][0] = 0.0
        tensors["model.norm.weight"][1] = torch.nan

    def minus(tensors):
        zero(tensors)
        tensors["model.norm.weight"][0] = -0.0

    a, b = edited(hf(), tmp_path / "a", zero), edited(hf(), tmp_path / "b", minus)
    assert verify(a, a).same
    (found,) = verify(a, b).differences
    assert (found.count, found.largest) == (1, 0.0)
    assert verify(a, b, tolerance=0.0).same
    (found,) = verify(a, hf(), tolerance=10.0).differences
    assert (found.name, found.largest) == ("model.norm.weight", float("inf"))


def test_types_are_compared_within_a_tolerance(hf, tmp_path):
    half = edited(hf(), tmp_path / "half", halved)
    assert len(verify(hf(), half).differences) == len(verify(half, half).differences) + 47
    assert verify(hf(), half, tolerance=2**-8).same
    assert not verify(hf(), half, tolerance=2**-14).same
    hf_to_mcore(hf(), tmp_path / "mcore", dtype=torch.bfloat16)
    assert verify(half, tmp_path / "mcore").same


def test_one_sided_tensors_and_shapes(hf, tmp_path):
    def fewer(tensors):
        del tensors["lm_head.weight"]
        tensors["extra"] = torch.zeros(2)
        tensors["model.norm.weight"] = torch.zeros(3)

    other = edited(hf(), tmp_path / "other", fewer)
    found = {d.name: d for d in verify(hf(), other).differences}
    assert found.keys() == {"lm_head.weight", "extra", "model.norm.weight"}
    assert found["lm_head.weight"].b is None
    assert found["extra"].a is None
    assert found["model.norm.weight"].largest is None
    hf_to_mcore(hf(), tmp_path / "mcore")
    names = {d.name for d in verify(tmp_path / "mcore", other).differences}
    assert names == {
        "output_layer.weight", "extra", "model.norm.weight", "decoder.final_layernorm.weight",
    }  # fmt: skip


def test_the_command_and_its_exit_statuses(hf, tmp_path, capsys):
    other = edited(hf(), tmp_path / "other", nudged)
    assert run(["convert", "verify", str(hf()), str(hf())]) == 0
    assert "the same: 47 tensors" in capsys.readouterr().out
    assert run(["convert", "verify", str(hf()), str(other)]) == 1
    said = capsys.readouterr().out
    assert "1 differ" in said
    assert "model.layers.1.self_attn.k_proj.weight  largest difference 0.5" in said
    assert run(["convert", "verify", str(hf()), str(other), "--format", "json"]) == 1
    assert json.loads(capsys.readouterr().out)["differences"][0]["values"] == 1
    assert run(["convert", "verify", str(hf()), str(tmp_path / "none")]) == 2
    assert "there is no folder" in capsys.readouterr().err
    assert run(["convert", "verify", str(hf()), str(tmp_path)]) == 2
    assert "holds no weights" in capsys.readouterr().err


def test_a_damaged_checkpoint_can_not_be_compared(hf, tmp_path, capsys):
    hf_to_mcore(hf(), tmp_path / "mcore")
    for name in (".metadata", "complete.json"):
        (tmp_path / name).write_bytes((tmp_path / "mcore" / name).read_bytes())
    file = tmp_path / "mcore" / "__0_0.distcp"
    file.write_bytes(file.read_bytes()[:-100])
    assert run(["convert", "verify", str(hf()), str(tmp_path / "mcore")]) == 2
    assert "__0_0.distcp has" in capsys.readouterr().err
    (tmp_path / "mcore" / "complete.json").unlink()
    assert run(["convert", "verify", str(hf()), str(tmp_path / "mcore")]) == 2
    assert "cut short" in capsys.readouterr().err
