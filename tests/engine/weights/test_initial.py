"""Runs that start from Hugging Face weights, as transformers saved them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from msllm.engine.weights import initial
from msllm.models.resolve import resolve_model
from tests.engine.megatron.conftest import run_ranks
from tests.engine.megatron.parity_case import CASES, LENGTH, reference

HERE = Path(__file__).parent
LAYOUTS = {
    "one": (1, {}),
    "tp2-pp2": (4, {"tp": 2, "pp": 2}),
    "ep2-tp2": (4, {"tp": 2, "ep": 2}),
}
EXPERTS = [name for name in CASES if CASES[name][0] in ("qwen3_moe", "mixtral")]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One folder a case: weights in several shards, and what transformers makes of them."""
    folder = tmp_path_factory.mktemp("models")
    for name, (kind, over, *_) in CASES.items():
        model = reference(kind, over).eval()
        model.save_pretrained(folder / name, max_shard_size="60KB")
        generator = torch.Generator().manual_seed(1)
        tokens = torch.randint(0, 131, (2, LENGTH + 1), generator=generator)
        inputs, labels = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
        with torch.no_grad():
            logits = model(inputs).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        truth = {"tokens": inputs, "labels": labels, "logits": logits, "loss": loss}
        torch.save(truth, folder / name / "truth.pt")
    return folder


@pytest.fixture(scope="module")
def found(models: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict]:
    reports = {}
    for name, (world, sizes) in LAYOUTS.items():
        out = tmp_path_factory.mktemp("initial") / f"{name}.json"
        run_ranks(world, HERE / "initial_cases.py", str(models), str(out), json.dumps(sizes))
        reports[name] = json.loads(out.read_text())
    return reports


@pytest.mark.distributed
@pytest.mark.parametrize("name", CASES)
def test_a_model_starts_as_the_one_that_was_saved(found, name):
    assert found["one"][name]["unequal"] == []
    assert found["one"][name]["logits"] < 1e-4
    assert found["one"][name]["loss"] < 1e-5
    assert found["tp2-pp2"][name]["loss"] < 1e-5


@pytest.mark.distributed
@pytest.mark.parametrize("name", CASES)
def test_the_optimizers_copies_are_those_weights(found, name):
    assert found["one"][name]["moved"] == []
    assert found["tp2-pp2"][name]["moved"] == []


@pytest.mark.distributed
@pytest.mark.parametrize("name", EXPERTS)
def test_each_rank_reads_its_own_experts(found, name):
    assert found["ep2-tp2"][name]["loss"] < 1e-5


# --- refusals ---------------------------------------------------------------------------------


@pytest.fixture
def copy(models, tmp_path):
    def make(name="qwen3"):
        return Path(shutil.copytree(models / name, tmp_path / name))

    return make


def problems(folder: Path, **changes) -> str:
    model = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(model | changes))
    found = initial.check(folder, resolve_model(str(folder)).architecture)
    return "\n".join(map(str, found))


def change_index(folder: Path, edit) -> None:
    file = folder / "model.safetensors.index.json"
    index = json.loads(file.read_text())
    edit(index["weight_map"])
    file.write_text(json.dumps(index))


@pytest.mark.parametrize("name", CASES)
def test_the_folder_fits_its_own_model(copy, name):
    assert problems(copy(name)) == ""


def test_another_shape(copy):
    said = problems(copy(), intermediate_size=80)
    assert "mlp.gate_proj.weight is [96, 64] in the folder and [80, 64] in the model" in said
    assert "and 3 more of that kind" in said


def test_a_tensor_too_few_and_one_too_many(copy):
    folder = copy()
    assert "the folder has model.layers.2." in problems(folder, num_hidden_layers=2)
    said = problems(folder, attention_bias=True, num_hidden_layers=3)
    assert "the model has model.layers.0.self_attn.q_proj.bias, and the folder does not" in said


def test_a_head_beside_tied_embeddings_and_rotary_tables_say_nothing_new(copy):
    folder = copy()
    from safetensors.torch import save_file

    save_file({"model.rotary_emb.inv_freq": torch.ones(3)}, folder / "extra.safetensors")
    change_index(folder, lambda m: m.update({"model.rotary_emb.inv_freq": "extra.safetensors"}))
    assert problems(folder, tie_word_embeddings=True) == ""


def test_a_missing_shard(copy):
    folder = copy()
    next(folder.glob("model-00002*")).unlink()
    assert "model-00002-of" in problems(folder)
    assert "is missing" in problems(folder)


@pytest.mark.parametrize("keep", [3, 100, -1])
def test_a_shard_cut_short(copy, keep):
    folder = copy()
    shard = next(folder.glob("model-00002*"))
    shard.write_bytes(shard.read_bytes()[:keep])
    assert "damaged" in problems(folder)


def test_overlapping_offsets(copy):
    folder = copy()
    shard = max(folder.glob("model-*"), key=lambda file: file.read_bytes().count(b"data_offsets"))
    data = shard.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    entries = [entry for name, entry in header.items() if name != "__metadata__"]
    entries[1]["data_offsets"][0] -= 4
    text = json.dumps(header).encode()
    shard.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])
    assert "damaged: the bytes of" in problems(folder)


def test_no_weights_and_pickled_ones(copy, tmp_path):
    folder = copy()
    for file in folder.glob("model*"):
        file.unlink()
    assert "there are no weights in the folder" in problems(folder)
    (folder / "pytorch_model.bin").touch()
    assert "only safetensors are read" in problems(folder)


def test_an_index_that_lies(copy):
    folder = copy()
    first = sorted(folder.glob("model-*"))[0].name
    change_index(folder, lambda m: m.update({"lm_head.weight": first}))
    assert f"lm_head.weight is not in {first}" in problems(folder)
    (folder / "model.safetensors.index.json").write_text("{")
    assert "the index can't be read" in problems(folder)
