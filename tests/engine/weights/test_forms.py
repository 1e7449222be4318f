"""Weights in every form they are published in: converted, they are the plain ones'."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from msllm.cli.app import run
from msllm.engine.weights.to_hf import mcore_to_hf
from msllm.engine.weights.to_mcore import hf_to_mcore
from msllm.errors import InputError
from tests.engine.weights.published_forms import (
    FP8,
    assert_same,
    config_of,
    fused,
    quantised,
    read,
    write,
)
from tests.parity.all_cases import CASES

QWEN, MIXTRAL = ("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory):
    """Folders of published weights by case, written when a test asks for them."""
    root = tmp_path_factory.mktemp("models")

    def model(name: str) -> Path:
        if not (root / name).exists():
            CASES[name].write(root / name)
        return root / name

    return model


def there_and_back(source: Path, work: Path) -> Path:
    hf_to_mcore(source, work / "mcore")
    mcore_to_hf(work / "mcore", work / "back")
    return work / "back"


@pytest.mark.parametrize("form", ["each", "fused"])
def test_8_bit_floats_are_their_values(models, tmp_path, form):
    config, tensors = config_of(models("qwen3_moe")), read(models("qwen3_moe"))
    if form == "fused":
        tensors = fused(tensors, QWEN)
    stored, meant = quantised(tensors)
    assert sum(t.dtype == torch.float8_e4m3fn for t in stored.values()) > 20
    write(tmp_path / "hf", stored, config | {"quantization_config": FP8})
    back = there_and_back(tmp_path / "hf", tmp_path)
    assert_same(read(back), meant)
    assert config_of(back) == config


def test_scales_are_held_against_the_weights_before_anything_is_written(models, tmp_path):
    config, tensors = config_of(models("qwen3")), read(models("qwen3"))
    stored, _ = quantised(tensors)
    name = "model.layers.1.mlp.up_proj.weight_scale_inv"
    for change in (None, torch.ones(2, 2)):
        changed = {k: v for k, v in (stored | {name: change}).items() if v is not None}
        write(tmp_path / "hf", changed, config | {"quantization_config": FP8})
        with pytest.raises(InputError, match=r"mlp\.up_proj\.weight_scale_inv"):
            hf_to_mcore(tmp_path / "hf", tmp_path / "mcore")
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


@pytest.mark.parametrize(
    ("name", "names"),
    [("qwen3_moe", QWEN), ("qwen3_moe-square", QWEN), ("mixtral", MIXTRAL)],
)
def test_fused_experts_are_those_of_each(models, tmp_path, name, names):
    """The fused form comes back; other weights of the same values are the usual ones'."""
    source = models(name)
    together = fused(read(source), names)
    assert not any(".experts.0." in k for k in together)
    write(tmp_path / "hf", together, config_of(source))
    back = there_and_back(tmp_path / "hf", tmp_path)
    assert_same(read(back), together)
    mcore_to_hf(tmp_path / "mcore", tmp_path / "usual", model=source)
    assert_same(read(tmp_path / "usual"), read(source))


def test_fused_experts_are_what_transformers_has_in_memory(models):
    from transformers import AutoModelForCausalLM

    for name, names in (("qwen3_moe", QWEN), ("mixtral", MIXTRAL)):
        model = AutoModelForCausalLM.from_pretrained(models(name), dtype=torch.float32)
        assert_same(fused(read(models(name)), names), dict(model.state_dict()))


@pytest.mark.parametrize("sharded", [False, True])
def test_pickles(models, tmp_path, sharded):
    tensors = read(models("qwen3"))
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "config.json").write_text(json.dumps(config_of(models("qwen3"))))
    if sharded:
        files = {n: f"pytorch_model-{i % 3}.bin" for i, n in enumerate(tensors)}
        for file in set(files.values()):
            part = {n: tensors[n] for n in tensors if files[n] == file}
            torch.save(part, tmp_path / "hf" / file)
        index = {"metadata": {}, "weight_map": files}
        (tmp_path / "hf" / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    else:
        torch.save(tensors, tmp_path / "hf" / "pytorch_model.bin")
    assert_same(read(there_and_back(tmp_path / "hf", tmp_path)), tensors)


class Hostile:
    def __init__(self, trap: Path):
        self.trap = trap

    def __reduce__(self):
        return Path.touch, (self.trap,)


def test_a_pickle_with_code_is_refused_and_not_run(models, tmp_path, capsys):
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "config.json").write_text(json.dumps(config_of(models("qwen3"))))
    tensors = read(models("qwen3")) | {"x": Hostile(tmp_path / "trap")}
    torch.save(tensors, tmp_path / "hf" / "pytorch_model.bin")
    paths = ["--model", str(tmp_path / "hf"), "--out", str(tmp_path / "mcore")]
    assert run(["convert", "hf-to-mcore", *paths]) == 2
    assert "nothing of it was run" in " ".join(capsys.readouterr().err.split())
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


def test_types_that_are_mixed_are_promoted_where_megatron_stores_them_together(models, tmp_path):
    """Layers are one stored tensor: with one layer's in float32 all are; others keep theirs."""
    plain = read(models("qwen3"))
    kept = ("norm.weight", "layers.1.mlp.down_proj.weight")
    mixed = {k: v if k.endswith(kept) else v.bfloat16() for k, v in plain.items()}
    write(tmp_path / "hf", mixed, config_of(models("qwen3")))
    promoted = {k: v.float() if k.endswith("down_proj.weight") else v for k, v in mixed.items()}
    assert {v.dtype for v in promoted.values()} == {torch.float32, torch.bfloat16}
    assert_same(read(there_and_back(tmp_path / "hf", tmp_path)), promoted)


def test_a_head_beside_tied_embeddings(models, tmp_path, capsys):
    source = models("llama-rope3-tied")
    tensors, config = read(source), config_of(source)
    assert "lm_head.weight" not in tensors
    embedding = tensors["model.embed_tokens.weight"]
    tables = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}
    for name, head in (("same", embedding.clone()), ("other", embedding + 1)):
        write(tmp_path / name, tensors | tables | {"lm_head.weight": head}, config)
        out = tmp_path / f"{name}-mcore"
        assert (
            run(["convert", "hf-to-mcore", "--model", str(tmp_path / name), "--out", str(out)]) == 0
        )
        said = "lm_head.weight is not model.embed_tokens.weight" in capsys.readouterr().err
        assert said == (name == "other")
        mcore_to_hf(out, tmp_path / f"{name}-back")
        assert_same(read(tmp_path / f"{name}-back"), tensors)


@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
def test_the_configs_type_follows_the_numbers(models, tmp_path, capsys, key):
    config = {k: v for k, v in config_of(models("qwen3")).items() if k != "dtype"}
    write(tmp_path / "hf", read(models("qwen3")), config | {key: "float32"})
    paths = {name: str(tmp_path / name) for name in ("hf", "mcore", "back", "again")}
    to_mcore = ["--model", paths["hf"], "--out", paths["mcore"], "--dtype", "bf16"]
    assert run(["convert", "hf-to-mcore", *to_mcore]) == 0
    assert f"config.json: {key} is bfloat16, was float32" in capsys.readouterr().out
    to_hf = ["convert", "mcore-to-hf", "--checkpoint", paths["mcore"]]
    assert run([*to_hf, "--out", paths["back"]]) == 0
    assert "note" not in capsys.readouterr().out
    assert config_of(tmp_path / "back") == config | {key: "bfloat16"}
    assert run([*to_hf, "--out", paths["again"], "--dtype", "fp16"]) == 0
    assert config_of(tmp_path / "again") == config | {key: "float16"}
    assert {t.dtype for t in read(tmp_path / "again").values()} == {torch.float16}


def test_both_spellings_of_rotary_settings_are_one_model(models, tmp_path):
    source = models("llama-rope3-tied")
    config = config_of(source)
    parameters = config.pop("rope_parameters")
    old = {"rope_theta": parameters["rope_theta"], "rope_scaling": parameters}
    shapes = []
    for name, settings in (("new", {"rope_parameters": parameters}), ("old", old)):
        write(tmp_path / name, read(source), config | settings)
        hf_to_mcore(tmp_path / name, tmp_path / f"{name}-mcore")
        mcore_to_hf(tmp_path / f"{name}-mcore", tmp_path / f"{name}-back")
        assert config_of(tmp_path / f"{name}-back") == config | settings
        manifest = json.loads((tmp_path / f"{name}-mcore" / "complete.json").read_text())
        shapes.append(manifest["architecture"])
    assert shapes[0] == shapes[1]
    assert shapes[0]["rope"]["scaling"]["factor"] == 8.0


# --- refusals ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"model_type": "qwen4"}, ["unknown model type 'qwen4'", "qwen3", "fsdp2"]),
        ({"rope_parameters": {"rope_type": "spiral", "factor": 2}}, ["rope scaling 'spiral'"]),
        ({"intermediate_size": 80}, ["[96, 64] in the folder", "[80, 64] in the model"]),
        ({"quantization_config": {"quant_method": "awq"}}, ["quantised by 'awq'"]),
        (None, ["no config.json"]),
    ],
)
def test_a_config_that_is_not_the_weights(models, tmp_path, capsys, changes, said):
    config = config_of(models("qwen3")) | (changes or {})
    write(tmp_path / "hf", read(models("qwen3")), config)
    if changes is None:
        (tmp_path / "hf" / "config.json").unlink()
    paths = ["--model", str(tmp_path / "hf"), "--out", str(tmp_path / "mcore")]
    assert run(["convert", "hf-to-mcore", *paths]) == 2
    shown = " ".join(capsys.readouterr().err.replace("│", " ").split())
    assert [text for text in said if text not in shown] == []
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


def test_names_of_a_part_of_a_larger_model(models, tmp_path, capsys):
    """One problem is told, not one a tensor."""
    tensors = {f"language_model.{k}": v for k, v in read(models("qwen3")).items()}
    write(tmp_path / "hf", tensors, config_of(models("qwen3")))
    paths = ["--model", str(tmp_path / "hf"), "--out", str(tmp_path / "mcore")]
    assert run(["convert", "hf-to-mcore", *paths]) == 2
    shown = " ".join(capsys.readouterr().err.replace("│", " ").split())
    assert shown.count("try:") == 1
    assert "begins with language_model., and" in shown


def edited(file: Path, edit) -> None:
    """Change a safetensors header."""
    data = file.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    edit(header)
    text = json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])


NORM = "model.norm.weight"


@pytest.mark.parametrize(
    ("edit", "said"),
    [
        (lambda h: h[NORM].update(dtype="F16"), "not as many as its shape says"),
        (lambda h: h[NORM].update(dtype="I32"), f"{NORM} is stored as I32"),
        (lambda h: h[NORM].update(dtype="F4"), f"{NORM} is stored as F4"),
        (lambda h: h[NORM].update(shape=[8, 8]), f"{NORM} is [8, 8] in the folder and [64]"),
        (lambda h: h[NORM]["data_offsets"].reverse(), "do not follow"),
        (lambda h: h.pop("lm_head.weight"), "do not follow"),
        (lambda h: h.update({NORM: 3}), "damaged"),
    ],
)
def test_a_header_that_is_wrong(models, tmp_path, edit, said):
    write(tmp_path / "hf", read(models("qwen3")), config_of(models("qwen3")))
    edited(tmp_path / "hf" / "model.safetensors", edit)
    with pytest.raises(InputError) as caught:
        hf_to_mcore(tmp_path / "hf", tmp_path / "mcore")
    assert said in str(caught.value)
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


# --- memory -----------------------------------------------------------------------------------

PEAK = """
import sys
from pathlib import Path
from msllm.engine.weights.to_mcore import hf_to_mcore
hf_to_mcore(Path(sys.argv[1]), Path(sys.argv[2]))
lines = Path("/proc/self/status").read_text().splitlines()
(peak,) = [line.split()[1] for line in lines if line.startswith("VmHWM:")]
print(peak)
"""


def test_8_bit_floats_are_not_held_whole(tmp_path):
    """The peak grows by less than a third of the weights' size when they grow tenfold."""
    peaks, sizes = [], []
    for layers in (1, 12):
        folder = large(tmp_path / f"{layers}", layers)
        sizes.append(2 * (folder / "model.safetensors").stat().st_size)  # as bfloat16
        done = subprocess.run(
            [sys.executable, "-c", PEAK, str(folder), str(tmp_path / f"{layers}-mcore")],
            capture_output=True,
            text=True,
            check=True,
        )
        peaks.append(int(done.stdout) * 1024)
    assert sizes[1] - sizes[0] > 600 * 2**20
    assert peaks[1] - peaks[0] < (sizes[1] - sizes[0]) / 3


def large(folder: Path, layers: int) -> Path:
    """A model of 8-bit floats, 29 MB a layer."""
    hidden, inner, heads = 1024, 8192, 8
    config = {
        "model_type": "llama",
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "intermediate_size": inner,
        "vocab_size": 128,
        "tie_word_embeddings": True,
        "quantization_config": {"quant_method": "fp8"},
    }
    shapes = dict.fromkeys(("q_proj", "k_proj", "v_proj", "o_proj"), (hidden, hidden))
    shapes = {f"self_attn.{name}": shape for name, shape in shapes.items()}
    shapes |= dict.fromkeys(("mlp.gate_proj", "mlp.up_proj"), (inner, hidden))
    shapes["mlp.down_proj"] = (hidden, inner)
    tensors = {
        "model.embed_tokens.weight": torch.ones(128, hidden).bfloat16(),
        "model.norm.weight": torch.ones(hidden).bfloat16(),
    }
    for layer in range(layers):
        for name, (rows, columns) in shapes.items():
            full = f"model.layers.{layer}.{name}.weight"
            tensors[full] = torch.ones(rows, columns).to(torch.float8_e4m3fn)
            tensors[f"{full}_scale_inv"] = torch.ones(rows // 128, columns // 128)
        for norm in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"model.layers.{layer}.{norm}.weight"] = torch.ones(hidden).bfloat16()
    return write(folder, tensors, config)
