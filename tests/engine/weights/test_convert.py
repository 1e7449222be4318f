"""Weights to Megatron's checkpoints and back: bit for bit, and as Megatron itself stores them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from msllm.cli.app import run
from msllm.engine.training import checkpoint_folder
from msllm.engine.weights.to_hf import mcore_to_hf
from msllm.engine.weights.to_mcore import hf_to_mcore
from msllm.errors import InputError
from tests.parity.all_cases import CASES


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return {k: v for file in folder.glob("*.safetensors") for k, v in load_file(file).items()}


@pytest.mark.parametrize("name", CASES)
def test_there_and_back_is_bit_for_bit(name, tmp_path):
    CASES[name].write(tmp_path / "hf")
    hf_to_mcore(tmp_path / "hf", tmp_path / "mcore")
    assert checkpoint_folder.fault_of(tmp_path / "mcore") is None
    mcore_to_hf(tmp_path / "mcore", tmp_path / "back", shard_bytes=100_000)
    before, after = weights(tmp_path / "hf"), weights(tmp_path / "back")
    assert before.keys() == after.keys()
    assert [k for k in before if not torch.equal(before[k], after[k])] == []
    for file in ("config.json", "generation_config.json"):
        if (tmp_path / "hf" / file).exists():
            assert (tmp_path / "back" / file).read_bytes() == (tmp_path / "hf" / file).read_bytes()


def test_a_taken_output_and_a_damaged_source_are_refused(tmp_path):
    CASES["qwen3"].write(tmp_path / "hf")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").touch()
    with pytest.raises(InputError, match="is not empty"):
        hf_to_mcore(tmp_path / "hf", tmp_path / "out")
    shard = next((tmp_path / "hf").glob("model-00002*"))
    shard.write_bytes(shard.read_bytes()[:-1])
    with pytest.raises(InputError, match="damaged"):
        hf_to_mcore(tmp_path / "hf", tmp_path / "new")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["hf", "out"]


def test_the_commands(tmp_path, capsys):
    CASES["qwen3"].write(tmp_path / "hf")
    paths = {name: str(tmp_path / name) for name in ("hf", "mcore", "back")}
    to_mcore = ["convert", "hf-to-mcore", "--model", paths["hf"], "--out", paths["mcore"]]
    assert run(to_mcore) == 0
    assert run(to_mcore) == 2
    to_hf = ["convert", "mcore-to-hf", "--checkpoint", paths["mcore"], "--out", paths["back"]]
    assert run([*to_hf, "--dtype", "bf16"]) == 0
    assert "wrote" in capsys.readouterr().out
    assert {w.dtype for w in weights(tmp_path / "back").values()} == {torch.bfloat16}
