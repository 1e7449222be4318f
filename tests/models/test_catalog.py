"""The catalog's files, its look-ups, and its facts against published ones."""

from __future__ import annotations

import csv
import json
import re
from pathlib import Path

import pytest
import yaml

from msllm.errors import InputError
from msllm.models import plain_yaml
from msllm.models.catalog import catalog, catalog_files, load
from msllm.models.resolve import resolve_model
from msllm.models.support import support

with (Path(__file__).parent / "data" / "published_recipes.csv").open(encoding="utf-8") as file:
    PUBLISHED = list(csv.DictReader(file))

# Parameters that the models' makers or the index of their published tensors give, in billions.
PUBLISHED_TOTALS = {
    "llama-7b": 6.738,
    "llama-13b": 13.016,
    "llama-65b": 65.286,
    "llama2-7b": 6.738,
    "llama2-13b": 13.016,
    "llama2-70b": 68.977,
    "llama3-8b": 8.030,
    "llama3-70b": 70.554,
    "llama3.1-405b": 405.853,
    "llama3.2-1b": 1.236,
    "llama3.2-3b": 3.213,
    "codellama-34b": 33.744,
    "mistral-7b": 7.242,
    "magistral-24b": 23.572,
    "mixtral-8x7b": 46.703,
    "mixtral-8x22b": 140.621,
    "qwen-7b": 7.721,
    "qwen1.5-110b": 111.210,
    "qwen2-0.5b": 0.494,
    "qwen2-1.5b": 1.544,
    "qwen2-7b": 7.616,
    "qwen2-72b": 72.706,
    "qwen2-57b-a14b": 57.409,
    "qwen2.5-3b": 3.086,
    "qwen2.5-14b": 14.770,
    "qwen2.5-32b": 32.764,
    "qwen3-0.6b": 0.596,
    "qwen3-1.7b": 1.721,
    "qwen3-4b": 4.022,
    "qwen3-8b": 8.191,
    "qwen3-14b": 14.768,
    "qwen3-32b": 32.762,
    "qwen3-30b-a3b": 30.532,
    "qwen3-235b-a22b": 235.094,
    "qwen3-coder-next-80b-a3b": 79.674391296,
    "deepseek-v2-lite": 15.706,
    "deepseek-v2": 235.741,
    "deepseek-v3": 671.026,
    "gemma-2b": 2.506,
    "gemma-7b": 8.538,
    "gemma-2-9b": 9.242,
    "gemma-2-27b": 27.227,
    "phi-3.5-mini": 3.821,
    "phi-3.5-moe": 41.873,
    "yi-34b": 34.389,
    "yi-1.5-6b": 6.061,
    "baichuan2-7b": 7.506,
    "internlm2-20b": 19.861,
    "internlm3-8b": 8.804,
    "bloom-7b1": 7.069,
    "bloom-176b": 176.247,
    "chatglm3-6b": 6.244,
    "gpt-oss-20b": 20.915,
    "seed-oss-36b": 36.151,
    "mamba2-2.7b": 2.703,
}
# Active parameters as their makers round them.
PUBLISHED_ACTIVE = {
    "mixtral-8x7b": 12.9,
    "mixtral-8x22b": 39,
    "qwen2-57b-a14b": 14,
    "qwen3-30b-a3b": 3.3,
    "qwen3-235b-a22b": 22,
    "deepseek-v2": 21,
    "deepseek-v3": 37,
    "deepseek-v4-flash": 13,
    "phi-3.5-moe": 6.6,
    "hunyuan-large": 52,
    "ring-1t": 50,
    "longcat-flash": 27,
}

# Models whose count is more than 15 % off their name, and why.
OTHERWISE_NAMED = {
    "llama3.2-1b": "the name rounds 1.24B down",
    "gemma-2b": "the name leaves out the embedding's 0.52B",
    "gemma-7b": "the name leaves out the embedding's 0.79B",
    "minicpm-2b": "the name is the 2.4B outside the embedding, rounded down",
    "deepseek-r1-distill-qwen-1.5b": "unlike its base it has an output layer of its own, 0.23B",
    "grok-1-40b": "a cut of 12 layers whose name counts two matrices an expert of three",
    "gpt4-moe-175b": "the script has 8 layers; nothing published says how they would make 175B",
    "mixtral-8x7b": "8x7B is experts times base, which share attention and embedding: 46.7B",
    "mixtral-8x22b": "8x22B is experts times base, which share attention and embedding: 141B",
}
NO_SIZE_IN_NAME = {
    "mamba3": "a demo whose shape is not published",
    "phi-3.5-mini": "published as 3.8B, held above",
    "phi-3.5-moe": "published as 41.9B, held above",
}


def card_of(row):
    return catalog().get(row["key"])


# ---------------------------------------------------------------- files


def test_files_are_valid_and_read_the_same_checked_or_not():
    assert load(catalog_files()) == catalog()


@pytest.mark.parametrize("path", catalog_files(), ids=lambda path: path.stem)
def test_files_are_plain_yaml(path):
    text = path.read_text(encoding="utf-8")
    ours, theirs = plain_yaml.read(text), yaml.safe_load(text)
    assert ours == theirs
    assert repr(ours) == repr(theirs)  # 1 is not 1.0, and order is the file's


@pytest.mark.parametrize(
    "text", ["a: 1\n   b: 2", "just text", "- a: 1\n b: 2", "a:\n  - 1\n  x", 'a: {"b: 1}']
)
def test_text_that_is_not_plain_is_refused(text):
    with pytest.raises(ValueError, match=r"\w"):
        plain_yaml.read(text)


FILE = """
family: F
models:
  - name: m
    category: dense
    recipes:
      - {seq_length: 4096, backend: mcore, nodes: 1, npus: 8}
"""


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        ("category: dense", "category: thick", "category"),
        ("seq_length: 4096", "seq_length: 0", "seq_length is 0, but must be positive"),
        ("seq_length: 4096", "seq_length: long", "seq_length"),
        ("backend: mcore", "backend: torch", "backend"),
        ("npus: 8", "npus: 8, tpp: 2", "tpp"),
        ("category: dense", "category: dense\n    colour: red", "colour"),
        ("models:", "model:", "models"),
        ("family: F", "family: [", "line 4"),
    ],
)
def test_wrong_files_are_refused(tmp_path, old, new, problem):
    path = tmp_path / "f.yaml"
    path.write_text(FILE)
    assert load([path]).models[0].recipes[0].npus == 8
    path.write_text(FILE.replace(old, new))
    with pytest.raises(InputError, match="not a valid catalog file") as error:
        load([path])
    assert error.value.problems[0].where == "f.yaml"
    assert problem in str(error.value)


def test_a_name_has_one_owner(tmp_path):
    first, second = tmp_path / "a.yaml", tmp_path / "b.yaml"
    first.write_text(FILE)
    second.write_text(FILE.replace("name: m", "name: n\n    aliases: [M]"))
    with pytest.raises(InputError, match="'M' is a name of both m and n"):
        load([first, second])


# ---------------------------------------------------------------- look-up


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("qwen3-8b", "qwen3-8b"),
        ("Qwen3-8B", "qwen3-8b"),
        ("Qwen/Qwen3-8B-Base", "qwen3-8b"),
        ("qwen/qwen3-8b-base", "qwen3-8b"),
        ("ZhipuAI/GLM-4.5-Air", "glm-4.5-air"),
        ("deepseek-v3", "deepseek-v3"),
        ("llama3.1-405b", "llama3.1-405b"),
    ],
)
def test_models_answer_to_all_their_names(name, expected):
    assert catalog().get(name).name == expected


def test_unknown_model_names_the_three_closest():
    with pytest.raises(InputError, match="unknown model 'qwen3-9b'") as error:
        catalog().get("qwen3-9b")
    near = catalog().suggest("qwen3-9b")
    assert len(near) == 3
    assert "qwen3-8b" in near
    assert all(name in error.value.problems[0].hint for name in near)


def test_folder_with_a_config_is_a_model(tmp_path):
    config = catalog().get("tiny-llama").config
    (tmp_path / "config.json").write_text(json.dumps(config))
    found = resolve_model(str(tmp_path))
    assert found.card is None
    assert found.architecture == catalog().get("tiny-llama").architecture


def test_folder_without_a_config_is_told(tmp_path):
    with pytest.raises(InputError, match=r"no config\.json"):
        resolve_model(str(tmp_path))


def test_model_without_a_known_shape_says_so():
    card = catalog().get("mamba3")
    assert card.count is None
    with pytest.raises(InputError, match="shape of mamba3 is not published"):
        _ = card.architecture


# ---------------------------------------------------------------- published facts


@pytest.mark.parametrize("row", PUBLISHED, ids=lambda row: row["row"])
def test_every_published_recipe_is_there(row):
    card = card_of(row)
    assert (card.family, card.category) == (row["family"], row["category"])
    assert (card.repositories.huggingface or "") == row["huggingface"]
    assert (card.repositories.modelscope or "") == row["modelscope"]
    found = [
        (r.seq_length, r.backend, r.nodes, r.npus, r.certification, r.supported_version or "")
        for r in card.recipes
    ]
    wanted = (
        int(row["seq_length"]), row["backend"], int(row["nodes"]), int(row["npus"]),
        row["certification"], row["supported_version"],
    )  # fmt: skip
    assert found.count(wanted) == 1


def test_nothing_else_is_there_but_our_own():
    ours = [card for card in catalog().models if card.family == "Tiny"]
    published = [card for card in catalog().models if card.family != "Tiny"]
    assert len(published) == len({row["key"] for row in PUBLISHED}) == 126
    assert sum(len(card.recipes) for card in published) == len(PUBLISHED) == 143
    assert all(not card.repositories.huggingface for card in ours)


@pytest.mark.parametrize(("name", "billions"), PUBLISHED_TOTALS.items())
def test_total_is_the_published_one(name, billions):
    assert catalog().get(name).count.total / 1e9 == pytest.approx(billions, rel=0.03)


@pytest.mark.parametrize(("name", "billions"), PUBLISHED_ACTIVE.items())
def test_active_is_about_the_published_one(name, billions):
    """Makers differ in whether they count the embedding: within 10 %."""
    assert catalog().get(name).count.active / 1e9 == pytest.approx(billions, rel=0.1)


def test_active_of_gpt_oss_is_exact_without_its_embedding():
    """Its model card gives 3.61B and says that the embedding is not in it."""
    count = catalog().get("gpt-oss-20b").count
    assert (count.active - count.items["embedding"]) / 1e9 == pytest.approx(3.61, abs=0.005)


def _named_size(row):
    """Billions in a variant's name: 8B, 7B1 (7.1), 30B-A3B, 8x7B, MoE-106B, 1T."""
    match = re.search(r"(?:(\d+)x)?(\d+(?:\.\d+)?)([BT])(\d)?", row["variant"])
    if match is None:
        return None
    times, number, unit, tenths = match.groups()
    size = float(f"{number}.{tenths}" if tenths else number)
    return size * int(times or 1) * (1000 if unit == "T" else 1)


@pytest.mark.parametrize("row", PUBLISHED, ids=lambda row: row["row"])
def test_count_is_about_what_the_name_says(row):
    card, named = card_of(row), _named_size(row)
    if named is None:
        assert card.name in NO_SIZE_IN_NAME
    elif card.name in OTHERWISE_NAMED:
        # an exception that is none any more must go
        assert abs(card.count.total / 1e9 / named - 1) > 0.15
    else:
        assert card.count.total / 1e9 == pytest.approx(named, rel=0.15)


def test_prediction_layers_weigh_what_is_published():
    """DeepSeek-V3: 14B in the repository, with a copy of the embedding and of the head (1.9B)."""
    count = catalog().get("deepseek-v3").count
    shared = 2 * 129280 * 7168
    assert (count.mtp + shared) / 1e9 == pytest.approx(14, rel=0.05)


def test_traps_are_avoided():
    """Where scripts and published configs disagree, configs hold what was published."""
    assert catalog().get("mistral-7b").architecture.sliding_window is None
    assert catalog().get("mistral-7b").architecture.rope.theta == 1e6
    assert catalog().get("llama3.1-405b").architecture.num_query_groups == 8
    assert catalog().get("llama3.1-405b").architecture.num_layers == 126
    assert catalog().get("deepseek-v3.2").architecture.sparse_attention.index_topk == 2048
    assert not catalog().get("deepseek-r1-distill-qwen-1.5b").architecture.tie_word_embeddings
    assert catalog().get("qwen2.5-math-1.5b").architecture.tie_word_embeddings
    assert catalog().get("deepseek-v2-lite").architecture.moe.num_groups is None
    assert catalog().get("deepseek-v2").architecture.moe.num_groups == 8
    assert not catalog().get("qwen2-57b-a14b").architecture.moe.norm_topk_prob
    assert catalog().get("chatglm3-6b").architecture.rope.interleaved
    assert not catalog().get("glm-4.5-air").architecture.rope.interleaved
    assert catalog().get("qwen-7b").architecture.intermediate_size == 11008
    assert not catalog().get("mamba2-hybrid-8b").architecture.gated_mlp
    assert catalog().get("glm-5.2").architecture.sparse_attention.indexer_layers[:4] == (0, 1, 2, 6)
    assert catalog().get("hunyuan-large").architecture.kv_sharing == 2


# ---------------------------------------------------------------- our own models


@pytest.mark.parametrize(
    "name",
    ["tiny-llama", "tiny-mistral", "tiny-qwen2", "tiny-qwen3", "tiny-qwen3-moe", "tiny-mixtral"],
)
def test_tiny_models_are_tiny_and_can_be_cut(name):
    card = catalog().get(name)
    arch = card.architecture
    assert 1e6 < card.count.total < 20e6
    assert arch.num_attention_heads % 4 == arch.num_query_groups % 4 == 0
    assert arch.num_layers % 4 == 0
    assert [r.nodes for r in card.recipes] == [1]


def test_demo_and_benchmark_models_have_their_sizes():
    assert catalog().get("tiny-qwen3").count.total / 1e6 == pytest.approx(10, rel=0.05)
    assert catalog().get("small-qwen3-60m").count.total / 1e6 == pytest.approx(60, rel=0.1)


def test_models_with_undescribed_parts_are_only_listed():
    incomplete = [c for c in catalog().models if c.config and c.architecture.extra]
    assert {"phi-3.5-mini", "phi-3.5-moe"} <= {card.name for card in incomplete}
    assert {support(card.architecture) for card in incomplete} == {"listed"}
