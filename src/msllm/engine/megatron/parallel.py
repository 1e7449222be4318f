"""Start and end Megatron's process groups from a Layout."""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel

from msllm.engine.device import Device
from msllm.engine.layout import Layout


def start(device: Device, layout: Layout, seed: int, timeout: timedelta) -> None:
    """Join the job (address and rank from the environment) and make all process groups."""
    device.set_current()
    if not dist.is_initialized():
        dist.init_process_group(device.process_group_backend, timeout=timeout)
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        virtual_pipeline_model_parallel_size=layout.vpp if layout.vpp > 1 else None,
        context_parallel_size=layout.cp,
        expert_model_parallel_size=layout.ep,
        expert_tensor_parallel_size=layout.etp,
        create_gloo_process_groups=False,
        distributed_timeout_minutes=max(1, int(timeout.total_seconds() // 60)),
    )
    tensor_parallel.model_parallel_cuda_manual_seed(seed, force_reset_rng=True)


def stop() -> None:
    """Leave the job; safe to call when it never started."""
    if parallel_state.model_parallel_is_initialized():
        parallel_state.destroy_model_parallel()
    if dist.is_initialized():
        dist.destroy_process_group()


def sum_over(values: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    """Sum a tensor over a group, in place; returns it."""
    dist.all_reduce(values, group=group)
    return values
