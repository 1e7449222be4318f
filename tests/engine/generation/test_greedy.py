"""`msllm generate` on a run that has learnt a text by heart, trained through the command line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from msllm.engine.data.tokens import Tokenizer
from msllm.engine.generation.greedy import split_prompt

VERSE = "one two three four five six seven eight nine ten eleven twelve "
CONFIG = {
    "model_type": "qwen3", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 128, "vocab_size": 320,
    "max_position_embeddings": 64, "rms_norm_eps": 1e-6, "rope_theta": 10000.0,
    "tie_word_embeddings": True, "hidden_act": "silu",
}  # fmt: skip


def msllm(*words: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "msllm", *map(str, words)],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=900,
    )


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("verse")
    (root / "model").mkdir()
    (root / "model" / "config.json").write_text(json.dumps(CONFIG))
    (root / "text.jsonl").write_text(json.dumps({"text": VERSE * 60}) + "\n")
    made = msllm("tokenizer", "train", "--data", root / "text.jsonl", "--vocab-size", 280,
                 "--out", root / "tok")  # fmt: skip
    assert made.returncode == 0, made.stderr
    trained = msllm(
        "pretrain", "--model", root / "model", "--data", root / "text.jsonl", "--tokenizer",
        root / "tok", "--device", "cpu", "--npus", 2, "--tp", 2, "--seq-length", 32, "--steps", 80,
        "--micro-batch", 8, "--global-batch", 8, "--lr", "5e-3", "--out", root / "run",
        "--set", f"data.cache_dir={root / 'cache'}",
    )  # fmt: skip
    assert trained.returncode == 0, trained.stderr
    return root / "run"


@pytest.mark.distributed
@pytest.mark.parametrize("prompt", ["three four", "three four "])
def test_goes_on_with_what_it_has_learnt(run, prompt):
    done = msllm("generate", "--model", run, "--prompt", prompt, "--max-tokens", 12)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("three four five six")


@pytest.mark.distributed
def test_says_what_is_missing(run, tmp_path):
    assert msllm("generate", "--model", run, "--prompt", "").returncode == 2
    nothing = msllm("generate", "--model", tmp_path, "--prompt", "one")
    assert nothing.returncode == 2
    assert "not a run's folder" in nothing.stderr


@pytest.mark.distributed
def test_a_last_space_is_left_to_the_first_word(run):
    tokenizer = Tokenizer(run.parent / "tok")
    tokens, allowed = split_prompt(tokenizer, "one ")
    assert tokenizer.decode(tokens) == "one"
    assert allowed
    assert all(tokenizer.decode([i]).startswith(" ") for i in allowed)
    assert split_prompt(tokenizer, "one") == (tokenizer.encode_batch(["one"])[0], [])
    assert split_prompt(tokenizer, "one  ")[1] == []
