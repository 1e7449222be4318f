"""RunConfig: values one by one, unknown keys, and the file of a run."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from pydantic import ValidationError

from msllm.cli.setting_names import PATHS
from msllm.config import RunConfig, read_run, write_run


def test_every_setting_says_what_it_is():
    for path, field in PATHS.items():
        assert field.description, path
        assert len(field.description) < 120, path


def test_every_default_is_right_by_its_own_check():
    config = RunConfig(model="m")
    assert RunConfig.model_validate(config.model_dump(mode="json")) == config


@pytest.mark.parametrize(
    "content",
    [
        {"model": "m", "learning_rate": 1},
        {"model": "m", "train": {"num_steps": 1}},
        {"model": "m", "train": {"lr": 0}},
        {"model": "m", "train": {"lr": float("nan")}},
        {"model": "m", "train": {"lr": float("inf")}},
        {"model": "m", "train": {"beta1": 1.0}},
        {"model": "m", "train": {"steps": 0}},
        {"model": "m", "train": {"steps": 1.5}},
        {"model": "m", "data": {"valid_fraction": 1.1}},
        {"model": "m", "layout": {"tp": 0}},
        {"model": "m", "backend": "megatron"},
        {},
    ],
)
def test_wrong_values_are_refused(content):
    with pytest.raises(ValidationError):
        RunConfig.model_validate(content)


@pytest.mark.parametrize(
    "path",
    [path for path, field in PATHS.items() if "float" in str(field.annotation)],
)
def test_numbers_with_exponents_need_no_dot(path):
    """YAML 1.1 reads `2e-5` as text."""
    section, _, name = path.rpartition(".")
    content = yaml.safe_load(f"{{model: m, {section}: {{{name}: 2e-5}}}}")
    assert isinstance(content[section][name], str)
    assert getattr(getattr(RunConfig.model_validate(content), section), name) == 2e-5


def test_a_config_does_not_change():
    config = RunConfig(model="m")
    with pytest.raises(ValidationError):
        config.train.lr = 1.0


def test_a_runs_file_holds_all_of_it(tmp_path):
    config = RunConfig.model_validate(
        {"model": "m", "out": "x", "train": {"lr": 2e-5}, "data": {"paths": ["ä b", "c"]}}
    )
    path = tmp_path / "run.yaml"
    write_run(config, path)
    assert read_run(path) == config
    assert [p.name for p in tmp_path.iterdir()] == ["run.yaml"]
    content = yaml.safe_load(path.read_text(encoding="utf-8"))
    assert set(content) == set(RunConfig.model_fields)


def test_a_runs_file_that_cannot_be_written_leaves_the_old_one(tmp_path, monkeypatch):
    path = tmp_path / "run.yaml"
    write_run(RunConfig(model="old"), path)

    def broken(*_):
        raise OSError("disk full")

    monkeypatch.setattr("os.replace", broken)
    with pytest.raises(OSError, match="disk full"):
        write_run(RunConfig(model="new"), path)
    assert read_run(path).model == "old"


def test_paths_stay_paths(tmp_path):
    config = RunConfig(model="m", out=Path("a/b"))
    write_run(config, tmp_path / "run.yaml")
    assert read_run(tmp_path / "run.yaml").out == Path("a/b")
