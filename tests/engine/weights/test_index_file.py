"""A checkpoint's index is a pickle: what it may carry is not run."""

from __future__ import annotations

import os
import pickle

import pytest

from msllm.cli.app import run
from msllm.engine.weights.index_file import read_index
from msllm.engine.weights.to_mcore import hf_to_mcore
from tests.parity.all_cases import CASES


class Evil:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


@pytest.fixture
def checkpoint(tmp_path):
    CASES["qwen3"].write(tmp_path / "hf")
    hf_to_mcore(tmp_path / "hf", tmp_path / "mcore")
    (tmp_path / "mcore" / "complete.json").unlink()  # as of another tool's checkpoint
    return tmp_path / "mcore"


@pytest.mark.parametrize("protocol", [0, 2, 4, 5])
def test_code_in_an_index_is_not_run(checkpoint, tmp_path, protocol, capsys):
    ran = tmp_path / "ran"
    (checkpoint / ".metadata").write_bytes(pickle.dumps(Evil(ran), protocol))
    words = ["convert", "mcore-to-hf", "--checkpoint", str(checkpoint), "--out"]
    assert run([*words, str(tmp_path / "out")]) == 2
    assert "nothing of it was run" in " ".join(capsys.readouterr().err.split())
    assert run(["convert", "inspect", str(checkpoint)]) == 2
    assert not ran.exists()
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("content", [b"", b"garbage", pickle.dumps({"a": 1}), b"\x80\x05."])
def test_what_is_no_index_is_told(checkpoint, content, capsys):
    (checkpoint / ".metadata").write_bytes(content)
    assert run(["convert", "inspect", str(checkpoint)]) == 2
    assert "index is damaged" in " ".join(capsys.readouterr().err.split())


def test_an_index_is_read(checkpoint):
    assert (
        "embedding.word_embeddings.weight"
        in read_index(checkpoint / ".metadata").state_dict_metadata
    )
