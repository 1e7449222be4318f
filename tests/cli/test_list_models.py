"""`msllm list-models`: filters, formats, widths, speed, and what it must not import."""

from __future__ import annotations

import csv
import io
import json
import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

from msllm.cli.app import run
from msllm.cli.list_models import short
from msllm.models.catalog import catalog

MSLLM = Path(sys.executable).parent / "msllm"


@pytest.fixture
def listed(capsys):
    """Run list-models with flags; the models as JSON has them."""

    def call(*flags):
        status = run(["list-models", "--format", "json", *flags])
        assert status == 0
        return json.loads(capsys.readouterr().out)

    return call


@pytest.fixture
def shown(capsys):
    """Run list-models with flags: (status, standard output, standard error)."""

    def call(*flags):
        status = run(["list-models", *flags])
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return call


def names(models):
    return {model["name"] for model in models}


# ---------------------------------------------------------------- filters


def test_all_models_with_what_others_rely_on(listed):
    models = listed()
    assert len(models) == len(catalog().models)
    wanted = {"name", "family", "category", "parameters", "active_parameters", "support", "recipes"}
    assert all(wanted <= set(model) for model in models)
    qwen = next(model for model in models if model["name"] == "qwen3-30b-a3b")
    assert qwen["parameters"] == 30532122624  # as its published tensors add up
    assert qwen["active_parameters"] < 3.5e9
    assert [recipe["backend"] for recipe in qwen["recipes"]] == ["mcore", "fsdp2"]


def test_category(listed):
    assert {m["category"] for m in listed("--category", "moe")} == {"moe"}
    assert names(listed("--category", "SSM")) == {
        "mamba2-2.7b", "mamba2-8b", "mamba2-hybrid-8b", "mamba3",
    }  # fmt: skip


def test_family_whatever_its_case(listed):
    assert names(listed("--family", "gemma2")) == {"gemma-2-9b", "gemma-2-27b"}


def test_backend_keeps_the_recipes_that_msllm_trains_on_it(listed):
    models = listed("--backend", "fsdp2")
    assert {r["backend"] for m in models for r in m["recipes"]} == {"fsdp2"}
    legacy = [r for m in listed("--backend", "mcore") for r in m["recipes"]]
    assert {r["backend"] for r in legacy} == {"mcore", "legacy"}


def test_search_looks_into_all_names(listed):
    assert names(listed("--search", "NousResearch")) == {"llama2-13b"}
    assert "qwen2.5-coder-7b" in names(listed("--search", "coder"))
    assert listed("--search", "no such model") == []


def test_sizes(listed):
    small = listed("--max-params", "1B")
    assert all(m["parameters"] <= 1e9 for m in small)
    assert "qwen3-0.6b" in names(small)
    assert "llama3.2-1b" not in names(small)
    between = listed("--min-params", "300b", "--max-params", "1T")
    assert {"llama3.1-405b", "deepseek-v3", "ring-1t"} <= names(between)
    assert "mamba3" not in names(listed("--min-params", "0"))  # its size is not known


def test_support(listed):
    assert {m["support"] for m in listed("--support", "listed")} == {"listed"}


def test_filters_combine(listed):
    found = listed(
        "--category", "moe", "--backend", "fsdp2", "--max-params", "100B", "--search", "qwen"
    )
    assert names(found) == {"qwen3-30b-a3b"}


@pytest.mark.parametrize(
    ("flags", "problem", "hint"),
    [
        (("--category", "mo"), "unknown category 'mo'", "dense, moe, linear, ssm"),
        (("--family", "quen3"), "unknown family 'quen3'", "Qwen3"),
        (("--backend", "megatron"), "unknown backend 'megatron'", "mcore, fsdp2"),
        (("--support", "full"), "unknown support 'full'", "listed, trains"),
        (("--format", "xml"), "unknown format 'xml'", "table, json, csv, md"),
        (("--max-params", "ten"), "'ten' is not a number of parameters", "10B"),
        (("--min-params", "-1B"), "'-1B' is not a number of parameters", "10B"),
    ],
)
def test_wrong_values_are_refused(shown, flags, problem, hint):
    status, out, err = shown(*flags)
    assert status == 2
    assert out == ""
    assert problem in err
    assert " ".join(flags) in err
    assert hint in err


# ---------------------------------------------------------------- formats


def test_table_closes_with_the_counts(shown):
    _, out, _ = shown()
    models = catalog().models
    recipes = sum(len(card.recipes) for card in models)
    closing = f"{len(models)} models, {recipes} recipes, {len(catalog().families)} families"
    assert out.splitlines()[-1] == closing
    assert shown("--family", "QwQ")[1].splitlines()[-1] == "1 model, 1 recipe, 1 family"
    assert "no model fits" in shown("--search", "no such model")[1]


def test_table_has_every_fact(shown):
    _, out, _ = shown("--search", "qwen3-30b")
    header, line = out.splitlines()[:2]
    assert header.split() == [
        "family", "model", "params", "active", "category", "backend", "seq", "cluster", "cert",
        "support",
    ]  # fmt: skip
    assert line.split()[:9] == [
        "Qwen3", "qwen3-30b-a3b", "30.5B", "3.35B", "moe", "mcore,fsdp2", "4K", "2x8,1x16",
        "pass,test",
    ]  # fmt: skip


def test_csv_is_whole(shown):
    _, out, _ = shown("--format", "csv")
    rows = list(csv.DictReader(io.StringIO(out)))
    assert len(rows) == len(catalog().models)
    by_name = {row["model"]: row for row in rows}
    assert by_name["deepseek-v3"]["parameters"] == "671026404352"
    assert by_name["llama3.1-405b"]["seq"] == "8K,128K"
    assert by_name["mamba3"]["parameters"] == ""


def test_markdown_is_a_table(shown):
    _, out, _ = shown("--format", "md", "--family", "Mixtral")
    lines = out.splitlines()
    assert lines[1].replace(" ", "") == "|---" * 10 + "|"
    assert all(line.count("|") == 11 for line in lines[:4])


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (None, "-"), (999, "999"), (1000, "1.00K"), (8_190_735_360, "8.19B"),
        (70_553_706_496, "70.6B"), (671_026_404_352, "671B"), (999_705_000_000, "1.00T"),
        (99_960_000, "100M"), (9_996_000, "10.0M"),
    ],
)  # fmt: skip
def test_numbers_have_three_digits(number, text):
    assert short(number) == text


# ---------------------------------------------------------------- terminals


def in_terminal(columns, *flags, **environment):
    """What the command writes to a terminal of so many columns."""
    ours, theirs = pty.openpty()
    env = {**os.environ, "COLUMNS": str(columns), "TERM": "xterm", **environment}
    process = subprocess.Popen(
        [MSLLM, "list-models", *flags], stdout=theirs, stderr=theirs, env=env
    )
    os.close(theirs)
    text = b""
    while True:
        try:
            chunk = os.read(ours, 65536)
        except OSError:
            break
        if not chunk:
            break
        text += chunk
    assert process.wait(60) == 0
    os.close(ours)
    return text.decode().replace("\r\n", "\n")


@pytest.mark.parametrize("columns", [80, 120, 160])
def test_table_fits_the_terminal(columns):
    text = in_terminal(columns, NO_COLOR="1")
    assert "\033" not in text
    assert max(map(len, text.splitlines())) <= columns
    for card in catalog().models:
        assert f"{card.name} " in text


def test_colour_is_only_for_terminals(shown):
    assert in_terminal(160).startswith("\033[1m")
    assert "\033" not in shown()[1]


# ---------------------------------------------------------------- speed

HEAVY = ("torch", "transformers", "megatron", "numpy", "yaml", "rich.table")
MODULES = 400
"""Loaded for these commands, about 310 when this was written: what their 0.3 s are spent on."""


@pytest.mark.parametrize("command", [["list-models"], ["show-model", "qwen3-8b"]])
def test_nothing_heavy_is_imported(command):
    """cases C53: not even by accident, through another module. Seconds are for the benchmarks."""
    script = (
        "import sys; from msllm.cli.app import run; status = run(sys.argv[1:]); "
        f"sys.exit(status or ' '.join(m for m in {HEAVY} if m in sys.modules) "
        f"or (len(sys.modules) > {MODULES} and f'{{len(sys.modules)}} modules'))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, *command], capture_output=True, text=True, timeout=900
    )
    assert done.stderr.strip() == ""
    assert len(done.stdout.splitlines()) > 20
