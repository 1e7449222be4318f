"""What keeps a run from going on, found before it starts; checkpoints hold a word, not weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from msllm.config import RunConfig, write_run
from msllm.engine import preflight
from msllm.engine.training import checkpoint_folder
from msllm.engine.training.checkpoint_folder import Checkpoint, Manifest
from msllm.engine.training.run_folder import RunFolder


def config(out: Path, **changes: Any) -> RunConfig:
    content = {"model": "tiny-qwen3", "device": "cpu", "data": {"paths": ["mock"]}, "out": out}
    return RunConfig.model_validate({**content, **changes})


def saved(run: RunConfig, step: int, **manifest: Any) -> Checkpoint:
    """A run's folder as it is after a save."""
    assert run.out is not None
    folder = RunFolder(run.out).create()
    write_run(run, folder.config)
    path = checkpoint_folder.begin(folder.checkpoints, step)
    (path / "weights").write_text("heavy")
    return checkpoint_folder.commit(path, Manifest(step=step, **manifest))


def refusals(run: RunConfig) -> list[str]:
    return [problem.problem for problem in preflight.check_run(run)]


def test_published_weights_are_looked_at_unless_the_run_goes_on(tmp_path):
    start = {"init_from": str(tmp_path / "none")}
    run = config(tmp_path / "x", checkpoint=start)
    missing = "there are no weights in the folder"
    assert missing in refusals(run)
    checkpoint = saved(run, 4)
    assert refusals(run) == []
    assert missing in refusals(config(tmp_path / "x", checkpoint=start | {"resume": "never"}))
    other = config(tmp_path / "y", checkpoint=start | {"resume": str(checkpoint.path)})
    assert refusals(other) == []
    (checkpoint.path / "weights").unlink()
    assert missing in refusals(run)
