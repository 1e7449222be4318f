"""`msllm plan`: what it prints, and what it refuses."""

from __future__ import annotations

import json
from typing import Any

import pytest

from msllm.cli import app


def planned(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert app.run(["plan", *arguments, "--format", "json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_an_exact_layout_as_json(capsys):
    sizes = ("--model", "tiny-qwen3-moe", "--npus", "4", "--tp", "2", "--ep", "2", "--pp", "2")
    rest = ("--seq-length", "256", "--micro-batch", "4", "--global-batch", "16")
    found = planned(capsys, *sizes, *rest)
    assert found["layout"] == {
        "tp": 2, "pp": 2, "vpp": 1, "cp": 1, "ep": 2, "etp": 1, "dp": 1,
    }  # fmt: skip
    assert found["fits"]
    assert len(found["stages"]) == 2
    for stage in found["stages"]:
        items = dict(stage["memory_bytes"])
        assert items.pop("total") == sum(items.values())
        assert items["gradients"] >= 4 * stage["parameters"]
    assert found["tokens"] == 16 * 256
    assert found["step_time_s"] == pytest.approx(sum(found["seconds"].values()))
    assert {(c["name"], c["group"]) for c in found["collectives"]} >= {
        ("all-gather", "tp"), ("all-to-all", "ep"), ("send", "pp"),
    }  # fmt: skip
    uneven = planned(capsys, *sizes, *rest, "--imbalance", "2")
    for before, after in zip(found["stages"], uneven["stages"], strict=True):
        assert after["memory_bytes"]["activations"] > before["memory_bytes"]["activations"]


def test_a_search_as_tables(capsys):
    assert app.run(["plan", "--model", "tiny-qwen3", "--npus", "2", "--recompute", "none"]) == 0
    shown = capsys.readouterr().out
    for words in (
        "layouts, best first", "recipe", "instead of it", "not legal", "memory of a device",
        "time of a step", "tokens/s", "not measured",
    ):  # fmt: skip
        assert words in shown, words


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--model", "tiny-qwen3", "--device-model", "Ascend910B9"), "closest are Ascend910B"),
        (("--model", "deepseek-v3", "--nodes", "1", "--npus", "8"), "it takes about 256 of them"),
        (("--model", "tiny-qwen3", "--npus", "2", "--tp", "3"), "does not divide"),
        (("--model", "tiny-qwen3", "--imbalance", "0.5"), "at least 1"),
        (("--model", "tiny-qwen3", "--format", "xml"), "use table or json"),
        (("--model", "tiny-qwen3", "--device", "cpu"), "is no cpu device"),
        (("--model", "mamba3-nothing"), "unknown model"),
        (("--model", "baichuan-13b", "--nodes", "1", "--npus", "8"), "can't train it yet"),
        (("--model", "tiny-qwen3", "--set", "train.nothing=1"), "unknown setting"),
    ],
)  # fmt: skip
def test_refusals(capsys, arguments, words):
    assert app.run(["plan", *arguments]) == 2
    shown = capsys.readouterr()
    assert words in shown.err
    assert shown.out == ""


def test_a_layout_that_does_not_fit_is_shown_and_refused(capsys):
    arguments = [
        "--model", "qwen3-8b", "--npus", "8", "--tp", "2", "--micro-batch", "16",
        "--global-batch", "64", "--recompute", "none",
    ]  # fmt: skip
    assert app.run(["plan", *arguments]) == 2
    shown = capsys.readouterr()
    assert "DOES NOT FIT" in shown.out
    assert "--recompute full" in shown.err
