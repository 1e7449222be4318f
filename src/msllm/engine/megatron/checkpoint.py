"""Save and load a MegatronBackend in Megatron-core's `torch_dist` format.

The files hold global tensors: what one layout wrote, any other reads. Folders, their names and
what makes one complete are the business of `training.checkpoint_folder`.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.dist_checkpointing.serialization import load_sharded_metadata
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

from msllm.engine.megatron.optimizer import choose_kernels, inner_optimizers

if TYPE_CHECKING:
    from msllm.engine.megatron.backend import MegatronBackend

EXTRA_STATE = "_extra_state"
"""What Transformer Engine's modules keep beside parameters. Ours have none: it is written, for
Megatron's other readers, and never read, so that converted checkpoints can do without."""


def save(backend: MegatronBackend, folder: Path, background: bool) -> Any:
    """Write the backend's state into `folder`, which exists and is empty.

    With `background`, only the copy to host memory is made before returning; the request that is
    returned does the rest (see `dist_checkpointing.save`).
    """
    if backend.run.train.overlap_param_gather:
        for chunk in backend.chunks:  # else gathered at the next forward: files would be stale
            chunk.start_param_sync(force_sync=True)
    return dist_checkpointing.save(
        _state(backend, loading=False),
        str(folder),
        async_sharded_save=background,
        validate_access_integrity=True,
        content_metadata=_metadata(),
    )


def load(backend: MegatronBackend, folder: Path) -> None:
    """Read a checkpoint into the backend, whatever layout wrote it."""
    _allocate_optimizer_state(backend.optimizer)
    request = _state(backend, loading=True)
    saved_here = _saved_at_this_layout(folder)
    if not saved_here:
        request.pop("rng")
    state = dist_checkpointing.load(request, str(folder), validate_access_integrity=True)
    _fill(backend, state)
    backend.optimizer.load_state_dict(state["optimizer"])
    _separate_steps(backend.optimizer)
    choose_kernels(backend.optimizer, backend.device)
    if saved_here:
        _set_random_state(backend, state["rng"])


def load_weights(backend: MegatronBackend, folder: Path) -> None:
    """Read only the weights of a checkpoint into the backend; its optimizer copies them too."""
    request = _weights(backend, loading=True)
    _fill(backend, dist_checkpointing.load(request, str(folder), validate_access_integrity=True))
    backend.optimizer.reload_model_params()


def _fill(backend: MegatronBackend, state: dict[str, Any]) -> None:
    for index, chunk in enumerate(backend.chunks):
        found = chunk.module.load_state_dict(state[_key(backend, index)], strict=False)
        missing = [name for name in found.missing_keys if not name.endswith(EXTRA_STATE)]
        if missing or found.unexpected_keys:
            raise AssertionError(f"weights do not fit: {missing} {found.unexpected_keys}")


def _allocate_optimizer_state(optimizer: Any) -> None:
    """Give Adam's state its tensors before there was a step.

    Megatron's distributed optimizer can only load into existing state, and makes it by itself
    only for the optimizers of Transformer Engine and Apex.
    """
    for inner in inner_optimizers(optimizer):
        if not isinstance(inner, torch.optim.AdamW):
            continue
        for group in inner.param_groups:
            for parameter in group["params"]:
                if not inner.state[parameter]:
                    inner.state[parameter] = {
                        "step": torch.tensor(0.0),
                        "exp_avg": torch.zeros_like(parameter),
                        "exp_avg_sq": torch.zeros_like(parameter),
                    }


def _separate_steps(optimizer: Any) -> None:
    """Give each parameter its own step counter.

    Megatron's distributed optimizer loads one tensor into all of them; counted up once for each
    parameter, it would run away.
    """
    for inner in inner_optimizers(optimizer):
        for state in inner.state.values():
            if torch.is_tensor(state.get("step")):
                state["step"] = state["step"].clone()


def _key(backend: MegatronBackend, index: int) -> str:
    return "model" if len(backend.chunks) == 1 else f"model{index}"


def _metadata() -> dict[str, Any]:
    return {
        "distrib_optim_sharding_type": "fully_reshardable",
        "distrib_optim_fully_reshardable_mem_efficient": False,
        "singleton_local_shards": False,
        "chained_optim_avoid_prefix": True,
        "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
    }


def _weights(backend: MegatronBackend, loading: bool) -> dict[str, Any]:
    metadata = _metadata()
    return {
        _key(backend, index): {
            name: tensor
            for name, tensor in chunk.module.sharded_state_dict(metadata=metadata).items()
            if not (loading and name.endswith(EXTRA_STATE))
        }
        for index, chunk in enumerate(backend.chunks)
    }


def _state(backend: MegatronBackend, loading: bool) -> dict[str, Any]:
    metadata = _metadata()
    state = _weights(backend, loading)
    state["optimizer"] = backend.optimizer.sharded_state_dict(
        dict(state), is_loading=loading, metadata=metadata
    )
    state["rng"] = _random_state(backend)
    return state


def _random_state(backend: MegatronBackend) -> ShardedObject:
    """Every rank's random state, by rank: it only makes sense at the layout that saved it."""
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    state = {
        "cpu": torch.get_rng_state(),
        "device": backend.device.rng_state(),
        "tracker": get_cuda_rng_tracker().get_states(),
    }
    return ShardedObject("rng", state, (world,), (rank,))


def _set_random_state(backend: MegatronBackend, state: dict[str, Any]) -> None:
    torch.set_rng_state(state["cpu"])
    backend.device.set_rng_state(state["device"])
    get_cuda_rng_tracker().set_states(state["tracker"])


def _saved_at_this_layout(folder: Path) -> bool:
    """Whether as many ranks wrote the checkpoint as there are now."""
    found = load_sharded_metadata(str(folder)).values()
    shapes = {entry.global_shape for entry in found if entry.key == "rng"}
    return shapes == {(torch.distributed.get_world_size(),)}
