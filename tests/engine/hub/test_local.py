"""`msllm convert` of a model that is not on this machine."""

from __future__ import annotations

import subprocess
import sys

import pytest

from msllm.engine.hub.local import local_folder
from msllm.engine.weights.verify import verify
from msllm.errors import InputError
from tests.engine.hub.hub_server import Repo
from tests.parity.all_cases import CASES


@pytest.mark.parametrize("source", ["hf", "modelscope"])
def test_it_is_fetched_once(hub, environment, tmp_path, source):
    CASES["qwen3"].write(tmp_path / "published")
    files = {p.name: p.read_bytes() for p in (tmp_path / "published").iterdir() if p.is_file()}
    hub.repos["someone/Tiny"] = Repo(files)

    def convert(out: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "msllm", "convert", "hf-to-mcore", "--source", source]
        return subprocess.run(
            [*command, "--model", "someone/Tiny", "--out", str(tmp_path / out)],
            env=environment | {"HOME": str(tmp_path)},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=900,
        )

    first = convert("first")
    assert first.returncode == 0, first.stderr
    del hub.repos["someone/Tiny"]
    second = convert("second")
    assert second.returncode == 0, second.stderr
    for out in ("first", "second"):
        assert verify(tmp_path / "published", tmp_path / out).same
    third = convert("second")
    assert third.returncode == 2
    assert "is not empty" in third.stderr
    assert [path.name for path in (tmp_path / ".cache/msllm/models").iterdir()] == [source]


def test_a_folder_is_itself_and_nonsense_is_no_model(tmp_path):
    assert local_folder(str(tmp_path)) == tmp_path
    with pytest.raises(InputError, match="unknown model"):
        local_folder("qwen3-8bb", cache=tmp_path)
