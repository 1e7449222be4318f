"""A layer's linears where biases are other than Megatron has them.

Megatron has one switch for the biases of a whole layer (`add_bias_linear`); published models
choose for queries, keys and values, for attention's output, and for the MLP.
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


class Down(RowParallelLinear):
    """From what the tensor parallel group holds to the hidden size.

    Adds its bias itself, where Megatron hands it on to the residual's addition: out of an MLP
    that is computed again, autograd would take the parameter for a result and never end.
    """

    def __init__(self, *sizes: int, skip_bias_add: bool, **kwargs: Any):
        super().__init__(*sizes, skip_bias_add=False, **kwargs)


class ExpertDown(RowParallelLinear):
    """Down, of one expert.

    Its result is its own, that Megatron may add weighed biases to in place. What tensor parallel
    ranks have is summed by the token dispatcher. The bias is an expert's like all of it: under
    sequence parallelism, Megatron would sum its gradient over the tensor parallel ranks once more.
    """

    def __init__(self, *sizes: int, **kwargs: Any):
        super().__init__(*sizes, **kwargs)
        self.explicit_expert_comm = True
        if self.bias is not None:
            self.bias.sequence_parallel = False


class AttentionOutput(Down):
    """From the heads of the tensor parallel group to the hidden size."""

    def __init__(self, *sizes: int, config: ModelConfig, bias: bool, **kwargs: Any):
        bias = config.architecture.attention_out_bias
        super().__init__(*sizes, config=config, bias=bias, **kwargs)
