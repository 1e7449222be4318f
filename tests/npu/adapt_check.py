"""Does what fails without one of the adaptations for NPUs; its name as argument leaves it out."""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist

from msllm.engine.device import select_device
from msllm.engine.megatron.adapt import adapt
from tests.npu.training_check import simulated


def main() -> None:
    device = select_device("npu")
    adapt(device, skip=tuple(sys.argv[1:]))
    from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32

    with simulated(device):
        weight = torch.nn.Parameter(torch.ones(4, device="npu"))
        weight.grad = torch.full((4,), 10.0, device="npu")
        clip_grad_by_total_norm_fp32([weight], max_norm=1.0, total_norm=20.0)
        assert abs(float(weight.grad.norm()) - 1.0) < 1e-3
        assert weight.type(torch.float64).dtype == torch.float64
        dist.broadcast(weight.detach(), 0)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
