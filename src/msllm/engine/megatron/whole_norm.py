"""RMSNorm over all heads of the queries, or of the keys, at once (MiniMax-M2, OLMo 2).

Tensor parallelism spreads the heads, so that the mean is over what all its ranks hold.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from torch import Tensor
from torch.autograd.function import once_differentiable

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
        normed: Tensor = _WholeRMSNorm.apply(x, self.weight, self.eps, self.width)
        return normed

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: Any = None
    ) -> dict[str, Any]:
        """Tell Megatron's checkpoints how the weight is cut."""
        return sharded_by_heads(self, ("weight",), prefix, sharded_offsets, metadata)


class _WholeRMSNorm(torch.autograd.Function):
    """Keeps its input and one number a token, as `engine.ops.norm` does."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float, width: int) -> Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        rstd = (_summed(wide.square()) / width + eps).rsqrt()
        ctx.save_for_backward(x, weight, rstd)
        ctx.width = width
        return (wide * rstd * weight.view(x.shape[-2:])).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None]:
        """With r = rstd: dweight = sum(g x r), dx = r (g w) - x r^3 sum(g w x) / width."""
        x, weight, rstd = ctx.saved_tensors
        wide = x.to(rstd.dtype)
        dweight = (grad * wide * rstd).sum(dim=(0, 1)).flatten()
        scaled = grad * weight.view(x.shape[-2:]).to(rstd.dtype)
        mean = _summed(scaled * wide) / ctx.width
        dx = scaled * rstd - wide * rstd.pow(3) * mean
        return dx.to(x.dtype), dweight.to(weight.dtype), None, None


def _summed(x: Tensor) -> Tensor:
    """Sum over the heads of all tensor parallel ranks: `[s, b, n, d]` -> `[s, b, 1, 1]`."""
    own = x.sum(dim=(-2, -1), keepdim=True)
    torch.distributed.all_reduce(own, group=parallel_state.get_tensor_model_parallel_group())
    return own
