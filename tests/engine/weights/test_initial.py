"""Runs that start from Hugging Face weights, as transformers saved them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from msllm.config import RunConfig
from msllm.engine import preflight
from msllm.engine.weights import matching
from msllm.models.resolve import resolve_model
from tests.engine.megatron.conftest import run_ranks
from tests.engine.weights.published_forms import FP8, config_of, fused, quantised, read, write
from tests.parity.all_cases import CASES

MIXED = ("qwen3", "llama-rope3-tied", "mixtral", "qwen3_moe-each")
"""Cases whose optimizer is looked into: with and without experts, grouped or not, tied."""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One folder a case, written when a test asks for it."""
    return tmp_path_factory.mktemp("models")


def model(models: Path, name: str) -> Path:
    if not (models / name).exists():
        CASES[name].write(models / name)
    return models / name


@pytest.mark.distributed
@pytest.mark.parametrize(("world", "sizes"), [(1, {}), (4, {"tp": 2, "pp": 2})])
def test_the_optimizers_copies_are_those_weights(models, tmp_path, world, sizes):
    folders = [str(model(models, name)) for name in MIXED]
    out = tmp_path / "moved.json"
    script = Path(__file__).with_name("moved_case.py")
    run_ranks(world, script, str(out), json.dumps(sizes), *folders)
    assert json.loads(out.read_text()) == {folder: [] for folder in folders}


@pytest.mark.distributed
def test_other_forms_fill_the_model_alike(models, tmp_path):
    """Cut by tensor and expert parallelism: 8-bit floats, and pickles with fused experts."""
    source = model(models, "qwen3_moe")
    tensors, config = read(source), config_of(source)
    stored, meant = quantised(tensors)
    write(tmp_path / "fp8", stored, config | {"quantization_config": FP8})
    write(tmp_path / "meant", meant, config)
    (tmp_path / "fused").mkdir()
    (tmp_path / "fused" / "config.json").write_text(json.dumps(config))
    together = fused(tensors, ("gate_proj", "up_proj", "down_proj"))
    torch.save(together, tmp_path / "fused" / "pytorch_model.bin")
    folders = [tmp_path / "fp8", tmp_path / "meant", tmp_path / "fused", source]
    for folder in folders[:3]:
        for name in ("run.json", "truth.pt"):
            shutil.copyfile(source / name, folder / name)
    script = Path(__file__).with_name("alike_case.py")
    out = tmp_path / "different.json"
    sizes = json.dumps({"tp": 2, "ep": 2})
    run_ranks(2, script, str(out), sizes, *map(str, folders))
    assert json.loads(out.read_text()) == {"fp8": [], "fused": []}


# --- refusals ---------------------------------------------------------------------------------


@pytest.fixture
def copy(models, tmp_path):
    def make(name="qwen3"):
        return Path(shutil.copytree(model(models, name), tmp_path / name))

    return make


def problems(folder: Path, **changes) -> str:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))
    found = matching.check(folder, resolve_model(str(folder)).architecture, "here")
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
    assert "and 6 more of that kind" in said


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


def test_a_head_that_is_not_the_embedding_is_warned_of_before_a_run(models, tmp_path):
    source = model(models, "llama-rope3-tied")
    tensors = read(source)
    head = tensors["model.embed_tokens.weight"].clone()
    settings = {"model": str(source), "device": "cpu", "dtype": "fp32"}

    def warned(head: torch.Tensor) -> str:
        folder = write(tmp_path / "hf", tensors | {"lm_head.weight": head}, config_of(source))
        run = RunConfig(**settings, checkpoint={"init_from": folder}, out=tmp_path / "run")
        return "\n".join(preflight.warnings(run, resolve_model(str(folder)).architecture))

    assert "lm_head.weight" not in warned(head)
    head[-1, -1] += 1
    assert "lm_head.weight is not model.embed_tokens.weight" in warned(head)


def test_multi_token_prediction_that_was_left_out(copy):
    assert "has no layers of it" in problems(copy("deepseek_v3"), num_nextn_predict_layers=1)


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


def test_no_weights(copy):
    folder = copy()
    for file in folder.glob("model*"):
        file.unlink()
    assert "there are no weights in the folder" in problems(folder)


def test_an_index_that_lies(copy):
    folder = copy()
    first = sorted(folder.glob("model-*"))[0].name
    change_index(folder, lambda m: m.update({"lm_head.weight": first}))
    assert f"lm_head.weight is not in {first}" in problems(folder)
    (folder / "model.safetensors.index.json").write_text("{")
    assert "not valid JSON" in problems(folder)
