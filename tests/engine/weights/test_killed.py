"""Conversions that are killed, and disks that are full, in processes of their own."""

from __future__ import annotations

import json
import os
import resource
import shutil
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest

from msllm.cli.app import run
from msllm.engine.weights.to_mcore import hf_to_mcore
from msllm.engine.weights.verify import verify
from tests.parity.all_cases import CASES

COMMANDS = {
    "hf-to-mcore": ("--model", "hf"),
    "mcore-to-hf": ("--checkpoint", "mcore"),
    "mcore-to-mindspeed": ("--checkpoint", "mcore"),
}
SMALL_PARTS = """
import sys, threading
from msllm.cli.app import run
from msllm.engine.weights import partial, stored_parts, to_mcore

to_mcore.PART_BYTES = stored_parts.PART_BYTES = 50_000
if sys.argv[1] == "halt":
    done = partial.PartialFolder._record
    def record(self, number):
        if number == 3 and (self._records / "000001.json").exists():
            threading.Event().wait()
        return done(self, number)
    partial.PartialFolder._record = record
sys.exit(run(sys.argv[2:]))
"""


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    CASES["llama"].write(folder / "hf")
    hf_to_mcore(folder / "hf", folder / "mcore")
    return folder


def start(halt: bool, arguments: list[str], **more) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", SMALL_PARTS, "halt" if halt else "go", *arguments],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **more,
    )


def words(command: str, models: Path, out: Path) -> list[str]:
    flag, name = COMMANDS[command]
    return ["convert", command, flag, str(models / name), "--out", str(out)]


@pytest.mark.parametrize("command", COMMANDS)
def test_a_killed_conversion_leaves_nothing_and_goes_on(command, halted, models, tmp_path):
    arguments = words(command, models, tmp_path / "out")
    halted(command)
    records = tmp_path / ".out.partial" / ".parts"
    assert [path.name for path in tmp_path.iterdir()] == [".out.partial"]
    before = {path.name: path.stat().st_mtime_ns for path in records.glob("0*.json")}
    assert len(before) >= 2

    process = start(False, arguments)
    out, err = process.communicate(timeout=900)
    assert process.returncode == 0, out + err
    assert verify(models / "hf", tmp_path / "out", model=models / "hf").same
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.fixture
def halted(models, tmp_path):
    """Begin a conversion and kill it after two parts."""

    def run(command: str, source: Path | None = None) -> list[str]:
        arguments = words(command, models, tmp_path / "out")
        if source is not None:
            arguments[3] = str(source)
        process = start(True, arguments)
        records = tmp_path / ".out.partial" / ".parts"
        while len(list(records.glob("00000[01].json"))) < 2:
            assert process.poll() is None, process.communicate()
            time.sleep(0.02)
        process.kill()
        process.communicate()
        return arguments

    return run


OTHER_HEADS = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 48}


def edit(config: Path, **changes) -> None:
    config.write_text(json.dumps(json.loads(config.read_text()) | changes))


def test_another_model_of_the_same_shapes_starts_over(halted, models, tmp_path):
    """Rows of other heads must not join those that are done."""
    source, out = tmp_path / "hf", tmp_path / "out"
    shutil.copytree(models / "hf", source)
    arguments = halted("hf-to-mcore", source)
    edit(source / "config.json", **OTHER_HEADS)
    assert start(False, arguments).wait(timeout=900) == 0
    hf_to_mcore(source, tmp_path / "clean")
    assert verify(out, tmp_path / "clean").same


def test_a_model_that_is_not_the_checkpoints(models, tmp_path, capsys):
    shutil.copytree(models / "hf", tmp_path / "hf")
    edit(tmp_path / "hf" / "config.json", **OTHER_HEADS)
    arguments = words("mcore-to-hf", models, tmp_path / "out")
    assert run([*arguments, "--model", str(tmp_path / "hf")]) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "num_attention_heads 4, and the config says 2" in said
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("command", "file"),
    [
        ("hf-to-mcore", "__0_0.distcp"),
        ("mcore-to-hf", "model.safetensors"),
        ("mcore-to-mindspeed", "iter_0000001/mp_rank_00/model_optim_rng.pt"),
    ],
)
@pytest.mark.parametrize("cut", [True, False])
def test_what_is_recorded_but_not_there_is_done_again(command, file, cut, halted, models, tmp_path):
    arguments = halted(command)
    path = tmp_path / ".out.partial" / "out" / file
    if cut:
        os.truncate(path, path.stat().st_size // 2)
    else:
        path.unlink()
    done = start(False, arguments)
    assert done.wait(timeout=900) == 0, done.communicate()
    assert verify(models / "hf", tmp_path / "out", model=models / "hf").same


def test_what_is_unfinished_is_taken_for_no_model(halted, models, tmp_path, capsys):
    halted("mcore-to-hf")
    inner = tmp_path / ".out.partial" / "out"
    for command in (
        ["inspect", str(inner)],
        ["cast", str(inner), "--dtype", "fp32", "--out", str(tmp_path / "cast")],
        ["verify", str(inner), str(models / "hf")],
        ["hf-to-mcore", "--model", str(inner), "--out", str(tmp_path / "back")],
    ):
        shutil.copyfile(models / "hf" / "config.json", inner / "config.json")
        assert run(["convert", *command]) == 2
        assert "unfinished conversion" in " ".join(capsys.readouterr().err.split())
    assert [path.name for path in tmp_path.iterdir()] == [".out.partial"]


def test_two_at_one_place(models, tmp_path, capsys):
    arguments = words("hf-to-mcore", models, tmp_path / "out")
    first = start(True, arguments)
    try:
        while not (tmp_path / ".out.partial" / ".parts" / "000001.json").exists():
            assert first.poll() is None, first.communicate()
            time.sleep(0.02)
        assert run(arguments) == 2
        assert "another process is writing it" in capsys.readouterr().err
        cast = ["convert", "cast", str(models / "hf"), "--dtype", "fp32"]
        assert run([*cast, "--out", str(tmp_path / "out")]) == 2
    finally:
        first.kill()
        first.communicate()
    assert run(arguments) == 0
    assert verify(models / "hf", tmp_path / "out", model=models / "hf").same


def test_what_is_not_of_a_conversion_is_left_alone(models, tmp_path, capsys):
    precious = tmp_path / ".out.partial" / "precious"
    precious.mkdir(parents=True)
    assert run(words("hf-to-mcore", models, tmp_path / "out")) == 2
    assert "not of a conversion" in " ".join(capsys.readouterr().err.split())
    assert precious.is_dir()


def test_links_lead_to_where_the_output_is_made(models, tmp_path, capsys):
    (tmp_path / "disk" / "empty").mkdir(parents=True)
    for name, target in (("link", "disk/empty"), ("dangling", "disk/new"), ("loop", "loop")):
        (tmp_path / name).symlink_to(tmp_path / target)
    assert run(words("hf-to-mcore", models, tmp_path / "link")) == 0
    assert run(words("hf-to-mcore", models, tmp_path / "dangling")) == 0
    assert (tmp_path / "disk" / "new" / "complete.json").exists()
    assert run(words("hf-to-mcore", models, tmp_path / "loop")) == 2
    assert run(words("hf-to-mcore", models, Path("~no-such-user/out"))) == 2
    assert capsys.readouterr().err.count("leads nowhere") == 2
    assert sorted(path.name for path in (tmp_path / "disk").iterdir()) == ["empty", "new"]


def test_a_copy_into_itself(models, capsys):
    out = str(models / "mcore" / "inner")
    assert run(["convert", "cast", str(models / "mcore"), "--dtype", "fp32", "--out", out]) == 2
    assert "a part of itself" in capsys.readouterr().err


def test_a_config_edited_beside_the_checkpoint(models, tmp_path, capsys):
    """The heads are others; the shapes, and the file's size, are not."""
    shutil.copytree(models / "mcore", tmp_path / "mcore")
    path = tmp_path / "mcore" / "hf" / "config.json"
    size = path.stat().st_size
    edit(path, **OTHER_HEADS)
    path.write_text(path.read_text().ljust(size))
    out = ["--out", str(tmp_path / "out")]
    checkpoint = ["--checkpoint", str(tmp_path / "mcore")]
    assert run(["convert", "mcore-to-hf", *checkpoint, *out]) == 2
    assert run(["convert", "mcore-to-mindspeed", *checkpoint, *out]) == 2
    assert run(["convert", "verify", str(models / "hf"), str(tmp_path / "mcore")]) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert said.count("num_query_groups 2, and the config says 1") == 3


def test_parts_that_were_done_are_not_done_again(halted, models, tmp_path):
    arguments = words("hf-to-mcore", models, tmp_path / "out")
    halted("hf-to-mcore")
    folder = tmp_path / ".out.partial"
    first = (folder / "out" / "__0_0.distcp").stat().st_mtime_ns
    assert start(False, arguments).wait(timeout=900) == 0
    assert (tmp_path / "out" / "__0_0.distcp").stat().st_mtime_ns == first


@pytest.mark.parametrize("command", COMMANDS)
def test_a_disk_that_is_full_in_the_middle(command, models, tmp_path):
    """A limit on the size of files stands for it: writing fails after some bytes."""
    most = 40_000
    limit = partial(resource.setrlimit, resource.RLIMIT_FSIZE, (most, most))
    process = start(False, words(command, models, tmp_path / "out"), preexec_fn=limit)
    _, err = process.communicate(timeout=900)
    assert process.returncode == 2, err
    assert "are missing" in err
    assert list(tmp_path.iterdir()) == []
