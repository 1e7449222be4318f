from __future__ import annotations

import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from msllm.engine.data.train_tokenizer import train_tokenizer
from msllm.errors import InputError


@pytest.fixture(scope="module")
def loaded(tokenizer_folder):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(tokenizer_folder)


@settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(text=st.text(st.characters(exclude_categories=["Cs"]), max_size=80))
def test_transformers_loads_it_and_any_text_comes_back(loaded, text):
    ids = loaded.encode(text, add_special_tokens=False)
    assert loaded.decode(ids, skip_special_tokens=False) == text
    assert all(i < 600 for i in ids)


def test_special_tokens_are_known_to_transformers(loaded):
    assert (loaded.eos_token, loaded.pad_token) == ("<|endoftext|>", "<|pad|>")
    assert loaded.eos_token_id != loaded.pad_token_id
    assert loaded.encode("a<|endoftext|>")[-1] == loaded.eos_token_id
    assert len(loaded) == 600


def test_it_learned_from_the_text(loaded, corpus):
    text = json.loads(corpus.read_text("utf-8").splitlines()[0])["text"]
    assert len(loaded.encode(text)) < 0.75 * len(text.encode())


def test_output_appears_whole_or_not_at_all(tmp_path, corpus):
    out = tmp_path / "new" / "tok"
    (tmp_path / "new" / "tok.tmp").mkdir(parents=True)  # left by a killed run
    (tmp_path / "new" / "tok.tmp" / "junk").touch()
    with pytest.raises(InputError, match="can't hold the 256 bytes and 2 special tokens"):
        train_tokenizer([corpus], 257, out)
    assert not out.exists()
    train_tokenizer([corpus], 258, out)
    assert sorted(path.name for path in out.iterdir()) == [
        "special_tokens_map.json",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    assert [path.name for path in out.parent.iterdir()] == ["tok"]
    with pytest.raises(InputError, match="output is there already"):
        train_tokenizer([corpus], 258, out)


def test_output_that_cannot_be_written(tmp_path, corpus):
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match="file is a file"):
        train_tokenizer([corpus], 258, tmp_path / "file" / "tok")


def test_too_little_text_is_refused(tmp_path):
    (tmp_path / "a.txt").write_text("abc abc abc")
    with pytest.raises(InputError, match=r"the text only gives 2\d\d tokens, not 5,000"):
        train_tokenizer([tmp_path / "a.txt"], 5000, tmp_path / "tok")
    (tmp_path / "b.jsonl").write_text('{"text": ""}\n')
    with pytest.raises(InputError, match="no text found"):
        train_tokenizer([tmp_path / "b.jsonl"], 300, tmp_path / "tok")
    assert not (tmp_path / "tok").exists()


def test_broken_records_are_left_out_or_refused(tmp_path, corpus):
    path = tmp_path / "a.jsonl"
    path.write_text("broken\n" + corpus.read_text("utf-8"), "utf-8")
    with pytest.raises(InputError, match=r"a\.jsonl:1: broken record"):
        train_tokenizer([path], 600, tmp_path / "tok", on_error="fail")
    assert train_tokenizer([path], 600, tmp_path / "tok") == 600
