"""`msllm pretrain`: what bad input gets, what a dry run shows, and runs that end well."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import yaml

from msllm.cli import app, pretrain
from msllm.config import RunConfig, read_run, write_run
from msllm.engine import host_memory, launch
from msllm.engine.data.indexed import IndexedWriter
from msllm.engine.data.train_tokenizer import train_tokenizer
from msllm.models.resolve import resolve_model


@pytest.fixture(autouse=True)
def own_folder(tmp_path, monkeypatch):
    """Run in an empty folder, with a cache of its own, and outside any scheduler."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    for name in ("SLURM_NODEID", "PET_NNODES", "PET_NODE_RANK", "MASTER_ADDR", "MSLLM_DEBUG"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


@pytest.fixture
def no_workers(monkeypatch):
    """Fail if workers would be started."""

    def refuse(*_, **__):
        raise AssertionError("workers were started")

    monkeypatch.setattr(launch, "launch", refuse)


BASE = ["pretrain", "--model", "tiny-qwen3", "--device", "cpu", "--data", "mock"]


def model_folder(path: Path, **changes) -> Path:
    """A folder with a small Qwen3's config.json."""
    config = {
        "model_type": "qwen3", "hidden_size": 64, "num_hidden_layers": 4,
        "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 8,
        "intermediate_size": 96, "vocab_size": 300, "max_position_embeddings": 128,
    }  # fmt: skip
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps({**config, **changes}))
    return path


def prefix(path: Path, documents=((1, 2, 3) * 40,)) -> Path:
    with IndexedWriter(path, np.uint16) as writer:
        for document in documents:
            writer.append(np.array(document, np.uint16), np.array([len(document)], np.int32))
    return path


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("tok")
    text = folder / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog. " * 50)
    train_tokenizer([text], 290, folder / "tok")
    return folder / "tok"


def refused(capsys, *arguments: str, base=BASE) -> str:
    """Run a command that must be refused, leaving nothing behind; gives what it says."""
    before = sorted(Path().rglob("*"))
    status = app.run([*base, *arguments])
    captured = capsys.readouterr()
    assert status == 2, captured
    assert sorted(Path().rglob("*")) == before
    assert captured.out == ""
    return captured.err


@pytest.mark.usefixtures("no_workers")
@pytest.mark.parametrize(
    ("arguments", "texts"),
    [
        (["--model", "qwen3-8bb"], ["unknown model 'qwen3-8bb'", "closest are qwen3-8b,"]),
        (["--model", "./none"], ["there is no folder `./none`"]),
        (["--npus", "3", "--tp", "3"],
         ["tensor parallel size 3 does not divide the 8 attention heads", "at: --tp 3",
          "try: use 1, 2, 4 or 8"]),
        (["--npus", "4", "--tp", "2", "--pp", "3"],
         ["tensor x pipeline x context parallel = 2 x 3 x 1 = 6 does not divide the 4 processes",
          "it may be 1, 2 or 4"]),
        (["--model", "tiny-qwen3-moe", "--npus", "3", "--ep", "3"],
         ["expert parallel size 3 does not divide the 8 experts", "use 1, 2, 4 or 8"]),
        (["--micro-batch", "3", "--global-batch", "10"],
         ["a global batch of 10 is no multiple of micro batch x data parallel size = 3 x 1 = 3",
          "try: use 9 or 12"]),
        (["--npus", "4", "--tp", "1", "--global-batch", "2", "--micro-batch", "1"],
         ["a global batch of 2 is smaller than the 4 data parallel ranks", "at: --global-batch 2"]),
        (["--npus", "4", "--pp", "2", "--vpp", "2", "--global-batch", "6", "--micro-batch", "1"],
         ["an interleaved pipeline of 2 stages needs a multiple of 2 micro-batches, not 3",
          "use --global-batch 4 or 8"]),
        (["--vpp", "2"], ["virtual pipeline size 2 needs a pipeline"]),
        (["--npus", "9", "--pp", "9"], ["9 pipeline chunks", "are more than the"]),
        (["--npus", "2", "--pp", "2", "--pp-layout", "3,4"], ["has 2 chunks and 7 layers"]),
        (["--npus", "2", "--cp", "2"], ["context parallelism is not part of this version"]),
        (["--npus", "2", "--tp", "2", "--seq-length", "127"],
         ["sequences of 127 tokens can't be cut into 2 parts", "use a multiple of 2"]),
        (["--backend", "fsdp2"], ["the FSDP2 backend is not part of this version"]),
        (["--model", "mamba2-2.7b", "--npus", "1", "--force"],
         ["is listed, but msllm can't train it yet: missing are", "state space"]),
        (["--device", "npu"], ["torch_npu is not installed", "at: --device npu"]),
        (["--device", "cuda"], ["at: --device cuda"]),
        (["--device", "tpu"],
         ["device is 'tpu', but must be one of 'auto', 'npu', 'cuda' or 'cpu'"]),
        (["--data", "nowhere"], ["`nowhere` not found"]),
        (["--data", "0.5:mock", "mock"], ["has no weight but others have"]),
        (["--lr", "1e-5", "--min-lr", "1e-4"], ["would end at 0.0001, above its peak 1e-05"]),
        (["--steps", "5", "--warmup-steps", "5"], ["5 steps of warm-up leave nothing"]),
        (["--set", "train.lr_schedule=wsd", "train.wsd_decay_steps=195", "--steps", "200"],
         ["10 steps of warm-up and 195 of decay are more than the schedule's 200 steps"]),
        (["--set", "train.overlap_param_gather=true"],
         ["needs the distributed optimizer and overlapped gradient reduction"]),
        (["--set", "train.recompute=selective", "train.recompute_modules=[]"],
         ["selective recompute of nothing"]),
        (["--resume", "no/such"], ["at: --resume no/such"]),
        (["--nodes", "2", "--out", "x"],
         ["nothing says which of them this is", "nothing says where the first one is"]),
        (["--nodes", "2", "--node-rank", "0", "--rdzv-endpoint", "h:1"],
         ["several machines need one folder for the run"]),
        (["--set", "train.num-steps=3"],
         ["unknown setting train.num-steps", "it is called train.steps here"]),
        (["--set", "lr=3"], ["unknown setting lr", "write train.lr"]),
        (["--steps", "many"], ["train.steps is 'many', but must be a whole number"]),
        (["--config", "none.yaml"], ["cannot read it: No such file", "at: --config none.yaml"]),
        (["--learning-rate", "3"], ["unknown option --learning-rate"]),
    ],
)  # fmt: skip
def test_bad_input(capsys, arguments, texts):
    error = refused(capsys, *arguments)
    for text in texts:
        assert text in error


@pytest.mark.usefixtures("no_workers")
def test_muon_says_what_it_needs(capsys, monkeypatch):
    import importlib.util

    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda n: None if n == "emerging_optimizers" else find(n)
    )
    error = refused(capsys, "--optimizer", "muon")
    assert "emerging-optimizers, which is not installed" in error
    assert ("needs Python 3.12" in error) == (sys.version_info < (3, 12))


@pytest.mark.usefixtures("no_workers")
def test_muon_has_no_grouped_experts_to_recompute(capsys):
    error = refused(
        capsys, "--optimizer", "muon", "--recompute", "selective",
        "--set", "train.recompute_modules=[moe_act]",
    )  # fmt: skip
    assert "muon takes experts one by one" in error
    assert "leave out moe_act" in error


@pytest.mark.usefixtures("no_workers")
def test_all_problems_come_together(capsys):
    error = refused(
        capsys, "--tp", "3", "--npus", "3", "--data", "nowhere", "--optimizer", "muon",
        "--vpp", "2", "--set", "train.lrr=3", "--out", ".", "--seed", "x",
    )  # fmt: skip
    for text in (
        "unknown setting train.lrr", "seed is 'x'", "does not divide the 8 attention heads",
        "needs a pipeline", "`nowhere` not found", "Muon",
    ):  # fmt: skip
        assert text in error
    assert re.match(r"\d+ errors:", error)


@pytest.mark.usefixtures("no_workers")
def test_more_processes_than_the_machine_can_hold(capsys, monkeypatch):
    monkeypatch.setattr(host_memory, "available", lambda: 2 << 30)
    error = refused(capsys, "--npus", "4", "--tp", "1")
    assert re.search(
        r"needs about 4 processes of [\d.]+ GiB = [\d.]+ GiB, and 2.00 GiB are free", error
    )
    assert "optimizer state" in error
    assert "or --force" in error


def test_force_starts_it_all_the_same(monkeypatch):
    monkeypatch.setattr(host_memory, "available", lambda: 2 << 30)
    started = []
    monkeypatch.setattr(launch, "launch", lambda *a, **_: started.append(a))
    assert app.run([*BASE, "--npus", "4", "--tp", "1", "--force"]) == 0
    assert started[0][0] == pretrain.WORKER
    assert started[0][2].npus == 4


@pytest.mark.usefixtures("no_workers")
class TestData:
    def base(self, path, *data) -> list[str]:
        model = model_folder(path / "model")
        return ["pretrain", "--model", str(model), "--device", "cpu", "--seq-length", "16",
                "--npus", "1", "--data", *map(str, data)]  # fmt: skip

    def test_missing_binary(self, capsys, tmp_path):
        data = prefix(tmp_path / "d")
        Path(f"{data}.bin").unlink()
        assert f"{data}.bin" in refused(capsys, base=self.base(tmp_path, data))

    def test_truncated_binary(self, capsys, tmp_path):
        data = prefix(tmp_path / "d")
        os.truncate(f"{data}.bin", 100)
        assert f"{data}.bin" in refused(capsys, base=self.base(tmp_path, data))

    def test_truncated_index(self, capsys, tmp_path):
        data = prefix(tmp_path / "d")
        os.truncate(f"{data}.idx", 30)
        assert f"{data}.idx" in refused(capsys, base=self.base(tmp_path, data))

    def test_tokens_outside_the_vocabulary(self, capsys, tmp_path):
        data = prefix(tmp_path / "d", [[1, 2, 400] * 20])
        error = refused(capsys, base=self.base(tmp_path, data))
        assert "holds token 400, outside the model's vocabulary of 300" in error

    def test_too_little_data(self, capsys, tmp_path):
        error = refused(capsys, base=self.base(tmp_path, prefix(tmp_path / "d", [[1, 2]])))
        assert "fewer than one sample of 16 tokens" in error

    def test_raw_data_without_a_tokenizer(self, capsys, tmp_path):
        (tmp_path / "a.txt").write_text("text")
        assert "needs a tokenizer" in refused(capsys, base=self.base(tmp_path, "a.txt"))

    def test_an_empty_file(self, capsys, tmp_path, tokenizer):
        (tmp_path / "a.jsonl").write_text("")
        base = [*self.base(tmp_path, "a.jsonl"), "--tokenizer", str(tokenizer)]
        assert "a.jsonl" in refused(capsys, base=base)

    def test_an_empty_folder(self, capsys, tmp_path, tokenizer):
        (tmp_path / "texts").mkdir()
        base = [*self.base(tmp_path, "texts"), "--tokenizer", str(tokenizer)]
        assert "texts" in refused(capsys, base=base)

    def test_a_tokenizer_that_is_too_large(self, capsys, tmp_path, tokenizer):
        base = self.base(tmp_path, prefix(tmp_path / "d"))
        model_folder(tmp_path / "model", vocab_size=200)
        error = refused(capsys, "--tokenizer", str(tokenizer), base=base)
        assert "the tokenizer has 290 ids, the model's vocabulary only 200" in error

    def test_a_tokenizer_without_an_end(self, capsys, tmp_path, tokenizer):
        import shutil

        own = tmp_path / "tok"
        shutil.copytree(tokenizer, own)
        for name in ("tokenizer_config.json", "special_tokens_map.json"):
            if (own / name).exists():
                config = json.loads((own / name).read_text())
                config = {
                    k: v
                    for k, v in config.items()
                    if k not in ("eos_token", "extra_special_tokens")
                }
                (own / name).write_text(json.dumps(config))
        (tmp_path / "a.txt").write_text("text " * 100)
        error = refused(capsys, base=[*self.base(tmp_path, "a.txt"), "--tokenizer", str(own)])
        assert "end-of-" in error or "EOS" in error

    def test_no_tokenizer_folder(self, capsys, tmp_path):
        base = [*self.base(tmp_path, prefix(tmp_path / "d")), "--tokenizer", "nowhere"]
        assert "nowhere" in refused(capsys, base=base)

    def test_no_data(self, capsys, tmp_path):
        base = self.base(tmp_path)[:-1]
        assert "no training data" in refused(capsys, base=base)


@pytest.mark.usefixtures("no_workers")
class TestFolder:
    def earlier(self, folder: Path, **changes) -> None:
        """A run's folder as these commands would have made it."""
        content = {
            "model": "tiny-qwen3",
            "device": "cpu",
            "dtype": "fp32",
            "data": {"paths": ["mock"], "seq_length": 256},
            "train": {
                "lr": 1e-3, "min_lr": 1e-4, "micro_batch": 4, "global_batch": 16, "steps": 200,
                "warmup_steps": 10,
            },
        }  # fmt: skip
        folder.mkdir()
        write_run(RunConfig.model_validate({**content, **changes}), folder / "run.yaml")

    def test_something_else(self, capsys, tmp_path):
        (tmp_path / "x").mkdir()
        (tmp_path / "x" / "thesis.txt").write_text("precious")
        assert "holds something that is no run" in refused(capsys, "--out", "x")

    def test_a_file(self, capsys, tmp_path):
        (tmp_path / "x").write_text("precious")
        assert "x is a file" in refused(capsys, "--out", "x")

    def test_another_run(self, capsys, tmp_path):
        self.earlier(tmp_path / "x", seed=7, model="tiny-llama")
        error = refused(capsys, "--out", "x")
        assert "holds another run: model was 'tiny-llama' and now is 'tiny-qwen3'" in error
        assert "seed was 7 and now is 1234" in error
        assert "at: --out x" in error

    def test_a_run_where_none_may_be(self, capsys, tmp_path):
        self.earlier(tmp_path / "x")
        assert "holds a run already" in refused(capsys, "--out", "x", "--resume", "never")

    def test_a_broken_run(self, capsys, tmp_path):
        self.earlier(tmp_path / "x")
        (tmp_path / "x" / "run.yaml").write_text("model: [")
        assert "cannot read it" in refused(capsys, "--out", "x")


def test_the_same_run_goes_on_with_more_steps_and_another_layout(tmp_path, monkeypatch):
    TestFolder().earlier(tmp_path / "x")
    started = []
    monkeypatch.setattr(launch, "launch", lambda *a, **_: started.append(a))
    status = app.run([*BASE, "--out", "x", "--steps", "300", "--npus", "2", "--tp", "2"])
    assert status == 0
    assert started
    assert read_run(tmp_path / "x" / "run.yaml").train.steps == 300


def test_what_is_not_given_again_stays_as_it_was(capsys, tmp_path, monkeypatch):
    """Also what was derived from the former number of steps: the warm-up."""
    monkeypatch.setattr(launch, "launch", lambda *_, **__: None)
    first = [*BASE, "--out", "x", "--lr", "2e-5", "--seq-length", "64", "--global-batch", "6"]
    assert app.run([*first, "--steps", "3"]) == 0
    before = read_run(tmp_path / "x" / "run.yaml")
    assert app.run(["pretrain", "--model", "tiny-qwen3", "--out", "x", "--steps", "900"]) == 0
    after = read_run(tmp_path / "x" / "run.yaml")
    assert after.data == before.data
    assert after.train == before.train.model_copy(update={"steps": 900})
    assert app.run([*BASE, "--out", "x", "--lr", "3e-5"]) == 2
    assert "train.lr was 2e-05 and now is 3e-05" in capsys.readouterr().err


def test_the_kind_of_optimizer_state_is_part_of_a_run(capsys, tmp_path):
    TestFolder().earlier(tmp_path / "x")
    setting = "layout.distributed_optimizer"
    error = refused(capsys, "--out", "x", "--set", f"{setting}=false")
    assert f"{setting} was True and now is False" in error


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
def test_a_plan_for_npus_is_made_where_there_are_none(capsys):
    arguments = ["pretrain", "--model", "qwen3-8b", "--device", "npu", "--npus", "8"]
    assert app.run([*arguments, "--data", "mock", "--dry-run"]) == 0
    out = capsys.readouterr().out
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
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
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
    _, error = first.communicate(timeout=240)
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
    _, error = second.communicate(timeout=240)
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
    _, error = first.communicate(timeout=240)
    assert first.returncode == 0, error
    for file in model.glob("*.safetensors"):
        file.unlink()
    second = msllm(*command, "--steps", "3", "--out", "x")
    _, error = second.communicate(timeout=240)
    assert second.returncode == 0, error
    lines = (tmp_path / "x" / "metrics.jsonl").read_text().splitlines()
    losses = [json.loads(line)["loss"] for line in lines]
    assert losses[0] == pytest.approx(math.log(300), rel=1e-6)
    assert len(losses) == 3
    assert app.run([*command, "--out", "y"]) == 2
    assert "there are no weights in the folder" in capsys.readouterr().err
    assert not (tmp_path / "y").exists()


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
    _, error = run.communicate(timeout=120)
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
