"""Starts each case's model from its weights in this job, takes a step, keeps what it computed.

Usage: job.py MODELS OUT LAYOUT CASE..., where MODELS holds a folder a case and LAYOUT is a JSON
object of parallel sizes. Each rank writes OUT/CASE.RANK.pt: the loss, the logits of its part of
the vocabulary, and the gradients of its slices of the parameters.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch

from msllm.config import RunConfig
from msllm.engine.device import select_device
from msllm.engine.layout import Layout
from msllm.engine.megatron.backend import Batch, MegatronBackend
from msllm.engine.weights import matching
from msllm.models.architecture import Architecture
from msllm.models.resolve import resolve_model
from msllm.models.weight_map import WeightMap
from tests.engine.megatron.groups import leave
from tests.parity.mutations import MUTATIONS

RIGHT = matching.mapped


def build(folder: Path, sizes: dict[str, Any], dtype: str = "fp32") -> MegatronBackend:
    settings = json.loads((folder / "run.json").read_text())
    run = RunConfig(
        model=str(folder),
        device="cpu",
        dtype=dtype,
        data={"seq_length": torch.load(folder / "truth.pt")["tokens"].size(1)},
        layout={"distributed_optimizer": False, **sizes},
        train={"micro_batch": 1, "lr": 1e-30, "clip_grad": 0.0} | settings.get("train", {}),
        moe={"aux_loss_coeff": 0.0} | settings.get("moe", {}),
        checkpoint={"init_from": folder},
    )
    layout = Layout.from_world(run.layout, int(os.environ["WORLD_SIZE"]))
    architecture = resolve_model(str(folder)).architecture
    backend = MegatronBackend(architecture, layout, run, select_device("cpu"))
    read_with(settings.get("mutation"))
    backend.load_start(folder)
    return backend


def read_with(mutation: str | None) -> None:
    """Have weights read by the right map, or by one with a mistake in it."""

    def wrong(architecture: Architecture) -> WeightMap:
        weights = RIGHT(architecture)
        assert weights is not None
        assert mutation is not None
        return MUTATIONS[mutation](weights)

    matching.mapped = wrong if mutation else RIGHT


def batches(folder: Path, rank: int, size: int) -> list[Batch]:
    """One sequence a micro-batch, spread over the data parallel ranks."""
    truth = torch.load(folder / "truth.pt")
    length = truth["tokens"].size(1)
    return [
        {
            "tokens": tokens[None],
            "labels": labels[None],
            "loss_mask": torch.ones(1, length),
            "position_ids": torch.arange(length)[None],
        }
        for tokens, labels in list(zip(truth["tokens"], truth["labels"], strict=True))[rank::size]
    ]


def compute(folder: Path, sizes: dict[str, Any]) -> dict[str, Any]:
    backend = build(folder, sizes)  # before megatron.core is imported

    from megatron.core import parallel_state

    from msllm.engine.megatron.slices import parts

    logits: list[torch.Tensor] = []
    chunks = [chunk.module for chunk in backend.chunks]
    if chunks[-1].post_process:

        def keep(module: torch.nn.Module, inputs: Any, output: Any) -> None:
            logits.append(output[0].detach().transpose(0, 1).clone())

        chunks[-1].output_layer.register_forward_hook(keep)
    result = backend.train_step(batches(folder, backend.dp_rank, backend.dp_size), 1)
    gradients = [
        (part.name, part.axis, part.runs, gradient.clone())
        for part, gradient in parts(chunks, gradient_of)
    ]
    return {
        "loss": result.loss,
        "logits": torch.cat(logits) if logits else None,
        "sequences": (backend.dp_rank, backend.dp_size),
        "tensor_rank": parallel_state.get_tensor_model_parallel_rank(),
        "gradients": gradients,
    }


def gradient_of(parameter: torch.Tensor) -> torch.Tensor:
    found = getattr(parameter, "main_grad", None)
    return torch.zeros_like(parameter) if found is None else found


def main() -> None:
    models, out, sizes = Path(sys.argv[1]), Path(sys.argv[2]), json.loads(sys.argv[3])
    for name in sys.argv[4:]:
        found = compute(models / name, sizes)
        torch.save(found, out / f"{name}.{os.environ['RANK']}.pt")
        leave()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
