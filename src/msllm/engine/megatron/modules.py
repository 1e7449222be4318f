"""The modules msllm gives to Megatron's layers: thin shells around `engine.ops`.

They hold parameters and speak Megatron's constructor conventions; the mathematics, and the choice
between a device's implementations, is in `config.ops`.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.moe.experts import GroupedMLP
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor

from msllm.engine.megatron.model_config import ModelConfig


class Norm(torch.nn.Module):
    """RMSNorm or LayerNorm over the last dimension, as the architecture says.

    Under sequence parallelism each rank sees a part of the tokens; the flag on the parameters
    makes Megatron sum their gradients over the tensor parallel group.
    """

    def __init__(self, config: ModelConfig, hidden_size: int, eps: float = 1e-5, **_: Any):
        super().__init__()
        self.ops = config.ops
        self.eps = eps
        self.zero_centered = config.layernorm_zero_centered_gamma
        self.weight = self._parameter(hidden_size, config, 0.0 if self.zero_centered else 1.0)
        self.bias = (
            self._parameter(hidden_size, config, 0.0)
            if config.normalization == "LayerNorm"
            else None
        )

    @staticmethod
    def _parameter(size: int, config: ModelConfig, value: float) -> torch.nn.Parameter:
        data = torch.full((size,), value, dtype=config.params_dtype, device=config.torch_device)
        parameter = torch.nn.Parameter(data)
        parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        return parameter

    def forward(self, x: Tensor) -> Tensor:
        """Normalize `x` `[..., hidden_size]`."""
        if self.bias is None:
            return self.ops.rms_norm(x, self.weight, self.eps, self.zero_centered)
        return self.ops.layer_norm(x, self.weight, self.bias, self.eps, self.zero_centered)


class CoreAttention(MegatronModule):
    """Softmax attention of one layer over this rank's heads."""

    def __init__(
        self,
        config: ModelConfig,
        layer_number: int,
        softmax_scale: float | None = None,
        **_: Any,
    ):
        super().__init__(config=config)
        architecture = config.architecture
        self.scale = softmax_scale or architecture.head_dim**-0.5
        sliding = architecture.sliding_layers
        windowed = sliding is None or (layer_number - 1) in sliding
        self.window = architecture.sliding_window if windowed else None
        self.softmax_offset: torch.nn.Parameter | None = None
        if architecture.attention_sinks:
            self.softmax_offset = self._sinks(config)

    @staticmethod
    def _sinks(config: ModelConfig) -> torch.nn.Parameter:
        """A logit for each of this rank's heads; called, and cut, as Megatron does."""
        held = config.num_attention_heads // config.tensor_model_parallel_size
        data = torch.zeros(held, dtype=config.params_dtype, device=config.torch_device)
        sinks = torch.nn.Parameter(data)
        set_tensor_model_parallel_attributes(sinks, is_parallel=True, dim=0, stride=1)
        return sinks

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        /,
        *,
        attn_mask_type: Any = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: Any = None,
    ) -> Tensor:
        """Attend: query `[s, b, n, d]`, key and value `[s, b, g, d]` -> `[s, b, n d]`."""
        out = self.config.ops.attention(
            query,
            key,
            value,
            scale=self.scale,
            window=self.window,
            softcap=self.config.architecture.attention_softcap,
            sinks=self.softmax_offset,
            cu_seqlens=None if packed_seq_params is None else packed_seq_params.cu_seqlens_q,
        )
        return out.flatten(-2)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: Any = None
    ) -> dict[str, Any]:
        """Tell Megatron's checkpoints how the sinks are cut."""
        return sharded_by_heads(self, ("softmax_offset",), prefix, sharded_offsets, metadata)


def sharded_by_heads(
    module: torch.nn.Module,
    names: tuple[str, ...],
    prefix: str,
    sharded_offsets: tuple[Any, ...],
    metadata: Any,
) -> dict[str, Any]:
    """What Megatron's checkpoints want to know of vectors that ranks hold for their heads."""
    return make_sharded_tensors_for_checkpoint(
        module.state_dict(prefix="", keep_vars=True),
        prefix,
        dict.fromkeys(names, 0),
        sharded_offsets,
        tp_group=parallel_state.get_tensor_model_parallel_group(),
        dp_cp_group=metadata["dp_cp_group"],
    )


class Activation(MegatronModule):
    """The MLP's activation; on gated MLPs the input holds gate and up side by side."""

    def forward(self, x: Tensor) -> Tensor:
        """Map `[..., 2 f]` to `[..., f]` (gated) or `[..., f]` to itself."""
        return activate(x, self.config)


def activate(x: Tensor, config: ModelConfig) -> Tensor:
    """Apply the architecture's activation to `x` `[..., f]` or `[..., 2 f]`."""
    name = config.architecture.activation
    approximate = "tanh" if name == "gelu_tanh" else "none"
    if not config.gated_linear_unit:
        if name == "relu2":
            return torch.nn.functional.relu(x).square()
        if name == "silu":
            return torch.nn.functional.silu(x)
        return torch.nn.functional.gelu(x, approximate=approximate)
    if name == "silu":
        limit, alpha = config.architecture.swiglu_limit, config.architecture.swiglu_alpha
        return config.ops.swiglu(x, limit=limit, alpha=alpha)
    return config.ops.geglu(x, approximate=approximate)


class GroupedExperts(GroupedMLP):
    """This rank's experts as one grouped matmul a projection, in any dtype."""

    def forward(
        self,
        permuted_local_hidden_states: Tensor,
        tokens_per_expert: Tensor,
        permuted_probs: Tensor,
    ) -> tuple[Tensor, None]:
        """Run tokens `[t, h]`, sorted by expert, through their experts; weigh by `probs` `[t]`."""
        config, x = self.config, permuted_local_hidden_states
        w1 = self.weight1.view(self.num_local_experts, config.hidden_size, -1)
        w2 = self.weight2.view(self.num_local_experts, -1, config.hidden_size)

        def activated(hidden: Tensor, probs: Tensor) -> Tensor:
            return (activate(hidden, config) * probs).to(hidden.dtype)

        hidden = config.ops.grouped_matmul(x, w1, tokens_per_expert)
        probs = permuted_probs.unsqueeze(-1)
        if not self.activation_recompute:
            return config.ops.grouped_matmul(activated(hidden, probs), w2, tokens_per_expert), None

        from megatron.core.tensor_parallel import CheckpointWithoutOutput

        checkpoint = CheckpointWithoutOutput(fp8=None)
        inner = checkpoint.checkpoint(activated, hidden, probs)
        out = config.ops.grouped_matmul(inner, w2, tokens_per_expert)
        checkpoint.discard_output_and_register_recompute(out)
        return out, None


class RotaryEmbedding:
    """Cosines and sines of the positions, made once and kept for the longest length seen.

    Scalings that depend on a sequence's length make them anew when that changes. Not a module: it
    has no parameters and no state worth saving.
    """

    def __init__(self, config: ModelConfig, max_position: int):
        self.config = config
        self.max_position = max_position
        self._table: Tensor | None = None
        scaling = config.architecture.rope.scaling or {}
        self._by_length = scaling.get("type") in ("dynamic", "longrope")

    def __call__(self, position_ids: Tensor) -> Tensor:
        """Return cos and sin side by side, `[s, 1, 1, 2 r]`, for positions `[b, s]`.

        All rows of a batch have the same positions.
        """
        from msllm.engine.ops.rotary import cos_sin, inverse_frequencies

        length = position_ids.size(-1)
        held = 0 if self._table is None else self._table.size(0)
        if self._table is None or held < length or (self._by_length and held != length):
            architecture = self.config.architecture
            rope = architecture.rope
            frequencies, factor = inverse_frequencies(
                rope, architecture.rotary_head_dim, self.max_position, length
            )
            positions = torch.arange(length, device="cpu")
            cos, sin = cos_sin(frequencies, positions, factor, rope.interleaved)
            table = torch.cat((cos, sin), dim=-1).view(length, 1, 1, -1)
            self._table = table.to(position_ids.device)
        return self._table.index_select(0, position_ids[0])
