"""Folders that are not what they seem: pipes, damaged indexes, rights, files that change."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import astuple
from pathlib import Path

import pytest
import torch

from msllm.engine.weights import cast as casting
from msllm.engine.weights import to_mcore
from msllm.engine.weights.torch_dist import StoredWeights
from msllm.errors import InputError
from tests.engine.weights.hostile_case import (
    Folders,
    change_index,
    convert,
    header_with,
    refused,
)

EMBEDDING = "embedding.word_embeddings.weight"


def reading(copies: Folders, kind: str) -> list[tuple[object, ...]]:
    """Commands that read the published weights, the checkpoint, or the files of ranks."""
    folder, out = getattr(copies, kind), ("--out", copies.hf.parent / "out")
    looking = [("inspect", folder), ("verify", folder, folder)]
    cast = ("cast", folder, "--dtype", "fp32", *out)
    if kind == "hf":
        return [*looking, cast, ("hf-to-mcore", "--model", folder, *out)]
    if kind == "ranks":
        return [*looking, ("mindspeed-to-mcore", "--checkpoint", folder, *out)]
    commands = ("mcore-to-hf", "mcore-to-mindspeed")
    return [*looking, cast, *((name, "--checkpoint", folder, *out) for name in commands)]


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("kind", "name"),
    [
        *(("hf", name) for name in ("model.safetensors", "config.json")),
        ("hf", "model.safetensors.index.json"),
        *(("checkpoint", name) for name in (".metadata", "complete.json", "hf/config.json")),
        ("checkpoint", "__0_0.distcp"),
        ("ranks", "iter_0000001/mp_rank_00_000/model_optim_rng.pt"),
    ],
)
def test_pipes_are_not_waited_on(copies, capsys, kind, name):
    path = getattr(copies, kind) / name
    path.unlink(missing_ok=True)
    os.mkfifo(path)
    if kind == "checkpoint" and name != "complete.json":
        (copies.checkpoint / "complete.json").unlink()
    for command in reading(copies, kind):
        if command[0] == "inspect" and name.endswith(".distcp"):
            continue  # it looks at the index alone
        if "config.json" in name and command[0] in ("inspect", "verify"):
            continue  # they do without
        refused(capsys, *command)


def set_of(name: str, value: object):
    return lambda index: setattr(index, name, value)


def set_tensor(name: str, value: object):
    return lambda index: set_of(name, value)(index.state_dict_metadata[EMBEDDING])


def set_place(name: str, value: object):
    def change(index):
        object.__setattr__(next(iter(index.storage_data.values())), name, value)

    return change


@pytest.mark.parametrize(
    "change",
    [
        *(set_of("storage_data", value) for value in (None, {}, {1: 2})),
        *(set_of("state_dict_metadata", value) for value in (None, {}, {1: 2})),
        *(set_tensor("chunks", value) for value in ([], None, [5])),
        *(set_tensor("size", value) for value in (None, 5, ("a", 1))),
        set_tensor("properties", None),
        *(set_place("offset", value) for value in ("a", None, -1)),
        *(set_place("relative_path", value) for value in (5, "../x", "/etc/passwd")),
        *(set_place("length", value) for value in (0, "a", -1)),
    ],
)
def test_damaged_indexes(copies, capsys, change):
    change_index(copies.checkpoint, change)
    for command in reading(copies, "checkpoint"):
        if command[0] != "inspect":
            refused(capsys, *command)
    assert not (copies.hf.parent / "out").exists()


@pytest.mark.parametrize("content", ["7" * 5000, "", "..", "a/b", "\0"])
def test_a_tracker_that_names_nothing(copies, capsys, content):
    (copies.ranks / "latest_checkpointed_iteration.txt").write_text(content)
    for command in reading(copies, "ranks"):
        assert "it names no iteration" in refused(capsys, *command)


class Code:
    def __reduce__(self):
        return (os.system, ("touch ran",))


def test_code_in_a_rank_file(copies, capsys, monkeypatch):
    monkeypatch.chdir(copies.hf)
    path = copies.ranks / "iter_0000001" / "mp_rank_00_000" / "model_optim_rng.pt"
    torch.save({"model": {"a": Code()}}, path)
    said = refused(capsys, *reading(copies, "ranks")[-1])
    assert "weights_only" not in said
    assert not (copies.hf / "ran").exists()


def test_a_missing_file_is_not_called_damaged(copies, capsys):
    stored = StoredWeights(copies.checkpoint)
    held = next(iter(stored.pieces()))
    (copies.checkpoint / held.file).unlink()
    with pytest.raises(InputError, match=f"{held.file} is missing"):
        stored.read(held)


@pytest.mark.parametrize("size", [10_000, 1, 0])
def test_a_source_that_changes_meanwhile(copies, capsys, monkeypatch, size):
    parts = casting._Stored.parts

    def cut(self, folder):
        path = copies.checkpoint / "__0_0.distcp"
        if size:
            os.truncate(path, size)
        else:
            path.unlink()
        return parts(self, folder)

    monkeypatch.setattr(casting._Stored, "parts", cut)
    refused(capsys, "cast", copies.checkpoint, "--dtype", "fp32", "--out", copies.hf.parent / "o")


def test_files_of_ranks_that_are_cut_meanwhile(copies, capsys, monkeypatch):
    parts = to_mcore.Work.parts

    def cut(self, folder):
        os.truncate(copies.ranks / "iter_0000001/mp_rank_00_000/model_optim_rng.pt", 100)
        return parts(self, folder)

    monkeypatch.setattr(to_mcore.Work, "parts", cut)
    said = refused(capsys, *reading(copies, "ranks")[-1])
    assert "shorter than it was" in said


@pytest.mark.parametrize("out", ["~nosuchuser/x", "/proc/x", "/sys/x"])
def test_places_where_nothing_can_be(copies, capsys, out):
    refused(capsys, "hf-to-mcore", "--model", copies.hf, "--out", out)
    refused(capsys, "cast", copies.hf, "--dtype", "fp32", "--out", out)


@pytest.mark.parametrize("command", ["inspect", "verify", "hf-to-mcore", "mcore-to-hf"])
def test_homes_of_nobody(tmp_path, capsys, command):
    given = {
        "inspect": ["~nosuchuser/x"],
        "verify": ["~nosuchuser/x", "~nosuchuser/x"],
        "hf-to-mcore": ["--model", "~nosuchuser/x", "--out", tmp_path / "out"],
        "mcore-to-hf": ["--checkpoint", "~nosuchuser/x", "--out", tmp_path / "out"],
    }[command]
    assert "~nosuchuser/x" in refused(capsys, command, *given)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("hf", "generation_config.json"),
        *(("checkpoint", name) for name in ("hf/.weights.json", "common.pt", "__0_0.distcp")),
        *(("ranks", name) for name in ("iter_0000001", "iter_0000001/mp_rank_00_000")),
    ],
)
def test_what_may_not_be_read(made, capsys, kind, name):
    root = Path("/tmp") / f"msllm-rights-{os.getpid()}"
    root.mkdir(mode=0o777)
    try:
        root.chmod(0o777)
        shutil.copytree(made.hf.parent, root / "made")
        folders = Folders(*(root / "made" / path.name for path in astuple(made)))
        path = getattr(folders, kind) / name
        if not path.exists():
            path.write_text("{}")
        for each in root.rglob("*"):
            each.chmod(0o777)
        path.chmod(0)
        os.seteuid(65534)
        command = reading(folders, kind)[2 if kind == "checkpoint" else -1]
        said = refused(capsys, *command)
        assert "may not read" in said
        assert path.name in said
    finally:
        os.seteuid(0)
        shutil.rmtree(root)


def test_names_that_no_terminal_shows(copies, capsys):
    header_with(copies.hf, name="\ud800")
    assert convert("inspect", copies.hf, "--all") == 0
    assert "\\ud800" in capsys.readouterr().out


@pytest.mark.parametrize("target", ["ascii", "full", "closed"])
def test_outputs_that_do_not_take_it(made, tmp_path, target):
    folder = tmp_path / "modèle"
    shutil.copytree(made.hf, folder)
    command = f"{sys.executable} -m msllm convert inspect {folder}"
    more = {"ascii": "", "full": "> /dev/full", "closed": ">&-"}[target]
    env = os.environ | {"PYTHONIOENCODING": "ascii", "LC_ALL": "C"}
    done = subprocess.run(
        f"{command} {more}", shell=True, env=env, capture_output=True, text=True, timeout=60
    )
    assert "defect" not in done.stderr
    assert "Traceback" not in done.stderr
    assert done.returncode == (1 if target == "full" else 0)
    if target == "full":
        assert "standard output" in done.stderr
