"""Starts models from published weights in this job and reports what they compute.

Usage: initial_cases.py MODELS OUT.json LAYOUT, where MODELS holds a folder a case, as transformers
saved it, and LAYOUT is a JSON object of parallel sizes.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[3]))

from msllm.config import RunConfig
from msllm.engine.device import select_device
from msllm.engine.layout import Layout
from msllm.engine.megatron.backend import MegatronBackend
from msllm.models.resolve import resolve_model
from tests.engine.megatron.parity_case import LENGTH, to_megatron


def build(folder: Path, sizes: dict[str, Any], dtype: str = "fp32") -> MegatronBackend:
    grouped = not folder.name.endswith("each")
    run = RunConfig(
        model=str(folder),
        device="cpu",
        dtype=dtype,
        data={"seq_length": LENGTH},
        layout=sizes,
        train={"micro_batch": 2, "lr": 1e-30, "weight_decay": 0.0},
        moe={"aux_loss_coeff": 0.0, "grouped_gemm": grouped},
        checkpoint={"init_from": folder},
    )
    layout = Layout.from_world(run.layout, int(os.environ["WORLD_SIZE"]))
    architecture = resolve_model(str(folder)).architecture
    backend = MegatronBackend(architecture, layout, run, select_device("cpu"))
    backend.load_published(folder)
    return backend


def compare(folder: Path, sizes: dict[str, Any]) -> dict[str, Any]:
    truth = torch.load(folder / "truth.pt", weights_only=True)
    backend = build(folder, sizes)
    b, s = truth["tokens"].shape
    batch = {
        "tokens": truth["tokens"],
        "labels": truth["labels"],
        "loss_mask": torch.ones(b, s),
        "position_ids": torch.arange(s).repeat(b, 1),
    }
    total, tokens = backend.evaluate([batch])
    found = {"loss": abs(total / tokens - float(truth["loss"]))}
    if os.environ["WORLD_SIZE"] == "1":
        found["logits"] = float((backend.logits(truth["tokens"]) - truth["logits"]).abs().max())
        found["unequal"] = unequal(backend, folder)
    leave()
    found["moved"] = moved(build(folder, sizes, "bf16"), batch)
    leave()
    return found


def leave() -> None:
    from megatron.core import parallel_state

    parallel_state.destroy_model_parallel()


def moved(backend: MegatronBackend, batch: dict[str, torch.Tensor]) -> list[str]:
    """Parameters that a step of almost no length changes: their float32 copies were not theirs."""
    before = {n: p.detach().clone() for n, p in backend.chunks[0].module.named_parameters()}
    backend.train_step([batch], 1)
    after = dict(backend.chunks[0].module.named_parameters())
    return [name for name, value in before.items() if not torch.equal(value, after[name])]


def unequal(backend: MegatronBackend, folder: Path) -> list[str]:
    """Parameters that are not, bit for bit, what a mapping written independently makes of them."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    weights = {name: p.detach() for name, p in model.named_parameters()}
    rows = model.config.vocab_size
    names = []
    for name, parameter in backend.chunks[0].module.named_parameters():
        expected = to_megatron(weights, model.config, name)
        held = parameter[:rows] if len(parameter) > len(expected) == rows else parameter
        if not torch.equal(held, expected.view_as(held)):
            names.append(name)
    return names


def main() -> None:
    models, out, sizes = Path(sys.argv[1]), Path(sys.argv[2]), json.loads(sys.argv[3])
    folders = sorted(path for path in models.iterdir() if path.is_dir())
    experts = sizes.get("ep", 1) > 1
    found = {
        f.name: compare(f, sizes)
        for f in folders
        if not experts or "mix" in f.name or "moe" in f.name
    }
    if os.environ["RANK"] == "0":
        out.write_text(json.dumps(found))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
