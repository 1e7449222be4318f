"""Exchanges files of ranks with Megatron's models in this job.

Usage: ranks_case.py MODELS FILES OUT LAYOUT CASE...: MODELS and FILES have a folder a case. Each
rank loads its file into a model that was built from the seed; the last stages write the logits to
OUT/CASE.RANK.pt, and Megatron saves what was loaded into OUT/CASE. Then each rank fills a model
with grouped experts, if any, from the case's own weights, and writes the file that training would
into OUT/CASE-trained.
"""

from __future__ import annotations

import json
import os
import random
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from msllm.config import RunConfig
from msllm.engine.device import select_device
from msllm.engine.layout import Layout
from msllm.engine.megatron.backend import MegatronBackend
from msllm.models.resolve import resolve_model
from tests.parity.job import batches, leave
from tests.parity.job import build as parity_build


def build(folder: Path, sizes: dict[str, Any]) -> MegatronBackend:
    run = RunConfig(
        model=str(folder),
        device="cpu",
        dtype="fp32",
        data={"seq_length": torch.load(folder / "truth.pt")["tokens"].size(1)},
        layout={"distributed_optimizer": False, **sizes},
        train={"micro_batch": 1, "lr": 1e-30, "clip_grad": 0.0},
        moe={"aux_loss_coeff": 0.0, "grouped_gemm": False},
    )
    layout = Layout.from_world(run.layout, int(os.environ["WORLD_SIZE"]))
    architecture = resolve_model(str(folder)).architecture
    return MegatronBackend(architecture, layout, run, select_device("cpu"))


def file_of_rank(folder: Path) -> Path:
    """Where Megatron-LM has a rank's file."""
    from megatron.core import parallel_state

    name = f"mp_rank_{parallel_state.get_tensor_model_parallel_rank():02d}"
    if parallel_state.get_pipeline_model_parallel_world_size() > 1:
        name += f"_{parallel_state.get_pipeline_model_parallel_rank():03d}"
    if parallel_state.get_expert_model_parallel_world_size() > 1:
        name += f"_{parallel_state.get_expert_model_parallel_rank():03d}"
    return folder / name / "model_optim_rng.pt"


def load(backend: MegatronBackend, files: Path) -> None:
    """Load this rank's file; every parameter must be there, and nothing else."""
    step = int((files / "latest_checkpointed_iteration.txt").read_text())
    state = torch.load(file_of_rank(files / f"iter_{step:07d}"), weights_only=True)
    assert (state["checkpoint_version"], state["iteration"]) == (3.0, step)
    for index, chunk in enumerate(backend.chunks):
        key = "model" if len(backend.chunks) == 1 else f"model{index}"
        missing, more = chunk.module.load_state_dict(state.pop(key), strict=False)
        assert not more
        assert [key for key in missing if not key.endswith("_extra_state")] == []
    assert not [key for key in state if key.startswith("model")]


def save(backend: MegatronBackend, out: Path) -> None:
    """Write this rank's file with all that Megatron-LM puts into it."""
    states = [chunk.module.state_dict() for chunk in backend.chunks]
    keys = ["model"] if len(states) == 1 else [f"model{n}" for n in range(len(states))]
    state = dict(zip(keys, states, strict=True)) | {
        "args": Namespace(rank=torch.distributed.get_rank(), kind=Layout, path=out, dtype="fp32"),
        "rng_state": [{"np_rng_state": np.random.get_state(), "random": random.getstate()}],
        "checkpoint_version": 3.0,
        "iteration": 30,
    }
    path = file_of_rank(out / "iter_0000030")
    path.parent.mkdir(parents=True, exist_ok=True)
    mine = path.with_name(os.environ["RANK"])
    torch.save(state, mine)
    os.replace(mine, path)
    (out / "latest_checkpointed_iteration.txt").write_text("30")


def compute(folder: Path, files: Path, saved: Path, sizes: dict[str, Any]) -> dict[str, Any]:
    backend = build(folder, sizes)
    load(backend, files)

    from megatron.core import dist_checkpointing, parallel_state

    saved.mkdir(exist_ok=True)
    chunks = enumerate(backend.chunks)
    state = {f"model{n}": chunk.module.sharded_state_dict() for n, chunk in chunks}
    dist_checkpointing.save(state, str(saved))
    if sizes.get("etp", 1) > 1:
        return {"logits": None}
    logits: list[torch.Tensor] = []
    last = backend.chunks[-1].module

    def keep(module: torch.nn.Module, inputs: Any, output: Any) -> None:
        logits.append(last.gathered_logits(output[0].detach()).transpose(0, 1).clone())

    if last.post_process:
        last.output_layer.register_forward_hook(keep)
    backend.train_step(batches(folder, backend.dp_rank, backend.dp_size), 1)
    sequences = (backend.dp_rank, backend.dp_size)
    first = parallel_state.get_tensor_model_parallel_rank() == 0
    return {"logits": torch.cat(logits) if logits and first else None, "sequences": sequences}


def main() -> None:
    models, files, out = (Path(path) for path in sys.argv[1:4])
    for name in sys.argv[5:]:
        found = compute(models / name, files / name, out / name, json.loads(sys.argv[4]))
        if found["logits"] is not None:
            torch.save(found, out / f"{name}.{os.environ['RANK']}.pt")
        leave()
        save(parity_build(models / name, json.loads(sys.argv[4])), out / f"{name}-trained")
        leave()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
