"""Holds every operator's NPU implementation to its reference; prints what differs, by case.

`trace`: on tensors without values (rung 1), shapes and dtypes of results and gradients.
`launch`: the same on the pretended device (rung 2), with torch_npu's own checks of arguments.
`values`: in the simulator (rung 3), their values, and that the fused operators were called.
"""

from __future__ import annotations

import json
import traceback
from collections.abc import Callable
from typing import Any

import torch
import torch_npu  # noqa: F401
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves, tree_map

from tests.npu.ops import more_references  # noqa: F401
from tests.npu.ops.cases import Arguments, Case, Device, cases
from tests.npu.simulator import Simulator

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}
ON_HOST = ("cu_seqlens",)


def run(case: Case, device: Device, arguments: Arguments) -> list[Tensor | None]:
    """Results, and gradients of what requires one, for a gradient made from nothing random."""
    results = [x for x in tree_leaves(case.compute(device, dict(arguments))) if x is not None]
    leaves = [x for x in tree_leaves(arguments) if isinstance(x, Tensor) and x.requires_grad]
    outs = [x for x in results if x.requires_grad]
    if not leaves:
        return results
    grads = [_slope(x) for x in outs]
    return results + list(torch.autograd.grad(outs, leaves, grads))


def _slope(x: Tensor) -> Tensor:
    steps = torch.arange(x.numel(), dtype=torch.float32, device=x.device)
    return (1 + torch.sin(steps)).to(x.dtype).view(x.shape)


def moved(arguments: Arguments, to: Callable[[Tensor], Tensor]) -> Arguments:
    def one(x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        return to(x).requires_grad_(x.requires_grad)

    return {k: v if k in ON_HOST else tree_map(one, v) for k, v in arguments.items()}


def traced(case: Case, arguments: Arguments, expected: list[Tensor | None]) -> None:
    with FakeTensorMode():
        given = moved(arguments, lambda x: torch.empty(x.shape, dtype=x.dtype, device="npu"))
        _same_shapes(run(case, Device(npu=True), given), expected)


def launched(case: Case, arguments: Arguments, expected: list[Tensor | None]) -> None:
    given = moved(arguments, lambda x: x.detach().npu())
    _same_shapes(run(case, Device(npu=True), given), expected)


def _same_shapes(actual: list[Tensor | None], expected: list[Tensor | None]) -> None:
    for i, (ours, theirs) in enumerate(zip(actual, expected, strict=True)):
        assert ours is not None, f"no gradient {i}"
        assert theirs is not None
        assert ours.device.type == "npu", ours.device
        assert (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype), (i, ours.shape)


def simulated(case: Case, arguments: Arguments, expected: list[Tensor | None]) -> None:
    narrowest = min(
        (x.dtype for x in tree_leaves(arguments) if isinstance(x, Tensor) and x.dtype in TOLERANCE),
        key=lambda dtype: -TOLERANCE[dtype],
    )
    given = moved(arguments, lambda x: x.detach().npu())
    with Simulator() as simulator:
        actual = run(case, Device(npu=True), given)
        calls = tuple(simulator.calls)
        for ours, theirs in zip(actual, expected, strict=True):
            assert ours is not None
            assert theirs is not None
            tolerance = TOLERANCE[narrowest]
            torch.testing.assert_close(ours.cpu(), theirs, rtol=tolerance, atol=tolerance)
    assert sorted(calls) == sorted(case.calls), calls


RUNGS = {"trace": traced, "values": simulated, "launch": launched}
"""`launch` comes last: what it leaves on the device has no values."""


def main() -> None:
    ran: dict[str, int] = {}
    failed: dict[str, dict[str, str]] = {rung: {} for rung in RUNGS}
    for rung, check in RUNGS.items():
        for case in cases():
            if rung not in case.rungs:
                continue
            ran[rung] = ran.get(rung, 0) + 1
            for dtype in case.dtypes:
                torch.manual_seed(1)
                arguments = case.arguments(dtype)
                try:
                    theirs = moved(arguments, lambda x: x.detach().clone())
                    check(case, arguments, run(case, Device(npu=False), theirs))
                except Exception:
                    name = f"{case.name} ({str(dtype).removeprefix('torch.')})"
                    failed[rung][name] = traceback.format_exc(limit=-4)
    print(json.dumps({"ran": ran, "failed": failed}))


if __name__ == "__main__":
    main()
