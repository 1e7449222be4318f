"""Multi-head latent attention (arXiv:2405.04434, section 2.1) for Megatron's layers.

Parameters are called as in Megatron's `MLASelfAttention`. That one is not used: it spreads the
rows of the down projections over the tensor parallel group, and gives the part of the key that all
heads share the gradient of a rank's own heads only.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from megatron.core.transformer.attention import Attention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.multi_latent_attention import MLASelfAttentionSubmodules
from torch import Tensor

from msllm.engine.megatron.model_config import ModelConfig
from msllm.engine.megatron.modules import Norm


class Replicated(torch.nn.Module):
    """A linear that every rank of the tensor parallel group holds whole, `[out, in]`."""

    def __init__(self, config: ModelConfig, inputs: int, outputs: int):
        super().__init__()
        data = torch.empty(outputs, inputs, dtype=config.params_dtype, device=config.torch_device)
        self.weight = torch.nn.Parameter(data)
        # ranks with parts of the tokens have parts of the gradient, see `Norm`
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        """Map `[..., in]` to `[..., out]`."""
        return torch.nn.functional.linear(x, self.weight)


class LatentAttention(Attention):
    """Self-attention whose keys and values, and maybe queries, come out of small latents."""

    def __init__(
        self,
        config: ModelConfig,
        submodules: MLASelfAttentionSubmodules,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        cp_comm_type: str | None = None,
        pg_collection: ProcessGroupCollection | None = None,
    ):
        super().__init__(
            config, submodules, layer_number, attn_mask_type, "self", cp_comm_type, pg_collection
        )
        mla, hidden, heads = config.architecture.mla, config.hidden_size, config.num_attention_heads
        assert mla is not None
        self.mla = mla
        queries = heads * config.architecture.head_dim
        if mla.q_lora_rank is None:
            self.linear_q_proj = self._up(hidden, queries)
        else:
            self.linear_q_down_proj = Replicated(config, hidden, mla.q_lora_rank)
            self.q_layernorm = Norm(config, mla.q_lora_rank, mla.norm_eps)
            self.linear_q_up_proj = self._up(mla.q_lora_rank, queries)
        down = mla.kv_lora_rank + mla.qk_rope_head_dim
        self.linear_kv_down_proj = Replicated(config, hidden, down)
        self.kv_layernorm = Norm(config, mla.kv_lora_rank, mla.norm_eps)
        up = heads * (mla.qk_nope_head_dim + mla.v_head_dim)
        self.linear_kv_up_proj = self._up(mla.kv_lora_rank, up)

    def _up(self, inputs: int, outputs: int) -> ColumnParallelLinear:
        """A linear whose outputs, by head, are spread over the tensor parallel group."""
        return ColumnParallelLinear(
            inputs,
            outputs,
            config=self.config,
            init_method=self.config.init_method,
            bias=False,
            gather_output=False,
            tp_group=self.tp_group,
        )

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None,
        rotary_pos_emb: Tensor | None = None,
        packed_seq_params: Any = None,
        **_: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Attend over `[s, b, h]` (a rank's part of s under sequence parallelism).

        Args:
            hidden_states: The layer's normalized input.
            attention_mask: Unused: attention is causal.
            rotary_pos_emb: cos and sin side by side, `[s, b, 1, 2 r]`.
            packed_seq_params: Where packed sequences begin and end.
        """
        assert rotary_pos_emb is not None
        heads = self.get_query_key_value_tensors(hidden_states, rotary_pos_emb=rotary_pos_emb)
        if self.checkpoint_core_attention and self.training:
            attended = self._checkpointed_attention_forward(
                *heads, attention_mask, packed_seq_params=packed_seq_params
            )
        else:
            attended = self.core_attention(
                *heads, attention_mask, packed_seq_params=packed_seq_params
            )
        output: tuple[Tensor, Tensor | None] = self.linear_proj(attended)
        return output

    def get_query_key_value_tensors(
        self, hidden_states: Tensor, *_: Any, rotary_pos_emb: Tensor, **__: Any
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Queries and keys `[s, b, n, d]`, values `[s, b, n, v]`, of this rank's n heads."""
        mla = self.mla
        cos, sin = rotary_pos_emb.chunk(2, dim=-1)

        def turned(x: Tensor) -> Tensor:
            interleaved = self.config.architecture.rope.interleaved
            return self.config.ops.rotary(x, cos, sin, interleaved=interleaved)

        query = self._by_head(self._queries(hidden_states))
        latent, shared = self.linear_kv_down_proj(hidden_states).split(
            (mla.kv_lora_rank, mla.qk_rope_head_dim), dim=-1
        )
        both = self._by_head(self.linear_kv_up_proj(self.kv_layernorm(latent))[0])
        key, value = both.split((mla.qk_nope_head_dim, mla.v_head_dim), dim=-1)
        shared = turned(self._of_all_heads(shared).unsqueeze(2))
        key = torch.cat((key, shared.expand(-1, -1, key.size(2), -1)), dim=-1)
        plain, to_turn = query.split((mla.qk_nope_head_dim, mla.qk_rope_head_dim), dim=-1)
        return torch.cat((plain, turned(to_turn)), dim=-1), key, value

    def _queries(self, hidden_states: Tensor) -> Tensor:
        if self.mla.q_lora_rank is None:
            found: Tensor = self.linear_q_proj(hidden_states)[0]
        else:
            latent = self.q_layernorm(self.linear_q_down_proj(hidden_states))
            found = self.linear_q_up_proj(latent)[0]
        return found

    def _by_head(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.num_attention_heads_per_partition, -1))

    def _of_all_heads(self, shared: Tensor) -> Tensor:
        """The whole sequence's, with the gradient summed over all ranks' heads."""
        if self.config.sequence_parallel:
            return gather_from_sequence_parallel_region(shared, group=self.tp_group)
        return copy_to_tensor_model_parallel_region(shared, group=self.tp_group)
