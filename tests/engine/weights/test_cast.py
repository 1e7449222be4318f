"""Casting weights: as torch does it, nothing else changed, overflow told."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file

from msllm.cli.app import run
from msllm.engine.training import checkpoint_folder
from msllm.engine.weights.cast import cast
from msllm.engine.weights.to_mcore import hf_to_mcore
from msllm.engine.weights.verify import verify
from msllm.errors import InputError
from tests.parity.all_cases import CASES


@pytest.fixture(scope="module")
def hf(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "hf"
    CASES["qwen3"].write(folder)
    return folder


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return {k: v for file in folder.glob("*.safetensors") for k, v in load_file(file).items()}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_published_weights(hf, tmp_path, dtype):
    from transformers import AutoModelForCausalLM

    cast(hf, tmp_path / "out", dtype, shard_bytes=100_000)
    reference = AutoModelForCausalLM.from_pretrained(hf, dtype=dtype).state_dict()
    found = AutoModelForCausalLM.from_pretrained(tmp_path / "out").state_dict()
    assert found.keys() == reference.keys()
    assert {t.dtype for t in found.values()} == {dtype}
    assert [k for k in found if not torch.equal(found[k], reference[k])] == []
    before = json.loads((hf / "config.json").read_text())
    name = str(dtype).removeprefix("torch.")
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == before | {"dtype": name}
    other = "generation_config.json"
    assert (tmp_path / "out" / other).read_bytes() == (hf / other).read_bytes()


def test_checkpoints(hf, tmp_path):
    hf_to_mcore(hf, tmp_path / "mcore")
    cast(hf, tmp_path / "half", torch.float16)
    cast(tmp_path / "mcore", tmp_path / "half-mcore", torch.float16)
    assert verify(tmp_path / "half", tmp_path / "half-mcore").same
    assert checkpoint_folder.fault_of(tmp_path / "half-mcore") is None
    config = json.loads((tmp_path / "half-mcore" / "hf" / "config.json").read_text())
    assert config["dtype"] == "float16"


def test_only_weights_of_a_checkpoint_are_cast(tmp_path):
    state = {
        "decoder.weight": torch.randn(5, 7),
        "optimizer.state.exp_avg": torch.randn(9),
        "steps": torch.arange(4),
        "rng": {"seed": 5, "what": "object"},
    }
    dcp.save(state, checkpoint_id=tmp_path / "in", no_dist=True)
    (tmp_path / "in" / "common.pt").write_bytes(b"kept")
    cast(tmp_path / "in", tmp_path / "out", torch.bfloat16)
    found = {
        "decoder.weight": torch.zeros(5, 7, dtype=torch.bfloat16),
        "optimizer.state.exp_avg": torch.zeros(9),
        "steps": torch.zeros(4, dtype=torch.int64),
        "rng": {"seed": 0, "what": ""},
    }
    dcp.load(found, checkpoint_id=tmp_path / "out", no_dist=True)
    assert torch.equal(found["decoder.weight"], state["decoder.weight"].to(torch.bfloat16))
    assert torch.equal(found["optimizer.state.exp_avg"], state["optimizer.state.exp_avg"])
    assert torch.equal(found["steps"], state["steps"])
    assert found["rng"] == state["rng"]
    assert (tmp_path / "out" / "common.pt").read_bytes() == b"kept"


def test_overflow_and_integers(tmp_path, capsys):
    (tmp_path / "in").mkdir()
    tensors = {
        "large": torch.tensor([1.0, 1e6]),
        "infinite": torch.tensor([1.0, math.inf]),
        "small": torch.ones(3),
        "numbers": torch.arange(3),
    }
    save_file(tensors, tmp_path / "in" / "model.safetensors")
    command = ["convert", "cast", str(tmp_path / "in"), "--dtype", "fp16", "--out"]
    assert run([*command, str(tmp_path / "strict"), "--strict"]) == 2
    assert "float16 can't hold all values of large" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["in"]
    assert run([*command, str(tmp_path / "out")]) == 0
    said = capsys.readouterr().err
    assert "large has values that fp16 can't hold" in said
    assert "infinite has" not in said
    found = weights(tmp_path / "out")
    assert found["large"][1] == math.inf
    assert found["numbers"].dtype == torch.int64
    assert run([*command, str(tmp_path / "out")]) == 2
    assert "is not empty" in capsys.readouterr().err


def test_what_is_not_cast(tmp_path):
    save_file({"a": torch.ones(4).to(torch.float8_e4m3fn)}, tmp_path / "model.safetensors")
    with pytest.raises(InputError, match="quantized"):
        cast(tmp_path, tmp_path / "out", torch.bfloat16)
    with pytest.raises(InputError, match="there is no folder"):
        cast(tmp_path / "none", tmp_path / "out", torch.bfloat16)
    (tmp_path / "model.safetensors").write_bytes(b"\0" * 20)
    with pytest.raises(InputError, match="damaged"):
        cast(tmp_path, tmp_path / "out", torch.bfloat16)
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]
