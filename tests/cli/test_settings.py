"""Where settings come from, which wins, and what wrong ones are told."""

from __future__ import annotations

from pathlib import Path

import pytest

from msllm.cli import recipe, setting_names
from msllm.cli.flags import FLAGS, settings_of
from msllm.cli.setting_names import PATHS, suggestion
from msllm.cli.settings import Setting, resolve
from msllm.config import RunConfig, write_run
from msllm.errors import InputError
from msllm.models.catalog import ModelCard, Recipe, catalog


@pytest.fixture(autouse=True)
def no_scheduler(monkeypatch):
    for name in ("SLURM_NODEID", "PET_NNODES", "PET_NODE_RANK", "MASTER_ADDR"):
        monkeypatch.delenv(name, raising=False)


def flags(**values) -> dict[str, Setting]:
    return settings_of(values)


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "my.yaml"
    path.write_text(text)
    return path


def problems_of(tmp_path, text: str, assignments=()) -> list[tuple[str, str, str]]:
    """All problems of a file, with its name shortened."""
    file = written(tmp_path, text)
    try:
        found = resolve({}, list(assignments), file).problems
    except InputError as error:
        found = error.problems
    return [(p.problem, p.where.replace(str(file), "FILE"), p.hint) for p in found]


# --- precedence -------------------------------------------------------------------------------


def test_flags_win_over_set_over_file_over_recipe_over_defaults(tmp_path):
    file = written(
        tmp_path, "model: tiny-qwen3\ntrain:\n  lr: 1e-1\n  beta2: 0.7\n  eps: 3e-9\n  steps: 7\n"
    )
    resolved = resolve(
        flags(lr="1e-3"),
        ["train.beta2=0.8", "train.lr=1e-2"],
        file,
        recipe.fill(lambda name: "npu"),
    )
    train = resolved.config.train
    assert (train.lr, resolved.sources["train.lr"]) == (1e-3, "--lr")
    assert (train.beta2, resolved.sources["train.beta2"]) == (0.8, "--set")
    assert (train.eps, resolved.sources["train.eps"]) == (3e-9, "my.yaml:5")
    assert (train.steps, resolved.sources["train.steps"]) == (7, "my.yaml:6")
    assert train.micro_batch == 4
    assert resolved.sources["train.micro_batch"] == "recipe (mcore, 256 tokens)"
    assert (train.muon_momentum, resolved.sources["train.muon_momentum"]) == (0.95, "default")
    assert set(resolved.sources) == set(PATHS)


def test_a_runs_file_repeats_it(tmp_path):
    """Every field, also those that are empty or that a recipe would fill."""
    config = RunConfig.model_validate(
        {
            "model": "tiny-qwen3",
            "out": "runs/x",
            "layout": {"tp": 2, "pp_layout": None},
            "launch": {"npus": 2},
            "data": {"paths": ["0.5:a", "0.5:b"], "tokenizer": "tok", "seq_length": 77},
            "train": {"lr": 2e-5, "recompute_modules": ["mlp", "core_attn"], "global_batch": None},
        }
    )
    write_run(config, tmp_path / "run.yaml")
    again = resolve({}, [], tmp_path / "run.yaml", recipe.fill(lambda name: "cpu"))
    assert again.config == config
    assert again.problems == ()


@pytest.mark.parametrize("text", ["2e-5", "2E-5", "2.0e-5", "0.00002"])
def test_exponents_are_numbers_everywhere(tmp_path, text):
    file = written(tmp_path, f"model: m\ntrain: {{lr: {text}}}\n")
    assert resolve({}, [], file).config.train.lr == 2e-5
    assert resolve(flags(model="m"), [f"train.lr={text}"], None).config.train.lr == 2e-5
    assert resolve(flags(model="m", lr=text), [], None).config.train.lr == 2e-5


def test_values_of_every_kind_from_set():
    config = resolve(
        flags(model="m"),
        [
            "data.paths=[a, b]",
            "layout.pp_layout=[1, 2]",
            "launch.force=true",
            "train.global_batch=null",
            "data.tokenizer=some/dir",
            "log.wandb_project=a=b",
            "train.recompute_modules=[mlp, moe]",
        ],
        None,
    ).config
    assert config.data.paths == ["a", "b"]
    assert config.layout.pp_layout == [1, 2]
    assert config.launch.force
    assert config.train.global_batch is None
    assert config.data.tokenizer == Path("some/dir")
    assert config.log.wandb_project == "a=b"
    assert config.train.recompute_modules == ["mlp", "moe"]


# --- wrong settings ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "learning_rate: 1e-4",
            ("unknown setting learning_rate", "FILE:2", "it is called train.lr here"),
        ),
        (
            "train:\n  num-steps: 3",
            ("unknown setting train.num-steps", "FILE:3", "it is called train.steps here"),
        ),
        (
            "train.num-steps: 3",
            ("unknown setting train.num-steps", "FILE:2", "it is called train.steps here"),
        ),
        ("train:\n  micro-batch: 3",
         ("unknown setting train.micro-batch", "FILE:3", "write train.micro_batch")),
        ("steps: 3", ("unknown setting steps", "FILE:2", "write train.steps")),
        ("layout:\n  lr: 3", ("unknown setting layout.lr", "FILE:3", "write train.lr")),
        (
            "data:\n  tokenzier: x",
            ("unknown setting data.tokenzier", "FILE:3",
             "did you mean data.tokenizer?"),
        ),
        ("train: 3", ("train is a group of settings, not a value", "FILE:2", "it holds steps, ")),
        ("seed: x", ("seed is 'x', but must be a whole number", "my.yaml:2 (seed)", "")),
        ("seed: 1.5", ("seed is 1.5, but must be a whole number", "my.yaml:2 (seed)", "")),
        ("seed: -1", ("seed is -1, but must be at least 0", "my.yaml:2 (seed)", "")),
        ("train:\n  lr: 0", ("train.lr is 0, but must be greater than 0", "my.yaml:3 ", "")),
        ("train:\n  lr: .inf", ("train.lr is inf, but must be finite", "my.yaml:3 ", "")),
        ("train:\n  beta1: 1", ("train.beta1 is 1, but must be less than 1", "my.yaml:3", "")),
        ("dtype: fp8", ("dtype is 'fp8', but must be one of 'bf16' or 'fp32'", "my.yaml:2", "")),
        ("data:\n  paths: a", ("data.paths is 'a', but must be a list", "my.yaml:3", "")),
        ("data:\n  paths: [1]", ("data.paths is [1], but must be text", "my.yaml:3", "")),
        ("data:\n  shuffle: [1]", ("data.shuffle is [1], but must be true or false", "", "")),
        ("seed: 1\nseed: 2", ("seed is given twice", "FILE:3", "also at my.yaml:2")),
    ],
)  # fmt: skip
def test_what_a_wrong_file_is_told(tmp_path, text, expected):
    ((problem, where, hint),) = problems_of(tmp_path, f"model: m\n{text}\n")
    assert problem == expected[0]
    assert where.startswith(expected[1])
    assert hint.startswith(expected[2])


@pytest.mark.parametrize(
    ("text", "problem", "where"),
    [
        ("", "the file is empty", "--config FILE"),
        ("# nothing\n", "the file is empty", "--config FILE"),
        ("- model: m\n", "not a mapping of settings", "FILE:1"),
        ("word\n", "not a mapping of settings", "FILE:1"),
        ("model: m\ntrain:\n  lr: 1\n steps: 3\n", "not valid YAML", "FILE:4"),
        ("model: m\n\tseed: 3\n", "not valid YAML", "FILE:2"),
        ("model: 'm\n", "not valid YAML", "FILE:2"),
    ],
)
def test_files_that_are_no_settings(tmp_path, text, problem, where):
    found = problems_of(tmp_path, text)
    assert found[0][0].startswith(problem)
    assert found[0][1] == where


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(InputError, match="cannot read it: No such file"):
        resolve(flags(), [], tmp_path / "none.yaml")


def test_an_empty_section_is_no_error(tmp_path):
    assert problems_of(tmp_path, "model: m\ntrain:\nlog: {}\n") == []


def test_all_problems_of_all_sources_come_together(tmp_path):
    file = written(tmp_path, "model: m\nlearning_rate: 1\ntrain:\n  steps: many\n")
    resolved = resolve(flags(tp="0"), ["seed=x", "novalue", "train=3", "train.lrr=1"], file)
    assert [p.problem for p in resolved.problems] == [
        "unknown setting learning_rate",
        "no value",
        "train is a group of settings, not a value",
        "unknown setting train.lrr",
        "seed is 'x', but must be a whole number",
        "layout.tp is '0', but must be greater than 0",
        "train.steps is 'many', but must be a whole number",
    ]
    # the rest still makes a config, so that more can be checked
    assert resolved.config.model == "m"
    assert resolved.config.layout.tp == 1


def test_a_model_must_be_named(tmp_path):
    with pytest.raises(InputError) as caught:
        resolve(flags(steps="x"), [], None)
    assert {p.problem for p in caught.value.problems} == {
        "no model was named",
        "train.steps is 'x', but must be a whole number",
    }


@pytest.mark.parametrize("name", setting_names.ELSEWHERE)
def test_names_of_other_software_lead_to_real_settings(name):
    assert setting_names.ELSEWHERE[name] in PATHS
    assert setting_names.ELSEWHERE[name] in suggestion(name)


# --- flags ------------------------------------------------------------------------------------


def test_every_flag_is_for_a_setting_and_no_two_for_one():
    paths = [flag.path for flag in FLAGS]
    assert set(paths) <= set(PATHS)
    assert len(set(paths)) == len(paths) == len({flag.name for flag in FLAGS})


def test_the_contracts_flags_are_there():
    names = {flag.name for flag in FLAGS}
    assert names >= {
        "--model", "--data", "--nodes", "--npus", "--tp", "--pp", "--vpp", "--ep", "--cp",
        "--steps", "--tokenizer", "--seq-length", "--micro-batch", "--global-batch", "--lr",
        "--dtype", "--seed", "--device", "--backend", "--out", "--resume", "--save-interval",
    }  # fmt: skip


def test_flags_become_settings():
    found = flags(
        model="m", tp="2", pp_layout="1, 2", data=["a", "b"], force=False, tensorboard=None
    )
    assert {path: s.value for path, s in found.items()} == {
        "model": "m",
        "layout.tp": "2",
        "layout.pp_layout": ["1", "2"],
        "data.paths": ["a", "b"],
        "launch.force": False,
    }
    config = resolve(found, [], None).config
    assert config.layout.pp_layout == [1, 2]


# --- recipes and derived values ---------------------------------------------------------------


def from_recipe(kind="npu", **values):
    return resolve(flags(**values), [], None, recipe.fill(lambda name: kind))


def test_without_a_cluster_the_recipes_is_taken():
    card = catalog().get("qwen3-8b")
    config = from_recipe(model="qwen3-8b").config
    (published, *_) = card.recipes
    assert (config.launch.nodes, config.launch.npus) == published.cluster
    for name in ("tp", "pp", "vpp", "cp", "ep", "etp"):
        assert getattr(config.layout, name) == getattr(published, name)
    assert config.train.global_batch == published.global_batch
    assert config.train.lr == published.lr
    assert config.data.seq_length == published.seq_length


def test_the_recipes_sizes_hold_for_its_cluster():
    resolved = from_recipe(model="qwen3-8b", nodes="1", npus="8")
    assert resolved.config.layout.pp == 2
    assert resolved.sources["layout.pp"].startswith("recipe")


def test_on_another_number_of_devices_sizes_are_derived():
    resolved = from_recipe(model="llama3.1-70b", npus="2", nodes="1")
    assert resolved.config.launch.world_size == 2
    layout = resolved.config.layout
    assert (layout.tp * layout.pp, resolved.sources["layout.tp"]) == (2, "derived (2 devices)")
    small = from_recipe(model="tiny-qwen3", npus="2")
    assert (small.config.layout.tp, small.config.layout.pp) == (1, 1)
    assert small.sources["layout.tp"] == "derived (2 devices)"


def test_sizes_that_were_given_are_never_changed():
    resolved = from_recipe(model="qwen3-8b", npus="8", tp="4")
    assert resolved.config.layout.tp == 4
    assert resolved.sources["layout.tp"] == "--tp"
    # the recipe's pp 2 belongs to its own tp
    assert resolved.sources["layout.pp"] == "derived (8 devices)"


def test_batches_that_do_not_divide_are_not_taken():
    resolved = from_recipe(model="tiny-qwen3", npus="3", tp="1")
    assert resolved.config.train.global_batch is None
    assert resolved.sources["train.global_batch"] == "default"


def test_the_recipe_nearest_in_length_is_chosen():
    card = ModelCard(
        name="x",
        family="x",
        category="dense",
        recipes=tuple(
            Recipe(seq_length=n, backend=b, nodes=1, npus=1)
            for n, b in ((4096, "mcore"), (32768, "legacy"), (16384, "fsdp2"))
        ),
    )

    def chosen(length: str | None, backend: str = "mcore"):
        given = flags(model="x", seq_length=length, backend=backend)
        found = recipe.choose_recipe(card, resolve(given, [], None).config, given)
        return found and found.seq_length

    assert chosen(None) == 4096
    assert chosen("8192") == 4096
    assert chosen("16384") == 32768
    assert chosen("1000000") == 32768
    assert chosen("4096", "fsdp2") == 16384


def test_the_end_of_the_learning_rate_follows_its_peak():
    resolved = from_recipe(model="tiny-qwen3", lr="2e-2")
    assert resolved.config.train.min_lr == pytest.approx(2e-3)


def test_a_short_trial_has_a_short_warm_up():
    assert from_recipe(model="tiny-qwen3", steps="4").config.train.warmup_steps == 2
    assert from_recipe(model="tiny-qwen3", steps="1").config.train.warmup_steps == 0


def test_fp32_on_the_cpu_unless_given():
    assert from_recipe("cpu", model="qwen3-0.6b", npus="1").config.dtype == "fp32"
    assert from_recipe("npu", model="qwen3-0.6b").config.dtype == "bf16"
    assert from_recipe("cpu", model="qwen3-0.6b", npus="1", dtype="bf16").config.dtype == "bf16"


def test_machines_are_counted_by_the_scheduler(monkeypatch):
    monkeypatch.setenv("SLURM_NODEID", "0")
    monkeypatch.setenv("SLURM_NNODES", "4")
    resolved = from_recipe(model="tiny-qwen3", npus="8")
    assert resolved.config.launch.nodes == 4
    assert resolved.sources["launch.nodes"].startswith("Slurm")
    assert from_recipe(model="tiny-qwen3", npus="8", nodes="2").config.launch.nodes == 2


def test_a_model_nobody_knows_is_left_to_preflight():
    assert from_recipe(model="no-such").config.model == "no-such"


# --- values that do not count -----------------------------------------------------------------


def test_a_wrong_value_is_refused_though_another_wins(tmp_path):
    file = written(tmp_path, "model: tiny-qwen3\nseed: x\ntrain: {lr: 1e-4, steps: few}\n")
    assignments = ["data.paths=3", "train.steps=-1", "train.steps=5", "train.lr=2e-4"]
    resolved = resolve(flags(data=["mock"], seed="7"), assignments, file)
    assert [(p.problem, p.where) for p in resolved.problems] == [
        ("train.steps is 'few', but must be a whole number", "my.yaml:3 (train.steps)"),
        ("train.steps is -1, but must be greater than 0", "--set (train.steps)"),
        ("seed is 'x', but must be a whole number", "my.yaml:2 (seed)"),
        ("data.paths is 3, but must be a list", "--set (data.paths)"),
    ]
    config = resolved.config
    assert (config.data.paths, config.seed, config.train.steps) == (["mock"], 7, 5)


@pytest.mark.parametrize("path", ["out", "model", "data.paths", "data.tokenizer"])
def test_no_text_holds_a_nul_byte(path):
    text = r'[mock, "a\0b"]' if path == "data.paths" else r'"a\0b"'
    resolved = resolve(flags(model="tiny-qwen3"), [f"{path}={text}"], None)
    (problem,) = resolved.problems
    assert problem.problem.startswith(f"{path} is ")
    assert problem.problem.endswith(", but must have no NUL byte")
