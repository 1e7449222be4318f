"""RMSNorm over all heads of the queries, or of the keys, at once (MiniMax-M2, OLMo 2).

Tensor parallelism spreads the heads, so that the mean is over what all its ranks hold.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    reduce_from_tensor_model_parallel_region,
)
from torch import Tensor

from msllm.engine.megatron.model_config import ModelConfig
from msllm.engine.megatron.modules import sharded_by_heads


class WholeNorm(torch.nn.Module):
    """Norm of a projection that tensor parallelism cuts by heads.

    Args:
        config: The model's.
        hidden_size: Size of a head.
        heads: Heads of all ranks.
        eps: Added to the mean of squares.
    """

    def __init__(self, config: ModelConfig, hidden_size: int, heads: int, eps: float, **_: Any):
        super().__init__()
        self.eps, self.width = eps, heads * hidden_size
        held = self.width // config.tensor_model_parallel_size
        data = torch.ones(held, dtype=config.params_dtype, device=config.torch_device)
        self.weight = torch.nn.Parameter(data)
        set_tensor_model_parallel_attributes(self.weight, is_parallel=True, dim=0, stride=1)

    def forward(self, x: Tensor) -> Tensor:
        """Normalize this rank's heads `[s, b, n, d]`."""
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        squares = wide.square().sum(dim=(-2, -1), keepdim=True)
        # summed over the ranks on the way there and, as each rank uses it, on the way back
        squares = reduce_from_tensor_model_parallel_region(squares)
        squares = copy_to_tensor_model_parallel_region(squares)
        scale = (squares / self.width + self.eps).rsqrt()
        return (wide * scale * self.weight.view(x.shape[-2:])).to(x.dtype)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: Any = None
    ) -> dict[str, Any]:
        """Tell Megatron's checkpoints how the weight is cut."""
        return sharded_by_heads(self, ("weight",), prefix, sharded_offsets, metadata)
