"""Checks that need a pretended machine, and which settings make a run another one."""

from __future__ import annotations

import os
from typing import Any

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from msllm.cli.setting_names import PATHS
from msllm.config import RunConfig
from msllm.engine import device, preflight
from msllm.engine.idle_settings import idle_settings
from msllm.engine.layout import Layout
from msllm.engine.planning import memory
from msllm.engine.run_identity import FREE, FREE_SECTIONS, compare
from msllm.errors import Problem
from msllm.models.architecture import Architecture
from msllm.models.resolve import resolve_model


def run(**changes: Any) -> RunConfig:
    content = {"model": "tiny-qwen3", "device": "cpu", "data": {"paths": ["mock"]}}
    return RunConfig.model_validate({**content, **changes})


@pytest.fixture
def eight_npus(monkeypatch):
    """A machine with eight NPUs of 64 GiB, as far as anybody asks."""
    monkeypatch.setattr(device, "probe", lambda kind: None)
    monkeypatch.setattr(device, "device_count", lambda kind: 1 if kind == "cpu" else 8)
    monkeypatch.setattr(device.Device, "free_memory", lambda self: 64 << 30)


def texts(problems: list[Problem]) -> list[str]:
    return [problem.problem for problem in problems]


def test_nothing_is_wrong_with_what_works():
    assert preflight.check(run(), {}) == []


@pytest.mark.usefixtures("eight_npus")
class TestAccelerators:
    def test_more_processes_than_devices(self):
        found = preflight.check(run(device="npu", launch={"npus": 9}), {})
        assert "9 processes on this machine, but only 8 npu devices" in texts(found)

    def test_a_model_that_fits(self):
        config = run(model="qwen3-8b", device="npu", launch={"npus": 8}, layout={"tp": 8})
        assert preflight.check(config, {}) == []

    def test_a_model_that_does_not_fit(self):
        config = run(model="qwen3-32b", device="npu", launch={"npus": 2}, layout={"tp": 2})
        (problem,) = preflight.check(config, {})
        assert problem.problem.startswith("needs about ")
        assert "a device, and 64.00 GiB are free" in problem.problem
        assert "--pp 2" not in problem.problem
        forced = config.model_copy(
            update={"launch": config.launch.model_copy(update={"force": True})}
        )
        assert preflight.check(forced, {}) == []

    def test_what_is_wrong_with_the_device_is_asked_of_it(self, monkeypatch):
        monkeypatch.setattr(device, "probe", lambda kind: Problem(f"no {kind}"))
        assert preflight.check(run(device="npu"), {}) == [Problem("no npu")]


def test_a_precision_that_the_device_lacks(monkeypatch):
    monkeypatch.setattr(device.Device, "supports", lambda self, dtype: dtype != "bf16")
    monkeypatch.setattr(device.Device, "name", "Tesla V100")
    (problem,) = preflight.check(run(dtype="bf16"), {})
    assert str(problem) == "--dtype bf16: Tesla V100 can't compute in bf16 (use --dtype fp32)"
    assert preflight.check(run(dtype="fp32"), {}) == []


# --- recompute: what Megatron would refuse in the workers ---------------------------------------


def recompute(*modules: str, **train: Any) -> dict[str, Any]:
    return {"train": {"recompute": "selective", "recompute_modules": list(modules), **train}}


@pytest.mark.parametrize(("settings", "text"), [
    (recompute("moe_act"), "moe_act needs a model with experts"),
    ({"model": "tiny-qwen3-moe", "moe": {"grouped_gemm": False}, **recompute("moe_act")},
     "needs the grouped matmul"),
    ({"model": "tiny-qwen3-moe", **recompute("moe_act", optimizer="muon")},
     "muon takes experts one by one"),
    (recompute(), "selective recompute of nothing"),
    ({"layout": {"sequence_parallel": True}}, "sequence parallelism needs tensor parallelism"),
])  # fmt: skip
def test_settings_that_megatron_refuses(settings, text):
    assert any(text in found for found in texts(preflight.check(run(**settings), {})))


def test_recomputed_blocks_make_up_every_chunk():
    layers = resolve_model("qwen3-8b").architecture.num_layers
    assert layers == 36

    def found(block: int, pp: int = 1) -> list[Problem]:
        train = {"recompute": "full", "recompute_layers": block}
        config = run(model="qwen3-8b", train=train, layout={"pp": pp},
                     launch={"npus": pp, "force": True})  # fmt: skip
        return preflight.check(config, {})

    assert found(12) == found(9, pp=2) == found(1, pp=5) == []
    (problem,) = found(5)
    assert problem.problem == "blocks of 5 layers don't make up pipeline chunks of 36 layers"
    assert problem.hint == "use 1, 2, 3, 4, 6, 9, 12, 18, 36"
    (problem,) = found(7, pp=5)
    assert "chunks of 7 and 8 layers" in problem.problem
    assert problem.hint == "use 1"


def test_blocks_are_checked_beside_other_sizes():
    train = {"recompute": "full", "recompute_layers": 3}
    config = run(layout={"tp": 3}, launch={"npus": 3}, train=train)
    found = texts(preflight.check(config, {}))
    assert any("does not divide the 8 attention heads" in text for text in found)
    assert any("blocks of 3 layers" in text for text in found)


@settings(max_examples=200, deadline=None)
@given(
    model=st.sampled_from(["tiny-llama", "tiny-qwen2", "tiny-qwen3", "tiny-qwen3-moe"]),
    sizes=st.fixed_dictionaries(
        {name: st.sampled_from([1, 1, 2]) for name in ("tp", "pp", "vpp")}
        | {"ep": st.sampled_from([1, 1, 1, 2]), "pp_layout": st.sampled_from([None, None, [1, 3]])}
    ),
    sequence_parallel=st.sampled_from([None, None, None, True, False]),
    mode=st.sampled_from(["none", "selective", "full"]),
    modules=st.sets(
        st.sampled_from(["core_attn", "mlp", "moe", "moe_act", "layernorm"]), min_size=1
    ),
    block=st.sampled_from([1, 1, 2, 3]),
    grouped=st.booleans(),
)
def test_what_passes_is_accepted_by_megatron(
    model, sizes, sequence_parallel, mode, modules, block, grouped
):
    from msllm.engine.megatron.model_config import model_config

    config = run(
        model=model,
        layout={**sizes, "sequence_parallel": sequence_parallel},
        launch={"npus": 8, "force": True},
        train={
            "recompute": mode,
            "recompute_modules": sorted(modules),
            "recompute_layers": block,
            "global_batch": 32,
        },
        moe={"grouped_gemm": grouped},
        data={"paths": ["mock"], "seq_length": 48},
    )
    if preflight.check(config, {}):
        event("refused")
        return
    event(f"accepted with recompute {mode}")
    architecture = resolve_model(model).architecture
    layout = Layout.from_world(config.layout, 8)
    built = model_config(architecture, layout, config, device.Device("cpu"))
    assert built.recompute_granularity == (None if mode == "none" else mode)
    if mode == "full":  # Megatron finds this only in the first forward pass
        counts = [len(chunk) for chunk in layout.chunks(architecture.num_layers)]
        assert all(count % built.recompute_num_layers == 0 for count in counts)


# --- the run's folder ---------------------------------------------------------------------------


def test_a_folder_below_a_file_can_not_be_made(tmp_path):
    (tmp_path / "file").write_text("")
    (problem,) = preflight.check(run(out=tmp_path / "file" / "a" / "b"), {})
    assert problem.problem == f"{tmp_path / 'file'} is a file"
    assert preflight.check(run(out=tmp_path / "new" / "run"), {}) == []
    assert not (tmp_path / "new").exists()


def test_a_folder_where_nothing_may_be_written(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "access", lambda path, mode: path != tmp_path)
    (problem,) = preflight.check(run(out=tmp_path / "run"), {})
    assert problem.problem == f"you may not write to {tmp_path}"


# --- warnings -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("settings", "text"), [
    (recompute("moe", "mlp"), "the model has no experts, moe recomputes nothing"),
    ({"model": "tiny-qwen3-moe", **recompute("mlp")}, "mlp recomputes nothing"),
    ({"train": {"recompute_modules": ["mlp"]}}, "recompute_modules does nothing without"),
    ({"train": {"recompute_layers": 2}}, "recompute_layers does nothing without"),
    ({"train": {"wsd_decay_steps": 5}}, "wsd_decay_steps does nothing with the cosine schedule"),
    ({"train": {"steps": 5, "warmup_steps": 5, "decay_steps": 99}}, "never reaches its peak"),
    ({"train": {"eval_interval": 5}}, "there is no validation data"),
    ({"data": {"valid_fraction": 0.1}}, "validation data does nothing unless"),
    ({"moe": {"z_loss_coeff": 0.1, "dispatcher": "alltoall"}},
     "moe.z_loss_coeff does nothing: the model has no experts"),
    ({"train": {"optimizer": "muon"}, "launch": {"npus": 2}}, "nothing with Muon, which needs"),
    ({"model": "tiny-qwen3-moe", "train": {"optimizer": "muon"}},
     "moe.grouped_gemm does nothing with Muon"),
])  # fmt: skip
def test_settings_that_do_nothing_are_named(settings, text):
    config = run(**settings)
    (warning,) = idle_settings(config, resolve_model(config.model).architecture)
    assert text in warning


@pytest.mark.parametrize("settings", [
    recompute("mlp", "layernorm"),
    {"model": "tiny-qwen3-moe", **recompute("moe")},
    {"model": "tiny-qwen3-moe", "moe": {"z_loss_coeff": 0.1}},
    {"train": {"recompute": "full", "recompute_layers": 2}},
    {"train": {"lr_schedule": "wsd", "wsd_decay_steps": 5}},
    {"train": {"eval_interval": 5}, "data": {"valid_fraction": 0.1}},
    {"train": {"optimizer": "muon"}, "launch": {"npus": 2}, "layout": {"tp": 2}},
])  # fmt: skip
def test_settings_that_do_something_are_not(settings):
    config = run(**settings)
    assert list(idle_settings(config, resolve_model(config.model).architecture)) == []


def test_expert_tensor_parallelism_stops_at_gloo():
    config = run(
        model="tiny-qwen3-moe", layout={"tp": 2, "etp": 2}, launch={"npus": 2}, data={
            "paths": ["mock"], "seq_length": 64,
        },
    )  # fmt: skip
    assert any("expert tensor parallelism does not run on the CPU" in t
               for t in texts(preflight.check(config, {})))  # fmt: skip


def test_long_sequences_are_a_warning():
    architecture = resolve_model("tiny-qwen3").architecture
    assert preflight.warnings(run(data={"seq_length": 2048}), architecture) == []
    (text,) = preflight.warnings(run(data={"seq_length": 2049}), architecture)
    assert "2,049 tokens are longer than the 2,048 positions" in text


def test_a_family_without_tests_is_refused_even_if_it_is_plain():
    plain = Architecture(
        model_type="somebody's", hidden_size=8, num_layers=1, num_attention_heads=1,
        num_query_groups=1, head_dim=8, intermediate_size=8, vocab_size=8,
    )  # fmt: skip
    (problem,) = preflight.check_model(run(), plain)
    assert "missing are models of type somebody's" in problem.problem


@pytest.mark.parametrize("name", ["tiny-llama", "tiny-mistral", "tiny-qwen2", "tiny-qwen3",
                                  "tiny-qwen3-moe", "tiny-mixtral"])  # fmt: skip
def test_the_families_of_this_version_pass(name):
    assert list(preflight.check_model(run(), resolve_model(name).architecture)) == []


def test_machines_are_placed_by_the_scheduler():
    config = run(launch={"nodes": 2}, out="somewhere/that/is/not")
    assert len(preflight.check(config, {})) == 2
    environ = {"SLURM_NODEID": "1", "SLURM_NNODES": "2", "SLURM_JOB_NODELIST": "n[1-2]"}
    assert preflight.check(config, environ) == []


# --- the same run or another ------------------------------------------------------------------


def other(path: str) -> Any:
    """Another legal value for a setting than its default."""
    special = {
        "model": "tiny-llama", "backend": "fsdp2", "device": "npu", "dtype": "fp32",
        "out": "elsewhere", "layout.pp_layout": [1], "layout.sequence_parallel": True,
        "data.paths": ["other"], "data.valid_paths": ["v"], "data.tokenizer": "t",
        "data.cache_dir": "c", "data.text_key": "k", "data.valid_fraction": 0.5,
        "launch.rdzv_endpoint": "h:1", "train.optimizer": "muon", "train.lr_schedule": "wsd",
        "train.recompute": "full", "train.recompute_modules": ["mlp"], "train.init_std": 0.5,
        "moe.dispatcher": "allgather", "moe.aux_loss_coeff": 0.5, "checkpoint.resume": "never",
        "checkpoint.init_from": "w", "checkpoint.export_hf": "last",
        "log.wandb_project": "w", "log.swanlab_project": "s", "log.peak_tflops": 3.0,
    }  # fmt: skip
    if path in special:
        return special[path]
    default = PATHS[path].get_default()
    if isinstance(default, bool):
        return not default
    return 0.25 if isinstance(default, float) else (default or 0) + 3


@pytest.mark.parametrize("path", PATHS)
def test_what_changes_the_curve_makes_another_run(path):
    section, _, name = path.rpartition(".")
    value = {section: {name: other(path)}} if section else {path: other(path)}
    before = RunConfig(model="tiny-qwen3")
    after = RunConfig.model_validate({"model": "tiny-qwen3", **value})
    found = compare(before, after, "--out x")
    free = path in FREE or section in FREE_SECTIONS
    # Where no global batch was given it follows from these.
    sizes = ("layout.tp", "layout.pp", "layout.cp", "launch.nodes", "launch.npus")
    batch = path in (*sizes, "train.micro_batch")
    assert bool(found) == (batch or not free)
    if found and not batch:
        assert f"{path} was " in found[0].problem


def test_another_layout_of_the_same_batch_is_the_same_run():
    before = run(launch={"npus": 4}, train={"micro_batch": 2})
    after = run(launch={"npus": 8}, layout={"tp": 2}, train={"micro_batch": 2})
    explicit = run(launch={"npus": 1}, train={"micro_batch": 1, "global_batch": 8})
    assert compare(before, after, "") == []
    assert compare(before, explicit, "") == []


def test_only_the_first_differences_are_spelled_out():
    (problem,) = compare(
        run(), run(seed=1, train={"lr": 1.0, "eps": 1.0, "beta1": 0.1, "beta2": 0.1}), "--out x"
    )
    assert "; and 1 more" in problem.problem


def test_an_alias_is_the_same_model():
    (model,) = compare(run(), run(model="tiny-llama"), "")
    assert "model was" in model.problem
    assert compare(run(model="Qwen/Qwen3-8B-Base"), run(model="qwen3-8b"), "") == []


def test_the_check_of_memory_uses_the_estimate(monkeypatch):
    calls = []
    monkeypatch.setattr(memory, "estimate", lambda *a: calls.append(a) or memory.Estimate({"x": 1}))
    assert preflight.check(run(), {}) == []
    assert len(calls) == 1
