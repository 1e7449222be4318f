"""This rank's parts of the model's whole parameters.

A parameter goes by its global name, with global numbers of layers and experts; grouped experts
count as the linears that they are made of. What is done with the values is the caller's business.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

from megatron.core import parallel_state
from torch import Tensor

from msllm.engine.megatron.model import LanguageModel
from msllm.engine.megatron.model_config import ModelConfig
from msllm.engine.weights.slice import Slice, rows_held


def parts(
    chunks: list[LanguageModel], of: Callable[[Tensor], Tensor] = lambda parameter: parameter
) -> Iterator[tuple[Slice, Tensor]]:
    """Give each slice that this rank holds with a view on its values, `[out, in]` or `[out]`.

    Args:
        chunks: The rank's chunks of the model.
        of: What of a parameter is viewed; its gradient, for one.
    """
    for chunk in chunks:
        for local, tensor in (*chunk.named_parameters(), *_balancing(chunk)):
            name, values = global_name(local, chunk), of(tensor).detach()
            if name.endswith((".weight1", ".weight2")):
                yield from _grouped(values, name, chunk.config)
            else:
                yield _slice(tensor, name, chunk.config), values


def _balancing(chunk: LanguageModel) -> Iterator[tuple[str, Tensor]]:
    """Routers' balancing biases, which no gradient trains and which are weights all the same."""
    for name, buffer in chunk.named_buffers():
        if name.endswith("router.expert_bias"):
            yield name, buffer


def global_name(name: str, chunk: LanguageModel) -> str:
    """The parameter's name with global layer and expert numbers.

    A tied output layer on a later pipeline stage is the embedding.
    """
    if name == "output_layer.weight" and chunk.share_embeddings_and_output_weights:
        return "embedding.word_embeddings.weight"
    first = chunk.global_layers.start
    name = re.sub(r"(?<=\bdecoder\.layers\.)\d+", lambda m: str(int(m[0]) + first), name, count=1)
    experts = chunk.config.num_moe_experts
    if experts:
        offset = _expert_offset(chunk.config)
        name = re.sub(r"(?<=local_experts\.)\d+", lambda m: str(int(m[0]) + offset), name)
    return name


def _expert_offset(config: ModelConfig) -> int:
    local = config.num_moe_experts // config.expert_model_parallel_size
    return parallel_state.get_expert_model_parallel_rank() * local


def _slice(parameter: Tensor, name: str, config: ModelConfig) -> Slice:
    """The slice of a Megatron parallel linear, from the marks Megatron left on the parameter."""
    rows, columns = parameter.shape if parameter.dim() == 2 else (len(parameter), 0)
    if not getattr(parameter, "tensor_model_parallel", False):
        return Slice(name, 0, columns, ((0, rows),))
    size, rank = _tensor_group(expert=".experts." in name)
    if parameter.partition_dim == 1:  # type: ignore[attr-defined]
        return Slice(name, 1, rows, ((rank * columns, columns),))
    gated = name.endswith(("linear_fc1.weight", "linear_fc1.bias")) and config.gated_linear_unit
    return Slice(name, 0, columns, rows_held(rows, rank, size, gated))


def _tensor_group(expert: bool) -> tuple[int, int]:
    if expert:
        return (
            parallel_state.get_expert_tensor_parallel_world_size(),
            parallel_state.get_expert_tensor_parallel_rank(),
        )
    return (
        parallel_state.get_tensor_model_parallel_world_size(),
        parallel_state.get_tensor_model_parallel_rank(),
    )


def _grouped(values: Tensor, name: str, config: ModelConfig) -> Iterator[tuple[Slice, Tensor]]:
    """Give a grouped-experts weight, expert by expert, as a sequential MLP would hold it.

    weight1 is `[hidden, experts * out]`, weight2 `[experts * in, hidden]`: transposed linears.
    """
    local = config.num_moe_experts // config.expert_model_parallel_size
    size, rank = _tensor_group(expert=True)
    prefix, kind = name.rsplit(".", 1)
    first = kind == "weight1"
    linear = "linear_fc1" if first else "linear_fc2"
    shape = (local, config.hidden_size, -1) if first else (local, -1, config.hidden_size)
    view = values.view(shape)
    for expert in range(local):
        number = _expert_offset(config) + expert
        inputs, outputs = view[expert].shape
        full = f"{prefix}.local_experts.{number}.{linear}.weight"
        if first:
            held = rows_held(outputs, rank, size, config.gated_linear_unit)
            part = Slice(full, 0, inputs, held)
        else:
            part = Slice(full, 1, outputs, ((rank * inputs, inputs),))
        yield part, view[expert].t()
