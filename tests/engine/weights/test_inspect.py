"""What `msllm convert inspect` says of each kind of folder."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from msllm.cli.app import run
from msllm.engine.training import checkpoint_folder
from msllm.engine.weights.contents import by_dtype, inspect
from msllm.engine.weights.folder_kind import Kind
from msllm.engine.weights.to_mcore import hf_to_mcore
from msllm.models.catalog import catalog
from tests.parity.all_cases import CASES


@pytest.fixture(scope="module")
def hf(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "hf"
    CASES["qwen3"].write(folder)
    return folder


def test_published_weights(hf):
    from transformers import AutoModelForCausalLM

    reference = AutoModelForCausalLM.from_pretrained(hf).state_dict()
    found = inspect(hf)
    assert found.folder.kind is Kind.SAFETENSORS
    assert {t.name: t.shape for t in found.tensors} == {
        name: tuple(tensor.shape) for name, tensor in reference.items()
    }
    assert found.bytes == sum(tensor.nbytes for tensor in reference.values())
    assert by_dtype(found.tensors) == {"float32": found.bytes}


def test_pickled_weights(hf, tmp_path):
    from transformers import AutoModelForCausalLM

    state = AutoModelForCausalLM.from_pretrained(hf).state_dict()
    torch.save(state, tmp_path / "pytorch_model.bin")
    found = inspect(tmp_path)
    assert found.folder.kind is Kind.PICKLED
    assert {t.name: t.shape for t in found.tensors} == {
        name: tuple(tensor.shape) for name, tensor in state.items()
    }
    assert found.architecture is None


def test_a_checkpoint_and_the_run_it_is_of(hf, tmp_path):
    run_folder = tmp_path / "run"
    (run_folder / "checkpoints").mkdir(parents=True)
    hf_to_mcore(hf, run_folder / "checkpoints" / "step-00000007", dtype=torch.bfloat16)
    shutil.copytree(
        run_folder / "checkpoints" / "step-00000007", run_folder / "checkpoints" / "step-00000009"
    )
    next((run_folder / "checkpoints" / "step-00000009").glob("*.distcp")).unlink()
    found = inspect(run_folder)
    assert found.folder.path.name == "step-00000007"
    assert found.folder.kind is Kind.TORCH_DIST
    assert "step-00000009 is passed over" in found.folder.notes[0]
    assert by_dtype(found.tensors).keys() == {"bfloat16"}
    assert found.architecture == inspect(hf).architecture
    assert found.bytes == inspect(hf).bytes / 2


def test_a_catalog_models_shape_is_known(tmp_path):
    card = catalog().get("Qwen3-8B")
    (tmp_path / "config.json").write_text(json.dumps(card.config))
    torch.save({"a": torch.ones(2)}, tmp_path / "pytorch_model.bin")
    assert card.name in inspect(tmp_path).names


def test_the_command(hf, tmp_path, capsys):
    assert run(["convert", "inspect", str(hf)]) == 0
    short = capsys.readouterr().out
    assert "Hugging Face safetensors" in short
    assert "47, " in short
    assert "and 27 more (--all lists them)" in short
    assert run(["convert", "inspect", str(hf), "--all"]) == 0
    assert "131x64  float32" in capsys.readouterr().out
    assert run(["convert", "inspect", str(hf), "--format", "json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["family"] == "qwen3"
    assert record["bytes"] == sum(t["bytes"] for t in record["tensors"]) == 4 * record["parameters"]
    assert len(record["tensors"]) == 47
    (tmp_path / "config.json").write_text("{}")
    assert run(["convert", "inspect", str(tmp_path)]) == 2
    assert "holds no weights" in capsys.readouterr().err


def test_active_parameters(tmp_path, capsys):
    CASES["mixtral"].write(tmp_path / "hf")
    assert run(["convert", "inspect", str(tmp_path / "hf"), "--format", "json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["bytes"] == 4 * record["parameters"]
    assert record["parameters"] - record["active_parameters"] == 4 * 2 * 3 * 64 * 96


def test_a_checkpoint_without_a_config_says_its_shape_itself(hf, tmp_path):
    hf_to_mcore(hf, tmp_path / "mcore")
    manifest = inspect(tmp_path / "mcore").folder.manifest
    shutil.rmtree(tmp_path / "mcore" / "hf")
    checkpoint_folder.seal(tmp_path / "mcore", manifest)
    assert inspect(tmp_path / "mcore").architecture == inspect(hf).architecture
