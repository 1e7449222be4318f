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

from msllm.engine.ops import activation, attention_npu, grouped_matmul, moe_permute, norm, rotary
from msllm.engine.ops import adamw as adamw_module
from msllm.engine.ops import attention as attention_module
from msllm.engine.ops import routing as routing_module

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
    by_scores: Callable[..., tuple[Tensor, Tensor]] = routing_module.by_scores
    adamw: Callable[..., torch.optim.AdamW] = adamw_module.adamw
    fuse_adamw: Callable[[torch.optim.AdamW], None] = adamw_module.fuse_adamw

    def implementations(self) -> dict[str, str]:
        """Operator -> where its implementation is, as `module.function`, for a run's header.

        A device's own implementation that leaves some calls to the reference says which.
        """
        chosen = {field.name: getattr(self, field.name) for field in fields(self)}
        named = {}
        for name, function in chosen.items():
            left = _LEFT_TO_REFERENCE.get(function)
            where = f"{function.__module__.rpartition('.')[2]}.{function.__name__}"
            named[name] = where if left is None else f"{where} (reference for {left})"
        return named


REFERENCE = Operators()
"""The pure-torch implementations: right everywhere, and the truth for tests."""

_OWN: dict[str, dict[str, Callable[..., Any]]] = {
    "npu": {
        "attention": attention_npu.attention_npu,
        "rms_norm": norm.rms_norm_npu,
        "swiglu": activation.swiglu_npu,
        "geglu": activation.geglu_npu,
        "rotary": rotary.rotary_npu,
        "grouped_matmul": grouped_matmul.grouped_matmul_npu,
        "permute": moe_permute.permute_npu,
        "unpermute": moe_permute.unpermute_npu,
        "by_scores": routing_module.by_scores_npu,
        "adamw": adamw_module.adamw_npu,
        "fuse_adamw": adamw_module.fuse_adamw_npu,
    },
}
"""Kind of device -> operator -> implementation, for those that beat the reference there.

LayerNorm stays torch's, which has a kernel on each device.
"""

_LEFT_TO_REFERENCE: dict[Callable[..., Any], str] = {
    attention_npu.attention_npu: "a soft cap",
    activation.swiglu_npu: "a limit or alpha",
    activation.geglu_npu: "a limit",
    rotary.rotary_npu: "1000 heads or sequences, and 896 dimensions",
    moe_permute.permute_npu: "unequal numbers of experts, and padding",
    moe_permute.unpermute_npu: "what the reference permuted",
    routing_module.by_scores_npu: "sums that the kernel doesn't make",
}
"""What each implementation can't do, and computes as the reference does."""


def operators_for(kind: str) -> Operators:
    """Choose the operators of a kind of device: its own where it has them, else references."""
    return Operators(**_OWN.get(kind, {}))
