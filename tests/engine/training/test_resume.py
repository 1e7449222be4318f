"""What keeps a run from going on, found before it starts; checkpoints hold a word, not weights."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from msllm.cli import app
from msllm.config import RunConfig, write_run
from msllm.engine import launch, preflight
from msllm.engine.data.fingerprint import fingerprint
from msllm.engine.data.indexed import IndexedWriter
from msllm.engine.training import checkpoint_folder
from msllm.engine.training.checkpoint_folder import Checkpoint, Manifest
from msllm.engine.training.run_folder import RunFolder
from msllm.models.resolve import resolve_model


def config(out: Path, **changes: Any) -> RunConfig:
    content = {"model": "tiny-qwen3", "device": "cpu", "data": {"paths": ["mock"]}, "out": out}
    return RunConfig.model_validate({**content, **changes})


def saved(run: RunConfig, step: int, **manifest: Any) -> Checkpoint:
    """A run's folder as it is after a save."""
    assert run.out is not None
    folder = RunFolder(run.out).create()
    write_run(run, folder.config)
    return save(folder, step, **manifest)


def save(folder: RunFolder, step: int, **manifest: Any) -> Checkpoint:
    path = checkpoint_folder.begin(folder.checkpoints, step)
    (path / "weights").write_text("heavy")
    return checkpoint_folder.commit(path, Manifest(step=step, **manifest))


def refusals(run: RunConfig) -> list[str]:
    return [problem.problem for problem in preflight.check_run(run)]


def test_published_weights_are_looked_at_unless_the_run_goes_on(tmp_path):
    start = {"init_from": str(tmp_path / "none")}
    run = config(tmp_path / "x", checkpoint=start)
    missing = f"there is no folder {tmp_path / 'none'}"
    assert missing in refusals(run)
    checkpoint = saved(run, 4)
    assert refusals(run) == []
    assert missing in refusals(config(tmp_path / "x", checkpoint=start | {"resume": "never"}))
    other = config(tmp_path / "y", checkpoint=start | {"resume": str(checkpoint.path)})
    assert refusals(other) == []
    (checkpoint.path / "weights").unlink()
    assert missing in refusals(run)


def pretrain(out: Path, steps: int, *more: str) -> int:
    command = ["pretrain", "--model", "tiny-qwen3", "--device", "cpu", "--data", "mock", "--force"]
    return app.run([*command, "--out", str(out), "--steps", str(steps), *more])


def test_steps_that_are_done_are_not_done_again(tmp_path, capsys, monkeypatch):
    started: list[Any] = []
    monkeypatch.setattr(launch, "launch", lambda *a, **_: started.append(a))
    assert pretrain(tmp_path / "x", 8, "--set", "train.decay_steps=99") == 0
    folder = RunFolder(tmp_path / "x")
    save(folder, 4)
    save(folder, 8)
    before = folder.config.read_bytes()
    assert len(started) == 1
    capsys.readouterr()

    assert pretrain(folder.path, 7) == 2
    error = capsys.readouterr().err
    assert "the run is already at step 8" in error
    assert "at: --steps 7" in error
    assert "give more than 8" in error
    assert pretrain(folder.path, 8) == 0
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", "already at step 8, nothing to do\n")
    assert folder.config.read_bytes() == before
    assert len(started) == 1

    earlier = str(folder.checkpoints / "step-00000004")
    assert pretrain(folder.path, 7, "--resume", earlier) == 0  # from there, there is work to do
    assert pretrain(folder.path, 9) == 0
    assert len(started) == 3


def write(prefix: Path, token: int) -> Path:
    with IndexedWriter(prefix, np.uint16) as writer:
        writer.append(np.full(9000, token, np.uint16), np.full(2, 4500, np.int32))
    return prefix


def test_files_replaced_under_their_names_are_named(tmp_path):
    first, second = write(tmp_path / "a", 1), write(tmp_path / "b", 2)
    data = {"paths": [str(first)], "valid_paths": [str(second)]}
    run = config(tmp_path / "x", data=data)
    checkpoint = saved(run, 4, extra={"inputs": fingerprint(run.data)})
    assert refusals(run) == []
    write(second, 3)
    (problem,) = preflight.check_run(run)
    assert problem.problem == f"changed since the run was saved at step 4: {second}.bin"
    assert problem.where == f"--out {run.out}"
    assert "restore" in problem.hint
    assert "another --out" in problem.hint
    again = {"checkpoint": {"resume": str(checkpoint.path)}, "data": data}
    assert refusals(config(tmp_path / "x", **again)) == [problem.problem]
    assert refusals(config(tmp_path / "y", **again)) == []  # another run may take other files
    write(second, 2)
    assert refusals(run) == []


def test_checkpoints_without_marks_are_gone_on_from(tmp_path):
    prefix = write(tmp_path / "a", 1)
    run = config(tmp_path / "x", data={"paths": [str(prefix)]})
    saved(run, 4, extra={"optimizer": "adamw"})
    write(prefix, 2)
    assert refusals(run) == []


def test_a_models_folder_must_give_the_same_shape(tmp_path):
    shape = {
        "model_type": "qwen3", "hidden_size": 64, "num_hidden_layers": 4,
        "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 8,
        "intermediate_size": 96, "vocab_size": 300, "max_position_embeddings": 8192,
    }  # fmt: skip
    file = tmp_path / "config.json"
    file.write_text(json.dumps(shape))
    run = config(tmp_path / "x", model=str(tmp_path))
    architecture = asdict(resolve_model(run.model).architecture)
    del architecture["vocab_size"]  # as an earlier msllm, which knew less of a shape
    saved(run, 4, architecture=architecture)
    file.write_text(json.dumps(shape | {"torch_dtype": "float32", "vocab_size": 400}))
    assert refusals(run) == []
    file.write_text(json.dumps(shape | {"rope_theta": 5000.0}))
    (said,) = refusals(run)
    assert f"the config.json in {tmp_path} (rope.theta was 10000.0 and now is 5000.0)" in said
