"""Files of ranks: as Megatron's models load and write them, there and back, damaged ones named."""

from __future__ import annotations

import json
import shutil
import zipfile
from functools import partial
from pathlib import Path

import pytest
import torch

from msllm.cli.app import run
from msllm.engine.layout import Layout
from msllm.engine.weights import stored_parts
from msllm.engine.weights.contents import inspect
from msllm.engine.weights.mindspeed import mcore_to_mindspeed, mindspeed_to_mcore
from msllm.engine.weights.rank_writer import RankWriter
from msllm.engine.weights.to_mcore import hf_to_mcore
from msllm.engine.weights.verify import verify
from tests.engine.megatron.conftest import run_ranks
from tests.parity.all_cases import CASES

JOBS = {
    "tp2-pp2": (4, {"tp": 2, "pp": 2}, ("qwen3", "llama-rope3-tied", "llama-biases", "glm4")),
    "pp2-vpp2": (2, {"pp": 2, "vpp": 2}, ("qwen2",)),
    "tp2-ep2": (4, {"tp": 2, "ep": 2}, ("mixtral", "minimax_m2", "glm4_moe")),
    "tp2-ep2-etp2": (4, {"tp": 2, "ep": 2, "etp": 2}, ("qwen3_moe",)),
}
EACH = [(job, name) for job, (_, _, names) in JOBS.items() for name in names]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    for name in ("hf", "mcore", "files", "out"):
        (tmp_path_factory.getbasetemp() / "ranks" / name).mkdir(parents=True, exist_ok=True)
    return tmp_path_factory.getbasetemp() / "ranks"


def hf(folder: Path, name: str) -> Path:
    """A case's weights, and beside them those of `mcore`."""
    if not (folder / "hf" / name).exists():
        CASES[name].write(folder / "hf" / name)
        hf_to_mcore(folder / "hf" / name, folder / "mcore" / name)
    return folder / "hf" / name


@pytest.fixture(scope="module")
def exchanged(folder):
    """What Megatron's models made of a job's files, and which they wrote."""

    def at(job: str) -> Path:
        world, sizes, names = JOBS[job]
        files, out = folder / "files" / job, folder / "out" / job
        if not out.exists():
            out.mkdir()
            files.mkdir()
            layout = Layout(**sizes, sequence_parallel=sizes.get("tp", 1) > 1)
            for name in names:
                hf(folder, name)
                source = folder / "mcore" / name
                mcore_to_mindspeed(source, files / name, layout, vocabulary_multiple=1)
            script = Path(__file__).with_name("ranks_case.py")
            where = (str(folder / "hf"), str(files), str(out), json.dumps(sizes))
            run_ranks(world, script, *where, *names)
        return out

    return at


@pytest.mark.distributed
@pytest.mark.parametrize(("job", "name"), EACH)
def test_megatrons_models_load_the_files(exchanged, folder, job, name):
    out, truth = exchanged(job), torch.load(hf(folder, name) / "truth.pt")["logits"]
    ranks = [torch.load(file) for file in sorted(out.glob(f"{name}.[0-9].pt"))]
    # gloo can't gather what the ranks of an expert have unequally much of: nothing is computed
    assert ranks or JOBS[job][1].get("etp", 1) > 1
    for found in ranks:
        first, step = found["sequences"]
        assert float((found["logits"] - truth[first::step]).abs().max()) < 1e-4
    assert verify(hf(folder, name), out / name).same


@pytest.mark.distributed
@pytest.mark.parametrize(("job", "name"), EACH)
def test_files_that_training_wrote_are_read(exchanged, folder, tmp_path, job, name):
    trained = exchanged(job) / f"{name}-trained"
    assert verify(trained, hf(folder, name)).same
    mindspeed_to_mcore(trained, tmp_path / "mcore", model=hf(folder, name))
    assert verify(tmp_path / "mcore", hf(folder, name)).same
    found = inspect(trained)
    assert found.folder.step == 30
    sizes = {"tp": 1, "pp": 1, "vpp": 1, "ep": 1} | JOBS[job][1]
    assert found.layout == {key: sizes[key] for key in ("tp", "pp", "vpp", "ep")}


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("qwen3", {}),
        ("llama-rope3-tied", {"tp": 2, "pp": 4}),
        ("glm4", {"pp": 2, "vpp": 2}),
        ("mixtral", {"tp": 2, "pp": 2, "ep": 4}),
        ("minimax_m2", {"tp": 2, "pp": 2}),
        ("glm4_moe", {"tp": 2, "pp": 2, "ep": 2}),
        ("phimoe", {"tp": 2}),
        ("qwen3_moe", {"tp": 4, "pp": 2, "vpp": 2, "ep": 2, "etp": 4}),
    ],
)
def test_there_and_back_is_bit_for_bit(folder, tmp_path, name, sizes):
    source = hf(folder, name)
    layout = Layout(**sizes, sequence_parallel=sizes.get("tp", 1) > 1)
    mcore_to_mindspeed(folder / "mcore" / name, tmp_path / "ranks", layout)
    assert verify(tmp_path / "ranks", source).same
    mindspeed_to_mcore(tmp_path / "ranks", tmp_path / "back")
    assert verify(tmp_path / "back", folder / "mcore" / name).same
    files = list((tmp_path / "ranks").glob("iter_0000001/mp_rank_*/model_optim_rng.pt"))
    assert len(files) == layout.tp * layout.pp * layout.ep
    first = min(files)
    model = torch.load(first, weights_only=True)["model0" if layout.vpp > 1 else "model"]
    assert len(model["embedding.word_embeddings.weight"]) == -(-131 // (128 * layout.tp)) * 128
    assert zipfile.is_zipfile(first)


# --- refusals ---------------------------------------------------------------------------------


@pytest.fixture
def ranks(folder, tmp_path) -> Path:
    """Files of qwen3, tp2-pp2."""
    hf(folder, "qwen3")
    layout = Layout(tp=2, pp=2, sequence_parallel=True)
    mcore_to_mindspeed(folder / "mcore" / "qwen3", tmp_path / "ranks", layout)
    return tmp_path / "ranks"


def refused(capsys, tmp_path: Path, *arguments: str) -> str:
    before = sorted(tmp_path.rglob("*"))
    assert run(["convert", *arguments]) == 2
    assert sorted(tmp_path.rglob("*")) == before
    return capsys.readouterr().err


def test_missing_and_damaged_files_are_named(ranks, tmp_path, capsys):
    to_mcore = ("mindspeed-to-mcore", "--checkpoint", str(ranks), "--out", str(tmp_path / "out"))
    (ranks / "hf" / "config.json").rename(tmp_path / "config.json")
    assert "does not say which model it is of" in refused(capsys, tmp_path, *to_mcore)
    to_mcore = (*to_mcore, "--model", str(tmp_path))
    file = ranks / "iter_0000001" / "mp_rank_01_000" / "model_optim_rng.pt"
    whole = file.read_bytes()
    file.write_bytes(whole[:1000])
    assert "mp_rank_01_000" in refused(capsys, tmp_path, *to_mcore)
    file.unlink()
    assert "mp_rank_01_000/model_optim_rng.pt is missing" in refused(capsys, tmp_path, *to_mcore)
    shutil.rmtree(file.parent)
    assert "mp_rank_01_000/model_optim_rng.pt is missing" in refused(capsys, tmp_path, *to_mcore)
    shutil.rmtree(ranks / "iter_0000001" / "mp_rank_01_001")
    assert "which does not fit" in refused(capsys, tmp_path, *to_mcore)
    shutil.rmtree(ranks / "iter_0000001" / "mp_rank_00_001")
    said = refused(capsys, tmp_path, *to_mcore)
    assert "the files have 2 layers and the model 4" in said


def test_other_models_are_refused(ranks, tmp_path, capsys):
    config = json.loads((ranks / "hf" / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"attention_bias": True}))
    where = ("--checkpoint", str(ranks), "--model", str(tmp_path), "--out", str(tmp_path / "out"))
    said = refused(capsys, tmp_path, "mindspeed-to-mcore", *where)
    assert "the model has decoder.layers.0.self_attention.linear_qkv.bias" in said
    assert "more of that kind" in said


def test_the_pickles_code_is_not_run(ranks, tmp_path):
    class Evil:
        def __reduce__(self):
            return exec, (f"open({str(tmp_path / 'ran')!r}, 'w')",)

    file = ranks / "iter_0000001" / "mp_rank_00_000" / "model_optim_rng.pt"
    state = torch.load(file, weights_only=True)
    torch.save(state | {"args": Evil()}, file)
    mindspeed_to_mcore(ranks, tmp_path / "back")
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--tp", "3"), "tensor parallel size 3 does not divide"),
        (("--pp", "3"), "3 pipeline chunks do not divide the 4 layers"),
        (("--ep", "2"), "qwen3 models have no experts to spread"),
        (("--vpp", "2"), "needs a pipeline"),
    ],
)
def test_layouts_that_can_not_be(folder, tmp_path, capsys, flags, said):
    hf(folder, "qwen3")
    where = ("--checkpoint", str(folder / "mcore" / "qwen3"), "--out", str(tmp_path / "out"))
    assert said in refused(capsys, tmp_path, "mcore-to-mindspeed", *where, *flags)


def test_latent_attention_is_not_exchanged(folder, tmp_path, capsys):
    hf(folder, "deepseek_v3")
    where = ("--checkpoint", str(folder / "mcore" / "deepseek_v3"), "--out", str(tmp_path / "out"))
    said = refused(capsys, tmp_path, "mcore-to-mindspeed", *where, "--pp", "2")
    assert "is not known" in said


def test_the_commands(folder, tmp_path, capsys):
    source = hf(folder, "mixtral")
    ranks, back = str(tmp_path / "ranks"), str(tmp_path / "back")
    mcore = str(folder / "mcore" / "mixtral")
    sizes = ("--tp", "2", "--ep", "2", "--dtype", "bf16")
    there = ["convert", "mcore-to-mindspeed", "--checkpoint", mcore, "--out", ranks, *sizes]
    assert run(there) == 0
    assert run(there) == 2
    assert "is not empty" in capsys.readouterr().err
    model = ("--model", str(source))
    again = ["convert", "mindspeed-to-mcore", "--checkpoint", ranks, "--out", back, *model]
    assert run(again) == 0
    assert "wrote" in capsys.readouterr().out
    assert verify(source, tmp_path / "back", tolerance=2**-8).same
    wrong = ("mcore-to-mindspeed", "--checkpoint", str(source), "--out", str(tmp_path / "new"))
    assert "is Hugging Face safetensors" in refused(capsys, tmp_path, *wrong)
    wrong = ("mindspeed-to-mcore", "--checkpoint", mcore, "--out", str(tmp_path / "new"))
    assert "is Megatron-core torch_dist" in refused(capsys, tmp_path, *wrong)


def test_an_interrupted_conversion_goes_on(folder, tmp_path, monkeypatch):
    source = hf(folder, "qwen3")
    monkeypatch.setattr(stored_parts, "PART_BYTES", 50_000)
    place, count = RankWriter.place, 0

    def stopped(self, *arguments):
        nonlocal count
        count += 1
        if count == 25:
            raise RuntimeError("pulled the plug")
        place(self, *arguments)

    monkeypatch.setattr(RankWriter, "place", stopped)
    layout = Layout(tp=2, sequence_parallel=True)
    convert = partial(mcore_to_mindspeed, folder / "mcore" / "qwen3", tmp_path / "out", layout)
    with pytest.raises(RuntimeError, match="plug"):
        convert()
    assert [path.name for path in tmp_path.iterdir()] == [".out.partial"]
    first, count = count, 25
    convert()
    assert count - 25 < 47 - first / 2  # parameters of finished parts are not placed again
    assert verify(source, tmp_path / "out").same
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
