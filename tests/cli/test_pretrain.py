"""`msllm pretrain`: what a dry run shows, and runs that end well."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import math
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from msllm.cli import app, pretrain
from msllm.config import read_run
from msllm.engine import launch
from msllm.models.resolve import resolve_model
from tests.cli.conftest import BASE, model_folder, refused

pytestmark = pytest.mark.usefixtures("own_folder")


# --- dry runs ---------------------------------------------------------------------------------


@pytest.mark.usefixtures("no_workers")
def test_a_dry_run_shows_all_and_writes_nothing(capsys, tmp_path):
    status = app.run(
        [*BASE, "--npus", "4", "--pp", "2", "--tp", "2", "--lr", "2e-5", "--steps", "7",
         "--set", "seed=3", "--dry-run"]
    )  # fmt: skip
    assert status == 0
    out = capsys.readouterr().out
    assert re.search(r"train.lr +2e-05 +--lr\n", out)
    assert re.search(r"seed +3 +--set\n", out)
    assert re.search(r"train.weight_decay +0.1 +recipe", out)
    assert re.search(r"dtype +fp32 +derived", out)
    assert re.search(r"train.eps +1e-08 +default\n", out)
    assert "4 processes: tp 2  pp 2  vpp 1  cp 1  ep 1  etp 1  dp 1" in out
    last = resolve_model("tiny-qwen3").architecture.num_layers - 1
    assert f"stage 0: layers 0-{last // 2} + embedding" in out
    assert f"stage 1: layers {last // 2 + 1}-{last} + head" in out
    assert re.search(r"optimizer state +[\d.]+ MiB", out)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("no_workers")
def test_a_dry_run_of_what_cannot_work_shows_both(capsys):
    assert app.run([*BASE, "--npus", "3", "--tp", "3", "--dry-run"]) == 2
    captured = capsys.readouterr()
    assert "3 processes: tp 3" in captured.out
    assert "does not divide the 8 attention heads" in captured.err


@pytest.mark.usefixtures("no_workers")
@pytest.mark.skipif(importlib.util.find_spec("torch_npu") is not None, reason="torch_npu is here")
def test_a_plan_for_npus_is_made_where_there_are_none(capsys, monkeypatch):
    arguments = ["pretrain", "--model", "qwen3-8b", "--device", "npu", "--npus", "8"]
    monkeypatch.setattr(sys, "argv", ["msllm", *arguments, "--dry-run"])
    assert app.run([*arguments, "--data", "mock", "--dry-run"]) == 0
    out = capsys.readouterr().out
    (sizes,) = re.findall(r"processes: tp (\d+)  pp (\d+)", out)
    exact = f"msllm plan --model qwen3-8b --device npu --npus 8 --tp {sizes[0]}"
    assert exact + (f" --pp {sizes[1]}" if sizes[1] != "1" else "") in out
    assert re.search(r"dtype +bf16 ", out)
    assert "memory of a device (npu)" in out
    assert out.splitlines()[-2] == "this machine can't run it"
    assert "torch_npu is not installed" in out.splitlines()[-1]
    assert app.run([*arguments, "--data", "mock"]) == 2


@pytest.mark.usefixtures("no_workers")
@pytest.mark.parametrize("own", [[], ["--node-rank", "1"], ["--node-rank=1"]])
def test_a_plan_names_the_command_of_each_machine(capsys, monkeypatch, own):
    arguments = [*BASE, "--nodes", "2", "--out", "x", *own, "--dry-run"]
    monkeypatch.setattr(sys, "argv", ["msllm", *arguments])
    assert app.run(arguments) == 0
    out = capsys.readouterr().out
    for rank in (0, 1):
        (line,) = [row for row in out.splitlines() if f"machine {rank}: msllm pretrain" in row]
        assert line.count("--node-rank") == 1
        assert f"--node-rank {rank} --rdzv-endpoint HOST:PORT" in line


def test_a_refusal_waits_for_no_torch():
    code = (
        "import sys\n"
        "from msllm.cli import app\n"
        f"status = app.run({[*BASE[:3], '--data', 'mock', '--npus', '3', '--tp', '3']})\n"
        "print(status, 'torch' in sys.modules)"
    )
    version = importlib.metadata.version("torch")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=900)
    assert "does not divide the 8 attention heads" in done.stderr
    if version.endswith("+cpu"):  # else torch alone knows whether there is a GPU
        assert done.stdout == "2 False\n"


def test_help_shows_every_flag_with_its_meaning():
    from msllm.cli.flags import FLAGS

    command = app.COMMANDS["pretrain"].load("pretrain")
    declared = {option: p for p in command.params for option in p.opts}
    assert all(declared[flag.name].help for flag in FLAGS)
    assert {"--config", "--set", "--dry-run"} <= set(declared)


def test_the_next_free_folder(tmp_path):
    assert pretrain.free_folder(tmp_path, "m") == tmp_path / "m-1"
    for name in ("m-1", "m-9", "m-x", "other-12"):
        (tmp_path / name).mkdir()
    assert pretrain.free_folder(tmp_path, "m") == tmp_path / "m-10"


# --- real runs --------------------------------------------------------------------------------


def msllm(*arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "msllm", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.distributed
def test_a_run_from_raw_text_to_its_end_and_on(tmp_path, tokenizer, capsys):
    model = model_folder(tmp_path / "model")
    (tmp_path / "a.txt").write_text("the quick brown fox jumps over the lazy dog. " * 300)
    command = [
        "pretrain", "--model", "model", "--data", "a.txt", "--tokenizer", str(tokenizer),
        "--device", "cpu", "--npus", "2", "--tp", "2", "--seq-length", "16", "--global-batch", "4",
        "--set", "train.decay_steps=10", "--steps",
    ]  # fmt: skip
    first = msllm(*command, "2")
    _, error = first.communicate(timeout=900)
    assert first.returncode == 0, error
    folder = tmp_path / "runs" / "model-1"
    again = read_run(folder / "run.yaml")
    assert again.model == str(model)
    assert again.data.paths[0].startswith(str(tmp_path / "home"))
    assert {p.name for p in folder.iterdir()} >= {
        "run.yaml", "metrics.jsonl", "logs", "checkpoints",
    }  # fmt: skip
    assert (folder / "logs" / "rank_0001.log").exists()
    second = msllm(*command, "3", "--out", str(folder))
    _, error = second.communicate(timeout=900)
    assert second.returncode == 0, error
    steps = [
        json.loads(line)["step"] for line in (folder / "metrics.jsonl").read_text().splitlines()
    ]
    assert steps == [1, 2, 3]

    more = [*command, "4", "--out", str(folder)]
    binary = Path(f"{again.data.paths[0]}.bin")
    tokens = binary.read_bytes()
    binary.write_bytes(tokens[2:] + tokens[:2])
    assert f"saved at step 3: {binary}\n" in refused(capsys, base=more)
    binary.write_bytes(tokens)
    (tmp_path / "a.txt").write_text("the lazy dog sleeps. " * 300)
    assert "`a.txt` is not what the run was started with" in refused(capsys, base=more)
    (tmp_path / "a.txt").write_text("the quick brown fox jumps over the lazy dog. " * 300)
    model_folder(model, rope_theta=5000.0)
    assert "rope.theta was 10000.0 and now is 5000.0" in refused(capsys, base=more)


@pytest.mark.distributed
def test_a_run_from_published_weights_goes_on_without_them(tmp_path, capsys):
    """The published head is zero, so that the loss is that of 300 equal chances."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    model = model_folder(tmp_path / "model", initializer_range=0.3)
    published = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model))
    torch.nn.init.zeros_(published.lm_head.weight)
    published.save_pretrained(model)
    command = [
        "pretrain", "--model", "model", "--data", "mock", "--device", "cpu", "--seq-length", "16",
        "--global-batch", "4", "--init-from", "model", "--set", "train.decay_steps=10",
    ]  # fmt: skip
    first = msllm(*command, "--steps", "2", "--out", "x", "--npus", "2", "--tp", "2")
    _, error = first.communicate(timeout=900)
    assert first.returncode == 0, error
    for file in model.glob("*.safetensors"):
        file.unlink()
    second = msllm(*command, "--steps", "3", "--out", "x")
    _, error = second.communicate(timeout=900)
    assert second.returncode == 0, error
    lines = (tmp_path / "x" / "metrics.jsonl").read_text().splitlines()
    losses = [json.loads(line)["loss"] for line in lines]
    assert losses[0] == pytest.approx(math.log(300), rel=1e-6)
    assert len(losses) == 3
    assert app.run([*command, "--out", "y"]) == 2
    assert "holds no weights" in capsys.readouterr().err
    assert not (tmp_path / "y").exists()
    theirs = json.loads((model / "config.json").read_text())
    rope = {"rope_parameters": {"rope_type": "default", "rope_theta": 777.0}}
    (model / "config.json").write_text(json.dumps(theirs | rope))
    third = msllm(*command[:-1], "train.lr=1e-30", "--init-from", "x", "--steps", "1", "--out", "z")
    _, error = third.communicate(timeout=900)
    assert third.returncode == 0, error
    assert "rope.theta was" in error
    again = json.loads((tmp_path / "z" / "metrics.jsonl").read_text().splitlines()[0])["loss"]
    assert again < losses[0]


@pytest.mark.distributed
def test_ctrl_c_saves_and_says_so(tmp_path):
    run = msllm(
        "pretrain", "--model", str(model_folder(tmp_path / "model")), "--data", "mock",
        "--device", "cpu", "--npus", "1", "--seq-length", "16", "--steps", "1000000",
        "--out", "run",
    )  # fmt: skip
    metrics, end = tmp_path / "run" / "metrics.jsonl", time.monotonic() + 120
    while not (metrics.exists() and metrics.stat().st_size):
        assert time.monotonic() < end
        assert run.poll() is None
        time.sleep(0.05)
    run.send_signal(signal.SIGINT)
    _, error = run.communicate(timeout=900)
    assert run.returncode == 130, error
    assert "the workers have saved" in error
    done = len(metrics.read_text().splitlines())
    assert (tmp_path / "run" / "checkpoints" / f"step-{done:08d}").is_dir()


def test_a_run_is_repeated_from_its_file(tmp_path, monkeypatch):
    started = []
    monkeypatch.setattr(launch, "launch", lambda *a, **_: started.append(a))
    assert app.run([*BASE, "--lr", "2e-5", "--out", "one", "--steps", "7"]) == 0
    assert app.run(["pretrain", "--config", "one/run.yaml", "--out", "two"]) == 0
    one, two = (yaml.safe_load((tmp_path / n / "run.yaml").read_text()) for n in ("one", "two"))
    assert one.pop("out") == str(tmp_path / "one")
    assert two.pop("out") == str(tmp_path / "two")
    assert one == two
