"""One training step: forward and backward over the micro-batches, the update, the figures.

The loss is the mean over the trained tokens of the global batch: each micro-batch contributes its
sum, and Megatron divides gradients by the number of trained tokens of all ranks and micro-batches.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

Batch = dict[str, Tensor]
"""`tokens`, `labels`, `loss_mask`, `position_ids`, each `[b, s]`."""


@dataclass(frozen=True, slots=True)
class LossSum:
    """Summed loss and number of trained tokens, over the whole job.

    `bad_ranks` names the ranks whose own loss was not a number.
    """

    total: float
    tokens: int
    bad_ranks: tuple[int, ...] = ()

    @property
    def mean(self) -> float:
        """Loss a trained token; NaN where none was trained."""
        return self.total / self.tokens if self.tokens else math.nan


def run_batches(
    chunks: list[Any], batches: list[Batch], device: torch.device, forward_only: bool
) -> LossSum:
    """Run the micro-batches through the pipeline; accumulate gradients unless `forward_only`."""
    batches = [{key: value.to(device) for key, value in batch.items()} for batch in batches]
    b, s = batches[0]["tokens"].shape
    losses = get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=[iter(batches) for _ in chunks] if len(chunks) > 1 else iter(batches),
        model=chunks if len(chunks) > 1 else chunks[0],
        num_microbatches=len(batches),
        seq_length=s,
        micro_batch_size=b,
        forward_only=forward_only,
    )
    return _reduce(losses, device)


def forward_step(
    data: Iterator[Batch], model: Any, *_: Any
) -> tuple[Tensor, Callable[[Tensor], tuple[Tensor, Tensor, Tensor]]]:
    """Run one micro-batch through a chunk; give its output and the function that sums losses."""
    batch = next(data)
    out = model(
        batch["tokens"],
        batch["position_ids"],
        None,
        labels=batch["labels"],
        loss_mask=batch["loss_mask"],
    )
    return out, partial(_masked_sum, batch["loss_mask"])


def _masked_sum(mask: Tensor, losses: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    total = (losses.float() * mask).sum()
    tokens = mask.sum()
    return total, tokens.to(torch.int), torch.stack((total.detach(), tokens)).double()


def _reduce(losses: list[Tensor], device: torch.device) -> LossSum:
    """Sum over micro-batches, data parallel ranks and (for the other stages) the pipeline."""
    own = torch.stack(losses).sum(0) if losses else torch.zeros(2, dtype=torch.double)
    figures = own.to(device)
    if device.type == "npu":
        figures = figures.float()  # HCCL reduces no doubles
    dist.all_reduce(figures, group=parallel_state.get_data_parallel_group(True))
    dist.all_reduce(figures, group=parallel_state.get_pipeline_model_parallel_group())
    total, tokens = figures.tolist()
    bad = () if math.isfinite(total) else _bad_ranks(math.isfinite(float(own[0])))
    return LossSum(total, round(tokens), bad)


def _bad_ranks(own_is_finite: bool) -> tuple[int, ...]:
    finite: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(finite, own_is_finite)
    return tuple(rank for rank, good in enumerate(finite) if not good)
