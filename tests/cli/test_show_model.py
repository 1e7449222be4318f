"""`msllm show-model`: what it says of a model in the catalog and of one in a folder."""

from __future__ import annotations

import json
import shlex

import pytest

from msllm.cli.app import run
from msllm.cli.show_model import commands, show_model, subject, untrained
from msllm.models.catalog import catalog
from msllm.models.support import missing_for, proven_levels


@pytest.fixture
def shown(capsys):
    """Run show-model: (status, standard output, standard error)."""

    def call(*arguments):
        status = run(["show-model", *arguments])
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return call


def test_page_has_shape_parameters_recipes_and_notes(shown):
    status, out, _ = shown("DeepSeek-V3")
    assert status == 0
    assert "deepseek-ai/DeepSeek-V3" in out
    lines = {" ".join(line.split()) for line in out.splitlines()}
    assert "num_layers 61" in lines
    assert "moe.num_experts 256" in lines
    assert "mla.q_lora_rank 1536" in lines
    assert "routed experts 653,908,770,816 97.4 %" in lines
    assert "total 671,026,404,352 671B" in lines
    assert "active a token 37,552,282,624 37.6B" in lines
    assert any(line.startswith("4K mcore 64x8 4 8 1 32 1 1 3840 1e-05 full bf16") for line in lines)
    assert any(line.startswith("sft lora 8 16K 8x16") for line in lines)
    assert "- Unlike GLM-4.5, Air has no norm of queries and keys" in shown("glm-4.5-air")[1]


def test_breakdown_adds_up(shown):
    for name in ("qwen3-30b-a3b", "mamba2-hybrid-8b", "deepseek-v4-flash", "longcat-flash"):
        record = json.loads(shown(name, "--format", "json")[1])
        assert sum(record["breakdown"].values()) == record["parameters"]


def test_json_is_the_whole_card(shown):
    record = json.loads(shown("qwen3-8b", "--format", "json")[1])
    card = catalog().get("qwen3-8b")
    assert record["name"] == "qwen3-8b"
    assert record["parameters"] == 8190735360
    assert record["architecture"]["qk_norm"] == "head"
    assert record["config"] == card.config
    assert len(record["recipes"]) == len(card.recipes)
    assert len(record["tune"]) == len(card.tune)
    assert record["repositories"]["huggingface"] == "Qwen/Qwen3-8B-Base"


def test_folder(shown, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(catalog().get("tiny-qwen3").config))
    status, out, _ = shown(str(tmp_path))
    assert status == 0
    assert "total" in out
    record = json.loads(shown(str(tmp_path), "--format", "json")[1])
    assert record["parameters"] == catalog().get("tiny-qwen3").count.total
    assert record["recipes"] == []


def test_model_without_a_shape(shown):
    status, out, _ = shown("mamba3")
    assert status == 0
    assert "not published" in out
    assert json.loads(shown("mamba3", "--format", "json")[1])["parameters"] is None


@pytest.mark.parametrize("card", catalog().models, ids=lambda card: card.name)
def test_every_model_can_be_shown(card, capsys):
    show_model(card.name)
    assert card.name in capsys.readouterr().out
    show_model(card.name, "json")
    assert json.loads(capsys.readouterr().out)["name"] == card.name


def test_unknown_name_gets_the_three_closest(shown):
    status, out, err = shown("qwen3-9b")
    assert (status, out) == (2, "")
    assert "unknown model 'qwen3-9b'" in err
    for name in catalog().suggest("qwen3-9b"):
        assert name in err


@pytest.mark.parametrize(
    ("content", "problem"),
    [("{", "not valid JSON"), ('{"model_type": "qwen4"}', "unknown model type 'qwen4'")],
)
def test_broken_folder_is_refused(shown, tmp_path, content, problem):
    (tmp_path / "config.json").write_text(content)
    status, _, err = shown(str(tmp_path))
    assert status == 2
    assert problem in err


def test_unknown_format_is_refused(shown):
    status, _, err = shown("qwen3-8b", "--format", "yaml")
    assert status == 2
    assert "use table, json" in err


# ---------------------------------------------------------------- the command that trains it


def flags_of(command):
    words = shlex.split(command)
    assert words[:2] == ["msllm", "pretrain"]
    flags = dict(zip(words[2::2], words[3::2], strict=True))
    return {name: flags.get(name) for name in flags}


@pytest.mark.parametrize("name", ["tiny-qwen3", "llama3-8b", "qwen3-30b-a3b", "llama3.1-405b"])
def test_command_is_the_recipe(name):
    model = subject(name)
    for command, recipe in zip(commands(model), model.card.recipes, strict=True):
        flags = flags_of(command)
        assert flags["--model"] == name
        nodes, npus = recipe.cluster
        assert (int(flags.get("--nodes", 1)), int(flags["--npus"])) == (nodes, npus)
        for size in ("tp", "pp", "vpp", "ep", "cp"):
            assert int(flags.get(f"--{size}", 1)) == getattr(recipe, size)
        assert int(flags["--global-batch"]) == recipe.global_batch
        assert float(flags["--lr"]) == recipe.lr


def test_command_is_for_the_cluster_its_sizes_fit():
    """The published 405B recipe at 8K recommends 8x8 but its script cuts for 16x16."""
    first, *_ = commands(subject("llama3.1-405b"))
    assert flags_of(first)["--nodes"] == "16"
    assert flags_of(first)["--npus"] == "16"


def test_trained_models_show_a_command_and_others_why_not(shown):
    for card in catalog().models:
        reasons = untrained(subject(card.name))
        assert bool(reasons) == (card.support == "listed"), card.name
    assert untrained(subject("mamba2-2.7b")) == ["no test proves training of mamba2 yet"]
    assert "no test proves training of mamba2 yet" in shown("mamba2-2.7b")[1]


TRAINED = [card for card in catalog().models if card.support != "listed"]


@pytest.mark.parametrize("card", TRAINED, ids=lambda card: card.name)
def test_commands_are_marked_exactly_where_a_run_would_refuse_them(card):
    from msllm.config import DataConfig, LaunchConfig, LayoutConfig, RunConfig, TrainConfig
    from msllm.engine import preflight

    for recipe in card.recipes:
        nodes, npus = recipe.cluster
        sizes = {size: getattr(recipe, size) for size in ("tp", "pp", "vpp", "cp", "ep", "etp")}
        config = RunConfig(
            model=card.name,
            backend=recipe.trained_on,
            device="cpu",
            layout=LayoutConfig(**sizes),
            launch=LaunchConfig(nodes=nodes, npus=npus, node_rank=0, force=True),
            data=DataConfig(
                paths=["mock"], seq_length=recipe.script_seq_length or recipe.seq_length
            ),
            train=TrainConfig(micro_batch=recipe.micro_batch, global_batch=recipe.global_batch),
        )
        told = " ".join(problem.problem for problem in preflight.check(config, {}))
        lacks = missing_for(recipe.trained_on, recipe.cp)
        assert ("not part of this version" in told) == bool(lacks), told
        # whatever else is wrong is not the recipe's sizes
        assert "divide" not in told


def test_commands_this_version_refuses_are_comments(shown):
    lines = [line.strip() for line in shown("qwen3-32b")[1].splitlines()]
    start = lines.index("train it")
    assert lines[start + 1].startswith("msllm pretrain")
    assert "fsdp2 backend is missing" in lines[start + 2]
    assert lines[start + 3].startswith("# msllm pretrain")
    first, second = json.loads(shown("qwen3-32b", "--format", "json")[1])["commands"]
    assert (first["missing"], second["missing"]) == ([], ["the fsdp2 backend"])


@pytest.mark.skipif("qwen3" not in proven_levels(), reason="no test proves training yet")
def test_page_of_a_trained_model_ends_with_its_command(shown):
    assert shown("tiny-qwen3")[1].splitlines()[-1].strip().startswith("msllm pretrain --model")
