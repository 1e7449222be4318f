from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from msllm.config import DataConfig
from msllm.engine.data.cache import prepare_data
from msllm.engine.data.indexed import IndexedTokens
from msllm.engine.data.stream import open_streams
from msllm.engine.data.tokens import Tokenizer
from msllm.errors import InputError


@pytest.fixture
def config(corpus, tokenizer_folder, tmp_path):
    return DataConfig(
        paths=[str(corpus)], tokenizer=tokenizer_folder, cache_dir=tmp_path / "cache", seq_length=32
    )


def prepared(config: DataConfig) -> tuple[str, int]:
    """(path, blocks tokenized for it)."""
    reports: list[int] = []
    found = prepare_data(config, lambda report: reports.append(report.tokens))
    return found.paths[0], len(reports)


def test_raw_data_is_tokenized_once(config):
    path, blocks = prepared(config)
    assert blocks > 0
    assert prepared(config) == (path, 0)
    train, _ = open_streams(prepare_data(config), 1, 600)
    lines = Path(config.paths[0]).read_text("utf-8").splitlines()
    texts = [json.loads(line)["text"] for line in lines]
    ids = Tokenizer(config.tokenizer).encode_batch(texts)
    tokens = {token for document in ids for token in document}
    assert set(train[0].tokens.tolist()) <= tokens | {0}
    assert IndexedTokens(Path(path)).num_tokens == sum(map(len, ids)) + len(ids)


def test_what_decides_the_tokens_decides_the_key(config, corpus, tmp_path):
    path, _ = prepared(config)
    copy = tmp_path / "copy.jsonl"
    shutil.copy(corpus, copy)
    assert prepared(config.model_copy(update={"paths": [str(copy)]})) == (path, 0)
    with copy.open("a") as stream:
        stream.write('{"text": "more", "id": "words"}\n')
    changed, blocks = prepared(config.model_copy(update={"paths": [str(copy)]}))
    assert changed != path
    assert blocks
    folder = tmp_path / "tok"
    shutil.copytree(config.tokenizer, folder)
    assert prepared(config.model_copy(update={"tokenizer": folder})) == (path, 0)
    settings = folder / "tokenizer_config.json"
    settings.write_text(settings.read_text().replace("endoftext", "pad"))
    assert prepared(config.model_copy(update={"tokenizer": folder}))[0] != path
    two_keys = config.model_copy(update={"text_key": "text,text"})
    assert prepared(two_keys)[0] != path


def test_weights_prefixes_and_mock_stay(config, corpus, write_prefix):
    prefix = write_prefix([[1] * 40])
    paths = [f"0.7:{corpus}", f"0.2:{prefix}", "0.1:mock"]
    update = {"paths": paths, "valid_paths": [str(corpus)]}
    found = prepare_data(config.model_copy(update=update))
    assert found.paths[1:] == paths[1:]
    assert found.paths[0].startswith("0.7:" + str(config.cache_dir))
    assert found.valid_paths == [found.paths[0].removeprefix("0.7:")]
    train, valid = open_streams(found, 1, 600)
    assert valid is not None
    assert len(train[0].tokens) == len(valid[0].tokens) == 33


def test_half_made_entries_are_made_again(config):
    path, _ = prepared(config)
    Path(f"{path}.idx").unlink()
    again, blocks = prepared(config)
    assert again == path
    assert blocks > 0
    assert IndexedTokens(Path(path)).num_tokens > 0


def test_raw_data_without_a_tokenizer(config):
    with pytest.raises(InputError, match="needs a tokenizer"):
        prepare_data(config.model_copy(update={"tokenizer": None}))


SCRIPT = """
import sys
from pathlib import Path
from msllm.config import DataConfig
from msllm.engine.data.cache import prepare_data

if __name__ == "__main__":
    blocks = []
    data = DataConfig(paths=[sys.argv[1]], tokenizer=Path(sys.argv[2]), cache_dir=Path(sys.argv[3]))
    found = prepare_data(data, lambda report: blocks.append(1))
    print(found.paths[0], bool(blocks))
"""


def test_two_at_once_do_it_once(config, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    words = [sys.executable, str(script), config.paths[0], str(config.tokenizer)]
    words.append(str(config.cache_dir))
    both = [subprocess.Popen(words, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    lines = [process.communicate(timeout=900)[0].split() for process in both]
    assert [process.returncode for process in both] == [0, 0]
    assert lines[0][0] == lines[1][0]
    assert sorted(line[1] for line in lines) == ["False", "True"]
