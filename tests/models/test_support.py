"""The level of support, and that `support.json` cannot say more than tests prove."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import fields, replace
from pathlib import Path

import pytest

from msllm.models.architecture import Architecture, MoE
from msllm.models.catalog import catalog
from msllm.models.families import families
from msllm.models.support import (
    LEVELS,
    features,
    proven_levels,
    support,
    untrained_features,
)

CONFTEST = Path(__file__).parents[1] / "conftest.py"


def test_registry_holds_known_levels_of_known_types():
    for model_type, level in proven_levels().items():
        assert model_type in families()
        assert level in LEVELS


def test_plain_model_has_no_features():
    assert features(catalog().get("llama2-7b").architecture) == frozenset()


def test_model_beyond_its_familys_tests_is_only_listed():
    arch = catalog().get("tiny-qwen3").architecture
    assert untrained_features(arch) == []
    capped = replace(arch, attention_softcap=30.0)
    assert untrained_features(capped) == ["attention soft cap"]
    assert support(capped) == "listed"
    assert support(replace(arch, extra=("something",))) == "listed"
    assert support(None) == "listed"


# Sizes and numbers, which change no code path, and what is checked with another field.
NOT_FEATURES = {
    "model_type", "hidden_size", "num_layers", "num_attention_heads", "num_query_groups",
    "head_dim", "intermediate_size", "vocab_size", "max_position_embeddings", "norm_eps",
    "tie_word_embeddings", "initializer_range", "sliding_layers", "mtp_dense", "extra",
    "rope", "moe",
}  # fmt: skip


def test_every_field_of_an_architecture_is_a_feature_or_known_not_to_be():
    """A field added without a feature would let models through that nothing was tested on."""
    arch = catalog().get("llama2-7b").architecture
    for field in fields(Architecture):
        if field.name not in NOT_FEATURES:
            changed = replace(arch, **{field.name: _other(getattr(arch, field.name))})
            assert features(changed) != features(arch), field.name


def test_every_choice_of_a_router_is_a_feature():
    plain = MoE(num_experts=8, num_experts_per_tok=2, intermediate_size=64)
    arch = replace(catalog().get("llama2-7b").architecture, moe=plain)
    sizes = {"num_experts", "num_experts_per_tok", "intermediate_size", "aux_loss_coef"}
    # softmax after the choice is renormalized softmax; groups go by three figures, and SparseMixer
    # by its jitter
    same = {"softmax_after_topk", "topk_groups", "group_best", "router_jitter"}
    for field in fields(MoE):
        if field.name not in sizes | same:
            value = 4 if field.name == "num_groups" else _other(getattr(plain, field.name))
            changed = replace(arch, moe=replace(plain, **{field.name: value}))
            assert features(changed) != features(arch), field.name


def _other(value):
    """Some other value of the same kind; for parts that are None, anything."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, str):
        return f"not {value}"
    if isinstance(value, int | float):
        return value + 2
    if isinstance(value, tuple):
        return (1,)
    return 3


# ---------------------------------------------------------------- the hook in tests/conftest.py

PROVING = """
import pytest

@pytest.mark.proves("trains", "llama")
@pytest.mark.parametrize("tp", [1, 2])
def test_training(tp):
    assert tp {condition}

@pytest.mark.proves("trains", "qwen3")
def test_other():
    pass
"""
BOTH = {"llama": "trains", "qwen3": "trains"}


@pytest.fixture
def suite(tmp_path):
    """Run a small test suite under a copy of the hook: (passing condition, said) -> (rc, text)."""
    shutil.copy(CONFTEST, tmp_path / "conftest.py")
    (tmp_path / "pytest.ini").write_text("[pytest]\naddopts = --strict-markers\n")
    said_file = tmp_path / "support.json"

    def run(condition, said, *flags):
        (tmp_path / "test_it.py").write_text(PROVING.format(condition=condition))
        said_file.write_text(json.dumps(said))
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider",
             "--support-file", str(said_file), *flags],
            cwd=tmp_path, capture_output=True, text=True, timeout=900,
            env={**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        )  # fmt: skip
        return done.returncode, done.stdout + done.stderr, json.loads(said_file.read_text())

    return run


def test_run_passes_if_the_file_says_what_tests_prove(suite):
    assert suite("> 0", BOTH)[0] == 0
    assert suite("> 0", BOTH, "-p", "xdist", "-n", "2")[0] == 0


@pytest.mark.parametrize(
    ("condition", "said", "complaint"),
    [
        ("> 0", {**BOTH, "gemma": "trains"}, "says gemma: trains; tests prove listed"),
        ("> 0", {"llama": "trains"}, "says qwen3: listed; tests prove trains"),
        ("> 1", BOTH, "says llama: trains; tests prove listed"),
    ],
)
def test_run_fails_if_the_file_says_anything_else(suite, condition, said, complaint):
    status, text, after = suite(condition, said)
    assert status == 1
    assert complaint in text
    assert after == said


def test_workers_bring_their_outcomes_home(suite):
    status, text, _ = suite("> 1", BOTH, "-p", "xdist", "-n", "2")
    assert status == 1
    assert "says llama: trains; tests prove listed" in text


def test_part_of_the_tests_judges_only_what_it_ran(suite):
    assert suite("> 0", {**BOTH, "gemma": "trains"}, "-k", "training")[0] == 0
    assert suite("> 1", BOTH, "-k", "other")[0] == 0


def test_update_writes_what_was_proved(suite):
    assert suite("> 0", {"gemma": "trains"}, "--update-support")[2] == BOTH
    assert suite("> 1", BOTH, "--update-support")[2] == {"qwen3": "trains"}
