"""What a case of `operators_check` is: one call of an operator, for any set of operators."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from msllm.engine.ops import REFERENCE, Operators, operators_for

Arguments = dict[str, Any]


@dataclass(frozen=True)
class Device:
    """Which implementations a case computes with."""

    npu: bool

    @property
    def ops(self) -> Operators:
        return operators_for("npu") if self.npu else REFERENCE

    def function(self, module: ModuleType, name: str) -> Callable[..., Any]:
        """An operator that no layer calls."""
        return getattr(module, name + "_npu" * self.npu)  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Case:
    name: str
    calls: tuple[str, ...]
    """The `npu::` operators that must have been called, once each way where there are two."""
    arguments: Callable[[torch.dtype], Arguments]
    compute: Callable[[Device, Arguments], Any]
    dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.bfloat16, torch.float16)
    rungs: tuple[str, ...] = ("trace", "launch", "values")


LOOKS = ("launch", "values")
"""What looks at lengths on the device can't be traced."""

VALUES = ("values",)


def operator(name: str) -> Callable[[Device, Arguments], Any]:
    """Compute with one field of `Operators`."""
    return lambda device, arguments: getattr(device.ops, name)(**arguments)


def tensor(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Random values that are differentiated."""
    return torch.randn(shape).to(dtype).requires_grad_()
