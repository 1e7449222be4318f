from pathlib import Path

import pytest

from msllm.engine.training.run_folder import RunFolder
from msllm.errors import InputError


def test_names_are_those_of_the_contract(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    names = {
        p.relative_to(tmp_path).as_posix()
        for p in (run.config, run.metrics, run.checkpoints, run.tensorboard, run.hf, run.logs)
    }
    assert names == {"run.yaml", "metrics.jsonl", "checkpoints", "tensorboard", "hf", "logs"}
    assert run.rank_log(12) == tmp_path / "logs" / "rank_0012.log"


def test_naming_a_folder_makes_nothing(tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "run")
    assert not run.holds_run()
    assert not run.path.exists()


def test_a_created_folder_holds_no_run_until_something_is_written(tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "a" / "run").create()
    assert run.logs.is_dir()
    assert run.checkpoints.is_dir()
    assert not run.holds_run()


@pytest.mark.parametrize("name", ["run.yaml", "metrics.jsonl", "checkpoints/step-00000001"])
def test_what_a_run_leaves_is_seen(tmp_path: Path, name: str) -> None:
    run = RunFolder(tmp_path / "run").create()
    (run.path / name).write_text("")
    assert run.holds_run()


def test_an_impossible_place_is_an_input_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="--out"):
        RunFolder(tmp_path / "file" / "run").create()
