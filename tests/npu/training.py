"""Trains tiny models through MegatronBackend on whatever device a check has."""

from __future__ import annotations

import os
import zlib
from pathlib import Path
from typing import Any

import torch

from msllm.config import RunConfig
from msllm.engine.device import Device
from msllm.engine.layout import Layout
from msllm.engine.megatron.backend import Batch, MegatronBackend
from msllm.models.resolve import resolve_model
from tests.npu.families import ALL

LENGTH, SEQUENCES, STEPS, VOCABULARY = 24, 2, 3, 131


def build(name: str, folder: Path, device: Device, sizes: dict[str, Any]) -> MegatronBackend:
    """This rank's part of the case's model, weights from the seed."""
    case = ALL[name]
    run = RunConfig(
        model=str(folder),
        device=device.kind,
        dtype="fp32",
        data={"seq_length": LENGTH},
        layout=sizes,
        train={"lr": 1e-3, "eps": 1e-5} | case.run.get("train", {}),
        moe=case.run.get("moe", {}),
    )
    layout = Layout.from_world(run.layout, int(os.environ.get("WORLD_SIZE", "1")))
    backend = MegatronBackend(resolve_model(str(folder)).architecture, layout, run, device)
    if case.evaluated:  # random numbers are another device's
        for chunk in backend.chunks:
            chunk.register_forward_pre_hook(_evaluated)
    with torch.no_grad():
        for chunk in backend.chunks:
            for parameter_name, parameter in chunk.module.named_parameters():
                if parameter.dim() == 1:  # norms at one and biases at zero would hide a mistake
                    parameter.add_(zlib.crc32(parameter_name.encode()) / 2**32 * 0.4 - 0.2)
    backend.optimizer.reload_model_params()
    return backend


def _evaluated(chunk: torch.nn.Module, _: Any) -> None:
    chunk.eval()


def batches(step: int, rank: int = 0, size: int = 1) -> list[Batch]:
    """The one micro-batch of a step: two sequences, spread over `size` data parallel ranks."""
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(0, VOCABULARY, (SEQUENCES, LENGTH + 1), generator=generator)[rank::size]
    return [
        {
            "tokens": tokens[:, :-1].contiguous(),
            "labels": tokens[:, 1:].contiguous(),
            "loss_mask": torch.ones(len(tokens), LENGTH),
            "position_ids": torch.arange(LENGTH).repeat(len(tokens), 1),
        }
    ]


def gradients(backend: MegatronBackend) -> dict[str, torch.Tensor]:
    """Each parameter's gradient in the last step, on the host."""
    return {
        f"{index}.{name}": parameter.main_grad.float().cpu().clone()
        for index, chunk in enumerate(backend.chunks)
        for name, parameter in chunk.module.named_parameters()
    }


def train(backend: MegatronBackend) -> dict[str, Any]:
    """Take the steps; keeps losses and norms of gradients, and the last step's gradients."""
    losses, norms = [], []
    for step in range(1, STEPS + 1):
        made = batches(step, backend.dp_rank, backend.dp_size)
        result = backend.train_step(made, step)
        losses.append(result.loss)
        norms.append(result.grad_norm)
    return {"losses": losses, "norms": norms, "gradients": gradients(backend)}
