"""What an export leaves behind: all of the model, no more of it, or nothing."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors import safe_open

from msllm.cli.app import run
from msllm.engine.weights import stored_parts, to_mcore
from msllm.engine.weights.sidecar import FOLDER
from msllm.engine.weights.to_hf import mcore_to_hf
from msllm.engine.weights.to_mcore import hf_to_mcore
from msllm.errors import InputError
from tests.engine.weights.published_forms import assert_same, config_of, read, write
from tests.parity.all_cases import CASES

WEIGHTS = Path(to_mcore.__file__).parent


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory):
    root = tmp_path_factory.mktemp("models")

    def model(name: str) -> Path:
        if not (root / name).exists():
            CASES[name].write(root / name)
        return root / name

    return model


def padded(checkpoint: Path, out: Path, rows: int) -> Path:
    """The checkpoint as a run of more ranks saves it: rows of NaN behind the vocabulary."""
    index = dcp.FileSystemReader(checkpoint).read_metadata()
    held = {
        key: torch.empty(stored.size, dtype=stored.properties.dtype)
        for key, stored in index.state_dict_metadata.items()
    }
    dcp.load(held, checkpoint_id=checkpoint, no_dist=True)
    for key in ("embedding.word_embeddings.weight", "output_layer.weight"):
        if key in held:
            more = torch.full((rows - len(held[key]), held[key].size(1)), 0.5)
            held[key] = torch.cat([held[key], more])
    dcp.save(held, checkpoint_id=out, no_dist=True)
    shutil.copytree(checkpoint / FOLDER, out / FOLDER)
    shutil.copyfile(checkpoint / "metadata.json", out / "metadata.json")
    return out


@pytest.mark.parametrize("name", ["qwen3", "llama-rope3-tied"])
def test_rows_that_pad_the_vocabulary_are_left_out(models, tmp_path, name):
    hf_to_mcore(models(name), tmp_path / "mcore")
    mcore_to_hf(padded(tmp_path / "mcore", tmp_path / "padded", 512), tmp_path / "back")
    assert_same(read(tmp_path / "back"), read(models(name)))
    assert config_of(tmp_path / "back") == config_of(models(name))


@pytest.mark.parametrize("name", ["qwen3", "llama-rope3-tied"])
def test_the_index_lists_what_is_in_the_files(models, tmp_path, name):
    hf_to_mcore(models(name), tmp_path / "mcore")
    mcore_to_hf(tmp_path / "mcore", tmp_path / "back", shard_bytes=20_000)
    index = json.loads((tmp_path / "back" / "model.safetensors.index.json").read_text())
    files = sorted((tmp_path / "back").glob("*.safetensors"))
    found: dict[str, str] = {}
    size = 0
    for file in files:
        with safe_open(file, "pt") as opened:
            names = list(opened.keys())
            size += sum(opened.get_tensor(n).nbytes for n in names)
        assert names, f"{file.name} is empty"
        assert not found.keys() & set(names)
        found |= dict.fromkeys(names, file.name)
    assert found == index["weight_map"]
    assert size == index["metadata"]["total_size"]
    assert len(files) > 3


def test_what_lies_beside_the_weights_comes_back_byte_for_byte(models, tmp_path):
    source = shutil.copytree(models("qwen3"), tmp_path / "hf")
    beside = {
        "tokenizer.json": b'{"a": 1}',
        "tokenizer.model": bytes(range(256)),
        "tokenizer_config.json": b'{"chat_template": "{{ messages }}"}',
        "chat_template.jinja": "{{ messages }} é".encode(),
        "generation_config.json": b'{"temperature":   0.6}',
        "modeling_own.py": b"raise SystemExit\n",
        "README.md": b"# Model\n",
    }
    for name, content in beside.items():
        (source / name).write_bytes(content)
    hf_to_mcore(source, tmp_path / "mcore")
    mcore_to_hf(tmp_path / "mcore", tmp_path / "back")
    beside["config.json"] = (source / "config.json").read_bytes()
    assert {n: (tmp_path / "back" / n).read_bytes() for n in beside} == beside
    assert not [p.name for p in (tmp_path / "back").iterdir() if p.name.startswith(".")]


class Stopped(Exception):
    """As good as a signal."""


def test_an_interrupted_conversion_leaves_no_model_and_goes_on(models, tmp_path, monkeypatch):
    monkeypatch.setattr(to_mcore, "PART_BYTES", 40_000)
    monkeypatch.setattr(stored_parts, "PART_BYTES", 40_000)
    seen = []

    def stop(state):
        seen.append(state)
        if state.done > state.total / 2:
            raise Stopped

    for convert, source, out in (
        (hf_to_mcore, models("qwen3"), tmp_path / "mcore"),
        (mcore_to_hf, tmp_path / "mcore", tmp_path / "back"),
    ):
        with pytest.raises(Stopped):
            convert(source, out, progress=stop)
        assert not out.exists()
        states = []
        convert(source, out, progress=states.append)
        assert states[0].resumed > states[0].total / 4
        assert states[-1].done == states[-1].total
    assert_same(read(tmp_path / "back"), read(models("qwen3")))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["back", "mcore"]


UP = "model.layers.1.mlp.up_proj.weight"


@pytest.mark.parametrize(("value", "dtype"), [("nan", None), ("-inf", None), ("1e6", "fp16")])
def test_values_that_are_not_finite_are_told_and_refused_if_asked(
    models, tmp_path, capsys, value, dtype
):
    """Those too that only the new type makes so."""
    tensors = read(models("qwen3"))
    tensors[UP][3, 5] = float(value)
    write(tmp_path / "hf", tensors, config_of(models("qwen3")))
    paths = {name: str(tmp_path / name) for name in ("hf", "mcore", "back", "new")}
    to_mcore = ["convert", "hf-to-mcore", "--model", paths["hf"], "--out"]
    to_hf = ["convert", "mcore-to-hf", "--checkpoint", paths["mcore"], "--out"]
    typed = [] if dtype is None else ["--dtype", dtype]
    for command, out, name in (
        (to_mcore, "mcore", "layers.1.mlp.linear_fc1.weight"),
        (to_hf, "back", "layers.mlp.linear_fc1.weight"),
    ):
        assert run([*command, paths["new"], "--strict", *typed]) == 2
        shown = "".join(capsys.readouterr().err.replace("│", "").split())
        assert "notallvaluesarefinitenumbers" in shown
        assert name in shown
        assert not any("new" in path.name for path in tmp_path.iterdir())
        keeps = typed if command is to_hf else []
        assert run([*command, paths[out], *keeps]) == 0
        warned = capsys.readouterr().err
        assert (f"{name} are finite" in warned) == (bool(keeps) or dtype is None)
    found = read(tmp_path / "back")[UP][3, 5]
    assert not found.isfinite()


def test_a_tensor_in_two_files_is_an_error(models, tmp_path):
    tensors = read(models("qwen3"))
    twice = "model.norm.weight"
    write(tmp_path / "hf", tensors, config_of(models("qwen3")))
    files = [f"model-0000{n}-of-00002.safetensors" for n in (1, 2)]
    for file in files:
        shutil.copyfile(tmp_path / "hf" / "model.safetensors", tmp_path / "hf" / file)
    listed = dict.fromkeys(tensors, files[1]) | {twice: files[0]}
    index = {"metadata": {}, "weight_map": listed}
    (tmp_path / "hf" / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(InputError, match=f"is in {files[0]} and in {files[1]}"):
        hf_to_mcore(tmp_path / "hf", tmp_path / "mcore")


def test_no_published_name_is_written_outside_the_families():
    """A name in other code would be that of one family only."""
    literal = re.compile(r"lm_head|embed_tokens|self_attn|(?<!linear)_proj\b|model\.norm")
    found = {
        file.name: match[0]
        for file in WEIGHTS.glob("*.py")
        if (match := literal.search(file.read_text()))
    }
    assert found == {}
