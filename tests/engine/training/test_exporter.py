"""Runs that write Hugging Face weights, and runs that start from a checkpoint's."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM

from msllm.config import read_run
from msllm.engine.data.stream import open_streams
from msllm.engine.training.run_folder import RunFolder
from msllm.engine.weights.to_hf import mcore_to_hf
from msllm.engine.weights.verify import verify

pytestmark = [pytest.mark.distributed, pytest.mark.xdist_group("exporter")]

EVALUATED = {"eval_interval": 4, "eval_batches": 2}
TP2 = {"launch": {"npus": 2}, "layout": {"tp": 2}}


@pytest.fixture(scope="module")
def exported(runs):
    """A run over two ranks that exports at each save, of which it keeps one."""
    runs.run(
        "exported",
        **TP2,
        data={"valid_fraction": 0.2},
        train={"steps": 8} | EVALUATED,
        checkpoint={"export_hf": "every", "keep": 1},
    )
    return RunFolder(runs.folder("exported"))


def valid_loss(folder, config):
    """The mean loss of published weights over what a run validates with, by transformers."""
    _, stream = open_streams(config.data, config.seed, 301)
    count = config.train.eval_batches * config.train.global_batch
    tokens = torch.stack([torch.as_tensor(stream[n].tokens).long() for n in range(count)])
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        logits = model(tokens[:, :-1]).logits
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).item()


def test_each_export_is_the_model_that_was_validated(runs, exported):
    config = read_run(exported.config)
    said = {m["step"]: m["valid_loss"] for m in runs.metrics("exported") if m.get("valid_loss")}
    assert sorted(said) == [4, 8]
    assert runs.checkpoints("exported") == ["step-00000008"]
    for step, loss in said.items():
        found = valid_loss(exported.hf / f"step-{step:08d}", config)
        assert found == pytest.approx(loss, abs=1e-5)
    assert said[4] != pytest.approx(said[8], abs=1e-3)


def test_a_run_is_exported_by_hand_alike(exported, tmp_path):
    mcore_to_hf(exported.path, tmp_path / "out")
    assert verify(tmp_path / "out", exported.hf / "step-00000008").same
    assert verify(exported.path, exported.hf / "step-00000008").same
    assert not verify(exported.path, exported.hf / "step-00000004").same


@pytest.mark.parametrize("kind", ["run", "export"])
def test_a_run_starts_from_a_run_or_its_export(runs, exported, kind):
    start = exported.path if kind == "run" else exported.hf / "step-00000008"
    runs.run(
        f"from-{kind}",
        data={"valid_fraction": 0.2},
        train={"steps": 1, "lr": 1e-30} | EVALUATED,
        checkpoint={"init_from": str(start), "export_hf": "last"},
    )
    before, after = (runs.metrics(name)[-1]["valid_loss"] for name in ("exported", f"from-{kind}"))
    assert after == pytest.approx(before, abs=1e-5)
    hf = RunFolder(runs.folder(f"from-{kind}")).hf
    assert [path.name for path in hf.iterdir()] == ["step-00000001"]
    assert verify(hf / "step-00000001", start).same


def test_an_export_that_fails_costs_no_training(runs):
    folder = RunFolder(runs.folder("failing"))
    before = {"steps": 2, "decay_steps": 3}
    runs.run("failing", train=before, checkpoint={"save_interval": 1})
    folder.hf.write_text("in the way")
    output = runs.run(
        "failing",
        status=1,
        train=before | {"steps": 3},
        checkpoint={"save_interval": 1, "export_hf": "last"},
    )
    assert "step 3 could not be exported" in output
    assert runs.checkpoints("failing")[-1] == "step-00000003"
    assert "File exists" in (folder.logs / "export.log").read_text()
