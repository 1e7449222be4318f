"""Slips of the finger that once hung msllm, reached a worker, or were called a defect of msllm."""

from __future__ import annotations

import fcntl

import pytest

from msllm.cli import app
from msllm.config import RunConfig, write_run
from msllm.engine import launch

PRETRAIN = ["pretrain", "--model", "tiny-qwen3", "--device", "cpu", "--seq-length", "64"]
LONG = "x" * 300


@pytest.fixture(autouse=True)
def own_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setattr(launch, "launch", lambda *_, **__: pytest.fail("workers were started"))
    (tmp_path / "a.jsonl").write_text('{"text": "abc"}\n' * 9)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--data", "1e999999999:mock"], "weights go from 1e-09"),
        (["--data", "1e-999999999:mock"], "weights go from 1e-09"),
        (["--seed", "9" * 23], "must be at most 1,000,000,000,000"),
        (["--steps", "1" + "0" * 30], "must be at most"),
        (["--set", "seed=2024-13-45"], "must be a whole number"),
        (["--set", "train.lr=true"], "but must be a number or text, not true or false"),
        (["--set", "seed=true"], "but must be a number or text, not true or false"),
        (["--data", LONG], "a path is too long"),
        (["--out", LONG], "a path is too long"),
        (["--nodes", "2", "--node-rank", "0", "--out", "o", "--rdzv-endpoint", "127.0.0.1:99999"],
         "is not HOST:PORT"),
    ],
)  # fmt: skip
def test_pretrain(capsys, tmp_path, arguments, says):
    before = set(tmp_path.rglob("*"))
    assert app.run([*PRETRAIN, "--data", "mock", *arguments]) == 2
    assert says in capsys.readouterr().err
    assert set(tmp_path.rglob("*")) == before


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("seed: 2024-13-45", "seed has no plain value: month must be in 1..12"),
        ("seed: !!python/object/apply:os.system [id]", "seed has no plain value"),
        ("model: &a [*a]", "model has no plain value"),
        ("data: &a {paths: *a}", "paths"),
        ("model: " + "[" * 5000, "nested too deep"),
        ("model: [", "not valid YAML"),
    ],
)
def test_files_of_settings(capsys, tmp_path, text, says):
    (tmp_path / "run.yaml").write_text(text)
    assert app.run(["pretrain", "--config", "run.yaml", "--data", "mock"]) == 2
    error = capsys.readouterr().err
    assert says in error
    if "not valid" in says or "nested" in says:
        assert "no model was named" not in error, "the file may well name one"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["preprocess", "--out", "."], "is a folder"),
        (["preprocess", "--out", ""], "is a folder"),
        (["preprocess", "--out", "home/.."], "is a folder"),
        (["preprocess", "--out", "new/"], "'new/' is a folder"),
        (["preprocess", "--out", "a.jsonl/x"], "a.jsonl is a file"),
        (["preprocess", "--out", LONG], "a path is too long"),
        (["preprocess", "--out", "o", "--workers", "100000"], "less than or equal to 256"),
        (["tokenizer", "train", "--vocab-size", "300", "--out", "a.jsonl/x"], "a.jsonl is a file"),
        (["tokenizer", "train", "--vocab-size", "9" * 23, "--out", "o"], "at most 10,000,000"),
    ],
)
def test_data_commands(capsys, tmp_path, arguments, says):
    extra = ["--tokenizer", "none"] if arguments[0] == "preprocess" else []
    before = set(tmp_path.rglob("*"))
    assert app.run([*arguments, "--data", "a.jsonl", *extra]) == 2
    assert says in capsys.readouterr().err
    assert set(tmp_path.rglob("*")) == before


def test_generate(capsys):
    assert app.run(["generate", "--model", "none", "--tokenizer", "t", "--prompt", "a"]) == 2
    assert "is not a run's folder" in capsys.readouterr().err


def test_show_model(capsys):
    assert app.run(["show-model", LONG]) == 2


def test_a_second_run_in_a_live_folder(capsys, tmp_path):
    folder = tmp_path / "x"
    folder.mkdir()
    config = {"model": "tiny-qwen3", "device": "cpu", "data": {"paths": ["mock"]}}
    write_run(RunConfig.model_validate(config), folder / "run.yaml")
    with (folder / ".lock").open("w") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        assert app.run(["pretrain", "--model", "tiny-qwen3", "--out", "x"]) == 2
        assert "a run is going on in x" in capsys.readouterr().err
