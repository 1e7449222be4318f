"""What a rank of a model, built for training, holds from step to step, and its process groups."""

from __future__ import annotations

from typing import Any

import torch

from msllm.config import RunConfig


def static(chunks: list[Any], run: RunConfig) -> tuple[dict[str, int], int, list[torch.Tensor]]:
    """Bytes of what stays, by item; the number of updated parameters; the tensors that stay.

    The optimizer itself is not built, as that would ask the other ranks.
    """
    parameters = [p for chunk in chunks for p in chunk.parameters()]
    buffers = [b for c in chunks for b in (*c.buffers, *c.expert_parallel_buffers)]
    gradients = [buffer.grad_data for buffer in buffers]
    others = [b for chunk in chunks for b in torch.nn.Module.buffers(chunk.module)]
    updated, state = _updated(parameters, buffers, run)
    found = {
        "parameters": _allocated(parameters),
        "gradients": _allocated(gradients),
        "main parameters": 4 * updated if run.dtype == "bf16" else 0,
        "optimizer state": state,
    }
    return found, updated, [*parameters, *gradients, *others]


def _updated(parameters: list[Any], buffers: list[Any], run: RunConfig) -> tuple[int, int]:
    """Elements that this rank updates, and bytes of the optimizer's state for them."""
    from msllm.engine.megatron.optimizer import use_distributed_optimizer

    if use_distributed_optimizer(run):
        from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

        maps = [DistributedOptimizer._build_gbuf_range_map(buffer) for buffer in buffers]
        buckets = [bucket for by_type in maps for found in by_type.values() for bucket in found]
        held = sum(r["param"].size for bucket in buckets for r in bucket["param_map"].values())
        return held, 8 * held
    count = sum(p.numel() for p in parameters)
    if run.train.optimizer == "muon":  # one momentum of matrices, Adam's two of all else
        matrices = [p for p in parameters if p.dim() == 2]
        matrices = [p for p in matrices if not getattr(p, "is_embedding_or_output_parameter", 0)]
        by_muon = sum(p.numel() for p in matrices)
        return count, 4 * by_muon + 8 * (count - by_muon)
    return count, 8 * count


def _allocated(tensors: list[torch.Tensor]) -> int:
    """Bytes of the storages behind tensors, each counted once."""
    storages = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values())


def group_names() -> dict[str, str]:
    """Torch's names of this rank's process groups -> msllm's; the first of equal groups counts."""
    from megatron.core import parallel_state as state

    groups = {
        "tp": state.get_tensor_model_parallel_group(),
        "pp": state.get_pipeline_model_parallel_group(),
        "dp": state.get_data_parallel_group(with_context_parallel=True),
        "dp without cp": state.get_data_parallel_group(),
        "cp": state.get_context_parallel_group(),
        "ep": state.get_expert_model_parallel_group(),
        "etp": state.get_expert_tensor_parallel_group(),
        "etp x ep": state.get_expert_tensor_and_model_parallel_group(),
        "expert dp": state.get_expert_data_parallel_group(),
        "embedding": state.get_embedding_group(check_initialized=False),
        "tp x cp": state.get_tensor_and_context_parallel_group(),
        "tp x dp": state.get_tensor_and_data_parallel_group(with_context_parallel=True),
        "model": state.get_model_parallel_group(),
    }
    return {g.group_name: name for name, g in groups.items() if hasattr(g, "group_name")}
