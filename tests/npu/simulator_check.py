"""What the simulator refuses, and what it leaves to torch_npu; prints a line for each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def main() -> None:
    import torch_npu

    from tests.npu.simulator import Simulator

    def said(function: Callable[..., Any], *args: Any, **kwargs: Any) -> str:
        try:
            function(*args, **kwargs)
        except (RuntimeError, ValueError, NotImplementedError) as error:
            return str(error).splitlines()[0]
        return "nothing"

    with Simulator() as simulator:
        x, host = torch.ones(4, device="npu"), torch.ones(4)
        print("mixed:", said(torch.add, x, host))
        print("mixed in a list:", said(torch.cat, [x, host]))
        print("mixed npu::", said(torch_npu.npu_rms_norm, x, host))
        print("scalar:", said(torch.add, x, torch.tensor(2.0)))
        print("copied:", said(x.copy_, host))
        print("moved:", (x + x).cpu().tolist())
        x[1:3].mul_(5)
        print("through a view:", x.tolist())
        print("fresh:", torch.empty(2, device="npu").tolist())
        half = x.bfloat16().view(2, 2)
        mixed = said(torch_npu.npu_fusion_attention, x.view(1, 1, 1, 4), half.view(1, 1, 1, 4),
                     x.view(1, 1, 1, 4), 1, "BNSD")  # fmt: skip
        print("mixed types:", mixed)
        print("unknown:", said(torch_npu.npu_fast_gelu, x))
        print("calls:", simulator.calls)
        print("no kernel:", simulator.fallbacks)
        torch.special.zeta(x, x)
        print("no kernel:", simulator.fallbacks)


if __name__ == "__main__":
    main()
