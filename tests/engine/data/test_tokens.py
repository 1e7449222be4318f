from __future__ import annotations

import json
import shutil

import numpy as np
import pytest
import tokenizers

from msllm.engine.data.tokens import Tokenizer
from msllm.errors import InputError

TEXTS = ["one two", "", "drei\n", "<|endoftext|>", "x" * 500]


@pytest.fixture
def folder(tokenizer_folder, tmp_path):
    return shutil.copytree(tokenizer_folder, tmp_path / "tok")


def edit(folder, name, **values):
    path = folder / name
    content = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps({**content, **values}))


def test_ids_are_the_librarys_own(folder):
    theirs = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    expected = [theirs.encode(text).ids for text in TEXTS]
    ours = Tokenizer(folder)
    assert ours.encode_batch(TEXTS) == expected
    tokens, lengths = ours.encode_documents(TEXTS, ours.eod_id)
    assert lengths.tolist() == [len(ids) + 1 if ids else 0 for ids in expected]
    assert tokens.tolist() == [i for ids in expected if ids for i in [*ids, ours.eod_id]]
    plain, lengths = ours.encode_documents(TEXTS, None)
    assert plain.tolist() == [i for ids in expected for i in ids]
    assert (tokens.dtype, lengths.dtype) == (np.int32, np.int32)
    assert ours.encode_documents([], 0)[0].tolist() == []
    assert ours.decode(expected[0]) == "one two"


def test_bos_truncation_and_padding_kept_in_the_file_do_not_apply(folder):
    expected = Tokenizer(folder).encode_batch(TEXTS)
    theirs = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    theirs.enable_truncation(3)
    theirs.enable_padding(length=9)
    theirs.post_processor = tokenizers.processors.TemplateProcessing(
        single="<|pad|> $A", special_tokens=[("<|pad|>", theirs.token_to_id("<|pad|>"))]
    )
    theirs.save(str(folder / "tokenizer.json"))
    assert Tokenizer(folder).encode_batch(TEXTS) == expected


def test_vocabulary_counts_up_to_the_largest_added_id(folder):
    assert Tokenizer(folder).vocab_size == 600
    content = json.loads((folder / "tokenizer.json").read_text())
    content["added_tokens"].append({**content["added_tokens"][0], "id": 600, "content": "<|new|>"})
    (folder / "tokenizer.json").write_text(json.dumps(content))
    assert Tokenizer(folder).vocab_size == 601


def test_eod_is_looked_for_in_one_file_after_another(folder):
    assert Tokenizer(folder).eod_id == 0
    edit(folder, "tokenizer_config.json", eos_token={"content": "<|pad|>"})
    assert Tokenizer(folder).eod_id == 1
    edit(folder, "tokenizer_config.json", eos_token=None)
    assert Tokenizer(folder).eod_id == 0  # from special_tokens_map.json
    (folder / "special_tokens_map.json").unlink()
    edit(folder, "generation_config.json", eos_token_id=[7, 8])
    assert Tokenizer(folder).eod_id == 7
    (folder / "generation_config.json").unlink()
    with pytest.raises(InputError, match=r"no EOS token.*eos_token"):
        _ = Tokenizer(folder).eod_id
    edit(folder, "tokenizer_config.json", eos_token="</s>")
    with pytest.raises(InputError, match="`</s>` is not in the tokenizer's vocabulary"):
        _ = Tokenizer(folder).eod_id


def test_fingerprint_is_of_the_content(folder, tokenizer_folder):
    assert Tokenizer(folder).fingerprint == Tokenizer(tokenizer_folder).fingerprint
    edit(folder, "tokenizer.json", version="2.0")
    theirs = tokenizers.Tokenizer.from_file(str(tokenizer_folder / "tokenizer.json"))
    theirs.add_tokens(["new"])
    theirs.save(str(folder / "tokenizer.json"))
    assert Tokenizer(folder).fingerprint != Tokenizer(tokenizer_folder).fingerprint


def test_folders_without_tokenizer_json_go_through_transformers(folder, tmp_path):
    from transformers import AutoTokenizer

    model = json.loads((folder / "tokenizer.json").read_text())["model"]
    other = tmp_path / "gpt2"
    other.mkdir()
    (other / "vocab.json").write_text(json.dumps(model["vocab"]))
    merges = [" ".join(pair) for pair in model["merges"]]
    (other / "merges.txt").write_text("\n".join(["#version: 0.2", *merges]))
    config = {"tokenizer_class": "GPT2Tokenizer", "eos_token": "<|endoftext|>"}
    (other / "tokenizer_config.json").write_text(json.dumps(config))
    ours = Tokenizer(other)
    theirs = AutoTokenizer.from_pretrained(other)
    assert ours.encode_batch(TEXTS) == [theirs.encode(t, add_special_tokens=False) for t in TEXTS]
    assert ours.eod_id == theirs.eos_token_id
    before = ours.fingerprint
    (other / "merges.txt").write_text("\n".join(["#version: 0.2", *merges[:-1]]))
    assert Tokenizer(other).fingerprint != before


def test_what_is_no_tokenizer_is_refused(tmp_path):
    with pytest.raises(InputError, match="tokenizer folder not found"):
        Tokenizer(tmp_path / "none")
    with pytest.raises(InputError, match="no tokenizer could be loaded"):
        Tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(InputError, match="no tokenizer could be loaded"):
        Tokenizer(tmp_path)
