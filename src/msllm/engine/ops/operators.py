"""The set of operators that a device's layers compute with, chosen once.

Layers get it as `config.ops` and never ask for the device again. It holds module-level functions
only, so that a config holding it can be copied and pickled.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from msllm.engine.ops import activation, grouped_matmul, moe_permute, norm, rotary
from msllm.engine.ops import adamw as adamw_module
from msllm.engine.ops import attention as attention_module

TensorFunction = Callable[..., Tensor]


@dataclass(frozen=True, slots=True)
class Operators:
    """One implementation of each operator; their signatures are those of the references."""

    attention: TensorFunction = attention_module.attention
    rms_norm: TensorFunction = norm.rms_norm
    layer_norm: TensorFunction = norm.layer_norm
    swiglu: TensorFunction = activation.swiglu
    geglu: TensorFunction = activation.geglu
    rotary: TensorFunction = rotary.rotary
    grouped_matmul: TensorFunction = grouped_matmul.grouped_matmul
    permute: Callable[..., tuple[Tensor, Tensor | None, Tensor]] = moe_permute.permute
    unpermute: TensorFunction = moe_permute.unpermute
    adamw: Callable[..., torch.optim.AdamW] = adamw_module.adamw
    fuse_adamw: Callable[[torch.optim.AdamW], None] = adamw_module.fuse_adamw

    def implementations(self) -> dict[str, str]:
        """Operator -> where its implementation is, as `module.function`, for a run's header."""
        chosen = {field.name: getattr(self, field.name) for field in fields(self)}
        return {
            name: f"{function.__module__.rpartition('.')[2]}.{function.__name__}"
            for name, function in chosen.items()
        }


REFERENCE = Operators()
"""The pure-torch implementations: right everywhere, and the truth for tests."""

_OWN: dict[str, dict[str, Callable[..., Any]]] = {
    "npu": {"adamw": adamw_module.adamw_foreach, "fuse_adamw": adamw_module.foreach_adamw},
}
"""Kind of device -> operator -> implementation, for those that beat the reference there."""


def operators_for(kind: str) -> Operators:
    """Choose the operators of a kind of device: its own where it has them, else references."""
    return Operators(**_OWN.get(kind, {}))
