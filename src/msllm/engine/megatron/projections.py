"""The attention's linears, each with a bias of its own or without.

Megatron has one switch for the biases of a whole layer (`add_bias_linear`); published models
choose for queries, keys and values, for the output, and for the MLP.
"""

from __future__ import annotations

from typing import Any

from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear

from msllm.engine.megatron.model_config import ModelConfig


class QueryKeyValue(ColumnParallelLinear):
    """Queries, keys and values, heads spread over the tensor parallel group."""

    def __init__(self, *sizes: int, config: ModelConfig, bias: bool, **kwargs: Any):
        bias = config.architecture.qkv_bias
        super().__init__(*sizes, config=config, bias=bias, **kwargs)


class AttentionOutput(RowParallelLinear):
    """From the heads of the tensor parallel group to the hidden size."""

    def __init__(self, *sizes: int, config: ModelConfig, bias: bool, **kwargs: Any):
        bias = config.architecture.attention_out_bias
        super().__init__(*sizes, config=config, bias=bias, **kwargs)
