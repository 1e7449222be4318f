from __future__ import annotations

import json
import shutil
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from msllm.config import DataConfig
from msllm.engine.data import sources
from msllm.engine.data.preprocess import preprocess
from msllm.engine.data.sources import check_sources, parse_sources, split_documents
from msllm.errors import InputError


def check(paths, vocab_size=60_000, **more) -> list[str]:
    config = DataConfig(paths=[str(path) for path in paths], **{"seq_length": 4, **more})
    return [str(problem) for problem in check_sources(config, vocab_size)]


def test_every_way_to_name_a_prefix(write_prefix, tmp_path):
    plain, suffixed = write_prefix([[1] * 9], "plain"), write_prefix([[1] * 9], "x_text_document")
    words = {
        str(plain): plain,
        f"{plain}.bin": plain,
        f"0.25:{plain}.idx": plain,
        str(tmp_path / "x"): suffixed,
        f"3:{suffixed}": suffixed,
        f"1e-3:{suffixed}.bin": suffixed,
    }
    for word, prefix in words.items():
        sources, problems = parse_sources([word], "--data")
        assert not problems
        assert (sources[0].kind, sources[0].path) == ("indexed", prefix)
    weights = [parse_sources([word], "")[0][0].weight for word in words]
    assert weights == [None, None, Fraction(1, 4), None, Fraction(3), Fraction(1, 1000)]
    assert check(words and [plain, tmp_path / "x"]) == []


def test_other_kinds_of_sources(tmp_path):
    (tmp_path / "0.5").mkdir()
    (tmp_path / "a:b.txt").write_text("x")
    sources, problems = parse_sources(
        ["0.5:mock", f"0.5:{tmp_path}/0.5", f"2:{tmp_path}/a:b.txt"], "--data"
    )
    assert not problems
    assert [source.kind for source in sources] == ["mock", "raw", "raw"]
    assert sources[2].with_path(Path("p")) == "2:p"
    assert parse_sources(["mock"], "")[0][0].with_path(Path("p")) == "p"


def test_all_problems_are_found_at_once(write_prefix, tmp_path):
    good = write_prefix([[1] * 9], "good")
    half = write_prefix([[1] * 9], "half")
    Path(f"{half}.bin").unlink()
    cut = write_prefix([[1] * 9], "cut")
    Path(f"{cut}.bin").write_bytes(b"12")
    (tmp_path / "empty.txt").touch()
    found = check([f"0.5:{good}", half, cut, tmp_path / "none", "0:mock", tmp_path / "empty.txt"])
    for part in (
        "`" + str(half) + "` has no weight but others have",
        "half.bin: file not found",
        "cut.bin: truncated: 2 bytes of the 18",
        "none` not found, neither",
        "weight 0 in `0:mock`",
        "empty.txt: the file is empty",
        "needs a tokenizer",
    ):
        assert sum(part in problem for problem in found) == 1, part
    assert len(found) == 7


def test_no_data_and_conflicting_settings(write_prefix):
    assert "no training data" in check([])[0]
    prefix = write_prefix([[1] * 9] * 4)
    both = check([prefix], valid_paths=[str(prefix)], valid_fraction=0.5)
    assert both == ["data: both valid_paths and valid_fraction are set (set one of them)"]
    assert "mock beside real data needs weights" in check([prefix, "mock"])[0]
    assert check(["mock"]) == []
    assert check([f"0.5:{prefix}", "0.5:mock"]) == []
    assert "eod_mask_loss needs a tokenizer" in check([prefix], eod_mask_loss=True)[0]


def test_data_smaller_than_one_sample(write_prefix):
    small, large = write_prefix([[1] * 4], "small"), write_prefix([[1] * 5], "large")
    assert "4 train tokens in 1 documents are fewer than one sample of 4" in check([small])[0]
    assert check([large]) == []
    assert check([small, small]) == []  # without weights they are one data set
    assert len(check([f"1:{small}", f"1:{large}"])) == 1
    assert "valid tokens in 0 documents" in check([large], valid_fraction=0.1)[0]
    many = write_prefix([[1] * 5] * 20, "many")
    assert check([many], valid_fraction=0.1) == []
    assert "4 valid tokens" in check([large], valid_paths=[str(small)])[0]


def test_tokens_outside_the_vocabulary(write_prefix, corpus, tokenizer_folder, tmp_path):
    prefix = write_prefix([[5, 99, 5, 5, 5, 5]])
    assert "holds token 99, outside the model's vocabulary of 99" in check([prefix], 99)[0]
    assert check([prefix], 100) == []
    report = preprocess([corpus], tokenizer_folder, tmp_path / "c", workers=1)
    largest = json.loads(Path(f"{report.prefix}.json").read_text())["largest_token"]
    assert f"holds token {largest}" in check([report.prefix], largest)[0]
    assert check([report.prefix], largest + 1) == []
    # A summary of other files with this name is not believed.
    tokens = np.full(20, 7, np.uint16)
    shutil.move(f"{report.prefix}.json", tmp_path / "other.json")
    other = write_prefix([tokens.tolist()], "other")
    assert check([other], 8) == []


def test_tokenizer_problems(tokenizer_folder, corpus, tmp_path, write_prefix):
    large = check([corpus], 599, tokenizer=tokenizer_folder)
    assert "the tokenizer has 600 ids, the model's vocabulary only 599" in large[0]
    assert check([corpus], 600, tokenizer=tokenizer_folder) == []
    assert "tokenizer folder not found" in check([corpus], tokenizer=tmp_path / "none")[0]
    folder = tmp_path / "tok"
    folder.mkdir()
    shutil.copy(tokenizer_folder / "tokenizer.json", folder)
    assert "no EOS token" in check([corpus], tokenizer=folder)[0]
    # Indexed documents have their ends already.
    prefix = write_prefix([[1] * 9])
    assert check([prefix], tokenizer=folder) == []
    for content in (b'{"eos_token": ', b"\xff{}"):
        (folder / "tokenizer_config.json").write_bytes(content)
        for data in (prefix, corpus):
            (broken,) = check([data], tokenizer=folder)
            assert broken.startswith(f"{folder / 'tokenizer_config.json'}: not valid JSON")
        with pytest.raises(InputError) as refused:
            preprocess([corpus], folder, tmp_path / "none", workers=1, append_eod=False)
        assert str(refused.value) == broken


def test_split_of_many_documents_is_made_in_parts(monkeypatch):
    whole = split_documents(10_000, 0.03, valid=True).tolist()
    monkeypatch.setattr(sources, "SPLIT_AT_ONCE", 777)
    assert split_documents(10_000, 0.03, valid=True).tolist() == whole
    assert len(whole) == 300


@given(count=st.integers(0, 500), fraction=st.floats(0, 1), more=st.integers(0, 50))
def test_split_is_complete_exact_and_stable(count, fraction, more):
    train = split_documents(count, fraction, valid=False)
    valid = split_documents(count, fraction, valid=True)
    assert sorted([*train, *valid]) == list(range(count))
    assert len(valid) == int(count * fraction + 0.5)
    longer = split_documents(count + more, fraction, valid=True)
    assert longer[: len(valid)].tolist() == valid.tolist()
