"""What files are known by: the text of the cache, and what a run reads."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from msllm.config import DataConfig
from msllm.engine.data import fingerprint as module
from msllm.engine.data.fingerprint import digest_file, fingerprint
from msllm.engine.data.indexed import files_of


def test_large_files_of_text_are_known_by_size_time_and_slices(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "WHOLE", 1000)
    monkeypatch.setattr(module, "SLICE", 8)
    path = tmp_path / "large"
    path.write_bytes(bytes(range(250)) * 8)
    os.utime(path, ns=(0, 10**18))
    first = digest_file(path)
    assert digest_file(path) == first
    os.utime(path, ns=(0, 10**18 + 1))
    assert digest_file(path) != first
    content = bytearray(path.read_bytes())
    for at in (0, len(content) - 1):  # both ends are always among the slices
        content[at] ^= 1
        path.write_bytes(content)
        os.utime(path, ns=(0, 10**18))
        assert digest_file(path) != first
        content[at] ^= 1


def test_a_run_knows_its_files_by_what_is_in_them(write_prefix, tokenizer_folder, tmp_path):
    prefix = write_prefix([[1, 2, 3], [4]])
    binary, index = files_of(prefix)
    folder = tmp_path / "tok"
    shutil.copytree(tokenizer_folder, folder)
    data = DataConfig(paths=["1:mock", f"0.5:{prefix}"], tokenizer=folder)
    before = fingerprint(data)
    assert set(before) == {str(binary), str(index), str(folder)}

    def changed() -> list[str]:
        return [Path(name).name for name, mark in fingerprint(data).items() if before[name] != mark]

    kept = binary.read_bytes()
    write_prefix([[1, 2, 3], [5]])
    assert changed() == ["data.bin"]
    binary.write_bytes(kept)
    os.utime(binary, ns=(0, 1))
    assert changed() == []
    settings = folder / "tokenizer_config.json"
    text = settings.read_text()
    settings.write_text(text.replace("endoftext", "pad"))
    assert changed() == ["tok"]
    settings.write_text(text)
    write_prefix([[1, 2], [3, 4]])
    assert changed() == ["data.idx"]


def test_a_mark_reads_little_of_a_large_file(write_prefix, monkeypatch):
    prefix = write_prefix([list(range(1000))])
    monkeypatch.setattr(module, "SLICE", 8)
    data, (binary, _) = DataConfig(paths=[str(prefix)]), files_of(prefix)
    before, content = fingerprint(data), bytearray(binary.read_bytes())

    def seen(at: int) -> bool:
        content[at] ^= 1
        binary.write_bytes(content)
        content[at] ^= 1
        return fingerprint(data) != before

    assert sum(seen(at) for at in range(len(content))) == module.FEW * 8
    assert seen(0)
    assert seen(len(content) - 1)
