"""Prints torch_npu's version, the pretended devices and how many npu:: operators there are."""

from __future__ import annotations

import sys

import torch

from msllm.engine.device import select_device


def main() -> None:
    device = select_device("npu")
    device.set_current()
    import torch_npu

    if sys.argv[1:] == ["kernel"]:
        torch_npu.npu_swiglu(torch.empty(4, 6, device="npu"))
    names = {s.name for s in torch._C._jit_get_all_schemas() if s.name.startswith("npu::")}
    print(torch_npu.__version__, torch.npu.device_count(), device.name, len(names))


if __name__ == "__main__":
    main()
