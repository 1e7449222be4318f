"""Gradients, optimizer and learning-rate schedule, as Megatron-core has them."""

from __future__ import annotations

from typing import Any, TypeAlias

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from msllm.config import RunConfig, TrainConfig
from msllm.engine.device import Device
from msllm.engine.megatron.model import LanguageModel
from msllm.engine.megatron.model_config import DTYPES, ModelConfig
from msllm.engine.ops import operators_for

Chunk: TypeAlias = DistributedDataParallel
"""One pipeline chunk with its gradient buffers."""


def distribute(chunks: list[LanguageModel], config: ModelConfig, run: RunConfig) -> list[Chunk]:
    """Give each chunk gradient buffers that are summed over the data parallel ranks.

    Gradients are kept and summed in float32 whatever the parameters' precision.
    """
    ddp = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        overlap_grad_reduce=run.train.overlap_grad_reduce,
        overlap_param_gather=run.train.overlap_param_gather,
        use_distributed_optimizer=use_distributed_optimizer(run),
        check_for_nan_in_grad=False,  # the loop looks at the loss and the norm
        average_in_collective=False,
    )
    return [
        DistributedDataParallel(
            config=config, ddp_config=ddp, module=chunk, disable_bucketing=index > 0
        )
        for index, chunk in enumerate(chunks)
    ]


def use_distributed_optimizer(run: RunConfig) -> bool:
    """Whether optimizer state is sharded over data parallel ranks; Muon needs whole matrices."""
    return run.layout.distributed_optimizer and run.train.optimizer != "muon"


def build_optimizer(chunks: list[Chunk], run: RunConfig) -> Any:
    """Build the optimizer over all of this rank's chunks."""
    train = run.train
    config = OptimizerConfig(
        optimizer="adam",
        lr=train.lr,
        min_lr=train.min_lr,
        weight_decay=train.weight_decay,
        adam_beta1=train.beta1,
        adam_beta2=train.beta2,
        adam_eps=train.eps,
        clip_grad=train.clip_grad,
        bf16=run.dtype == "bf16",
        params_dtype=DTYPES[run.dtype],
        use_distributed_optimizer=use_distributed_optimizer(run),
        overlap_param_gather=run.train.overlap_param_gather,
        muon_momentum=train.muon_momentum,
        muon_tp_mode="duplicated",  # of whole matrices: blockwise, the curve would depend on TP
    )
    if train.optimizer == "muon":
        from megatron.core.optimizer.muon import get_megatron_muon_optimizer

        return get_megatron_muon_optimizer(config, chunks, use_gloo_process_groups=False)
    return get_megatron_optimizer(config, chunks, use_gloo_process_groups=False)


def inner_optimizers(optimizer: Any) -> list[Any]:
    """The torch optimizers inside Megatron's wrappers."""
    wrappers = getattr(optimizer, "chained_optimizers", [optimizer])
    return [wrapper.optimizer for wrapper in wrappers if wrapper.optimizer is not None]


def choose_kernels(optimizer: Any, device: Device) -> None:
    """Have torch's AdamW use the device's fastest kernel; a loaded state resets the choice."""
    choose = operators_for(device.kind).fuse_adamw
    for inner in inner_optimizers(optimizer):
        if isinstance(inner, torch.optim.AdamW):
            choose(inner)


def build_schedule(optimizer: Any, train: TrainConfig) -> OptimizerParamScheduler:
    """Build the learning-rate schedule, counted in steps.

    The loop advances it before each update, so step `k` (from 1) uses the schedule's value at `k`:
    the first step of a warm-up already learns, and the last step reaches `min_lr`.
    """
    total = train.decay_steps or train.steps
    wsd = train.lr_schedule == "wsd"
    return OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=train.lr,
        min_lr=train.min_lr,
        lr_warmup_steps=train.warmup_steps,
        lr_decay_steps=total,
        lr_decay_style="WSD" if wsd else train.lr_schedule,
        start_wd=train.weight_decay,
        end_wd=train.weight_decay,
        wd_incr_steps=total,
        wd_incr_style="constant",
        use_checkpoint_opt_param_scheduler=False,
        override_opt_param_scheduler=True,
        wsd_decay_steps=(train.wsd_decay_steps or max(1, total // 10)) if wsd else None,
        lr_wsd_decay_style="linear" if wsd else None,
    )
