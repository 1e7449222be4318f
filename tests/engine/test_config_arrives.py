"""No dead options: each field of RunConfig, set to something else, is found in the engine.

Each arrival of `config_arrivals` is looked up twice, with the field set and with it left alone, and
must differ; so a look that would find the same whatever is set fails here.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import BaseModel

from msllm.config import RunConfig
from tests.engine.config_arrivals import ARRIVALS, CASES, END, Arrival

CASE = Path(__file__).parent / "config_case.py"
MUON = Path(__file__).parent / "megatron" / "muon_package"
MODEL = {
    "model_type": "qwen3",
    "hidden_size": 64,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 16,
    "intermediate_size": 96,
    "vocab_size": 300,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
}
MODELS = {
    "dense": MODEL,
    "narrow": MODEL | {"hidden_size": 32},
    "experts": MODEL
    | {
        "model_type": "qwen3_moe",
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 40,
        "norm_topk_prob": True,
        "router_aux_loss_coef": 0.01,
    },
}


def leaves(model: type[BaseModel] = RunConfig, prefix: str = "") -> set[str]:
    """Dotted names of all fields."""
    found: set[str] = set()
    for name, info in model.model_fields.items():
        inner = info.annotation
        if isinstance(inner, type) and issubclass(inner, BaseModel):
            found |= leaves(inner, f"{prefix}{name}.")
        else:
            found.add(f"{prefix}{name}")
    return found


def default_of(field: str) -> Any:
    found: Any = RunConfig(model="unnamed")
    for name in field.split("."):
        found = getattr(found, name)
    return found


class Places:
    """Folders and files that settings name in capitals."""

    def __init__(self, root: Path):
        self.root, self.made = root, 0
        for name, config in MODELS.items():
            (root / name).mkdir()
            (root / name / "config.json").write_text(json.dumps(config))
        self._documents(root / "FIRST", 10)
        self._documents(root / "SECOND", 150)
        write_tokenizer(root / "TOKENIZER")
        records = [{"text": "w w w", "body": "w " * 9}] * 2
        (root / "RAW.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))

    @staticmethod
    def _documents(prefix: Path, first: int) -> None:
        from msllm.engine.data.indexed import IndexedWriter

        with IndexedWriter(prefix, np.uint16) as writer:
            for number in range(40):
                document = np.array([first + number] * 8 + [END], np.uint16)
                writer.append(document, np.array([len(document)], np.int32))

    def settings(self, *parts: dict[str, Any]) -> dict[str, Any]:
        """Nested settings out of dotted ones, with an empty folder and places filled in."""
        self.made += 1
        fresh = self.root / str(self.made)
        fresh.mkdir()
        flat: dict[str, Any] = {
            "model": "dense",
            "device": "cpu",
            "out": "out",
            "data.paths": ["FIRST"],
            "data.seq_length": 16,
            "train.global_batch": 4,
        }
        for part in parts:
            flat |= part
        nested: dict[str, Any] = {}
        for field, value in flat.items():
            section, _, name = field.rpartition(".")
            (nested.setdefault(section, {}) if section else nested)[name] = self._fill(value, fresh)
        return nested

    def _fill(self, value: Any, fresh: Path) -> Any:
        if isinstance(value, list):
            return [self._fill(item, fresh) for item in value]
        if value in ("dense", "narrow", "experts", "FIRST", "SECOND", "TOKENIZER"):
            return str(self.root / value)
        if value == "RAW":
            return str(self.root / "RAW.jsonl")
        if value in ("out", "there", "CACHE", "ELSEWHERE"):
            return str(fresh / value)
        return value


def write_tokenizer(folder: Path) -> None:
    """A tokenizer of four words."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    vocabulary = {"<unk>": 0, "<pad>": 1, "<end>": END, "w": 3}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(["<unk>", "<pad>", "<end>"])
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<end>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> Places:
    return Places(tmp_path_factory.mktemp("places"))


@pytest.fixture(scope="module")
def reports(places: Places) -> dict[str, Any]:
    """What the engine has in each case, and in its twin that leaves the fields alone."""
    cases: dict[str, Any] = {}
    for name, (world, base) in CASES.items():
        values = {a.field: a.value for a in ARRIVALS if a.case == name}
        cases[f"{name}, alone"] = {"world": world, "settings": places.settings(base)}
        cases[name] = {"world": world, "settings": places.settings(base, values)}
    straight = cases["resume, alone"]["settings"]
    cases["resume"]["settings"]["checkpoint"]["resume"] = (
        straight["out"] + "/checkpoints/step-00000002"
    )
    cases["resume"]["settings"]["seed"] = 99
    path, out = places.root / "cases.json", places.root / "found.json"
    path.write_text(json.dumps(cases))
    packages = os.pathsep.join([str(MUON), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": packages}
    command = [sys.executable, "-W", "ignore", str(CASE), str(path), str(out)]
    job = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900)
    assert job.returncode == 0, job.stderr[-4000:]
    found: dict[str, Any] = json.loads(out.read_text())
    return found


def test_every_field_has_an_arrival() -> None:
    assert {arrival.field for arrival in ARRIVALS} == leaves()


@pytest.mark.parametrize("arrival", ARRIVALS, ids=lambda a: f"{a.field} {a.case}".strip())
def test_arrives(arrival: Arrival, places: Places, request: pytest.FixtureRequest) -> None:
    assert arrival.value != default_of(arrival.field)
    if isinstance(arrival.look, str):
        reports = request.getfixturevalue("reports")
        found = at(reports[arrival.case], arrival.look)
        alone = at(reports[f"{arrival.case}, alone"], arrival.look)
    else:
        changed = places.settings(arrival.given, {arrival.field: arrival.value})
        found = arrival.look(RunConfig.model_validate(changed))
        alone = arrival.look(RunConfig.model_validate(places.settings(arrival.given)))
    assert found == arrival.expected
    assert found != alone, "found whatever is set"


def test_random_state_comes_from_the_checkpoint(reports: dict[str, Any]) -> None:
    """Of a run resumed with another seed; nothing draws from it as long as there is no dropout."""
    assert reports["resume"]["randomness"] == reports["resume, alone"]["randomness"]
    assert reports["run"]["seed"] == 99
    assert reports["run"]["randomness"] != reports["resume"]["randomness"]


def at(report: Any, path: str) -> Any:
    """What a report has at a dotted path; numbers count into lists."""
    for name in path.split("."):
        report = report[int(name) if isinstance(report, list) else name]
    return report
