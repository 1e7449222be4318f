"""Builds a case's model in this process and deals out its data; used by the test jobs."""

from __future__ import annotations

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
from msllm.models.architecture import Architecture, MoE
from tests.engine.megatron.cases import MODELS

SEQ_LENGTH = 32
GLOBAL_BATCH = 8
TRAIN = {"steps": 20, "lr": 3e-3, "global_batch": GLOBAL_BATCH, "micro_batch": 2}


def architecture(family: str) -> Architecture:
    fields = dict(MODELS[family])
    if "moe" in fields:
        fields["moe"] = MoE(**fields["moe"])
    return Architecture(**fields)


def build(case: dict[str, Any]) -> MegatronBackend:
    settings = dict(case.get("layout", {}))
    moe = {k: settings.pop(k) for k in ("grouped_gemm", "dispatcher") if k in settings}
    run = RunConfig(
        model=case["family"],
        device="cpu",
        seed=case.get("seed", 1234),
        dtype=case.get("dtype", "fp32"),
        layout=settings,
        moe=moe,
        data={"seq_length": SEQ_LENGTH},
        train=TRAIN | case.get("train", {}),
    )
    layout = Layout.from_world(run.layout, int(os.environ["WORLD_SIZE"]))
    return MegatronBackend(architecture(case["family"]), layout, run, select_device("cpu"))


def data(backend: MegatronBackend, step: int, masked: bool) -> list[dict[str, torch.Tensor]]:
    """This rank's micro-batches of a step; `masked` leaves few tokens of some samples trained."""
    micro = backend.run.train.micro_batch
    batches = []
    for index in range(GLOBAL_BATCH // (micro * backend.dp_size)):
        first = (index * backend.dp_size + backend.dp_rank) * micro
        batches.append(_batch(range(first, first + micro), step, masked))
    return batches


def _batch(samples: range, step: int, masked: bool) -> dict[str, torch.Tensor]:
    rows, masks = [], []
    for sample in samples:
        generator = torch.Generator().manual_seed(1000 * step + sample)
        rows.append(torch.randint(0, 131, (SEQ_LENGTH + 1,), generator=generator))
        mask = torch.ones(SEQ_LENGTH)
        if masked:
            mask[1 + 4 * sample :] = 0.0
        masks.append(mask)
    tokens = torch.stack(rows)
    return {
        "tokens": tokens[:, :-1],
        "labels": tokens[:, 1:],
        "loss_mask": torch.stack(masks),
        "position_ids": torch.arange(SEQ_LENGTH).repeat(len(rows), 1),
    }
