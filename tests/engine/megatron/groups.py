"""Leaves Megatron's process groups between the cases of one job."""

from __future__ import annotations

import gc

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d


def leave() -> None:
    """Destroy all groups but that of all ranks.

    Megatron only forgets them; each has threads that go on polling, and a job goes through many.
    """
    from megatron.core import parallel_state

    if not dist.is_initialized():
        return
    dist.barrier()  # another rank may still be in a group's last collective
    parallel_state.destroy_model_parallel()
    for group in [g for g in c10d._world.pg_map if g is not dist.group.WORLD]:
        dist.destroy_process_group(group)
    gc.collect()  # what still refers to a group keeps its threads
