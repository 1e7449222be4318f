"""Initial weights that depend only on the seed and on what a parameter is.

Each parameter is filled from random streams keyed by the seed, its global name (with its global
layer and expert number) and the position of a block of rows, so a model starts from the same
numbers at any TP, PP, VPP, EP and DP, on any device, and a rank draws only what it keeps.
Biases start at zero and norms at one, as their modules made them.
"""

from __future__ import annotations

import hashlib
import math
import re
from dataclasses import dataclass

import torch
from megatron.core import parallel_state
from torch import Tensor

from msllm.engine.megatron.model import LanguageModel
from msllm.engine.megatron.model_config import ModelConfig

BLOCK = 64
"""Rows (or columns, where those are cut) drawn from one random stream."""


@dataclass(frozen=True, slots=True)
class Slice:
    """The part of a global matrix that a rank holds.

    Attributes:
        name: Global name of the matrix.
        axis: Axis along which tensor parallelism cuts it (0: output rows, 1: input columns).
        width: Length of the other axis.
        runs: `(first, count)` of each run of global rows (or columns) held, in the order held.
    """

    name: str
    axis: int
    width: int
    runs: tuple[tuple[int, int], ...]


def initialize(chunks: list[LanguageModel], seed: int, std: float) -> None:
    """Fill all matrices of this rank's chunks.

    Normal with deviation `std`; the projections that write to the residual stream (attention
    output, MLP down) have it divided by sqrt(2 num_layers), as Megatron-LM and GPT-2 do.
    """
    for chunk in chunks:
        scaled = std / math.sqrt(2 * chunk.config.num_layers)
        for name, parameter in chunk.named_parameters():
            if parameter.dim() < 2:
                continue
            deviation = scaled if _writes_residual(name) else std
            _fill(parameter, global_name(name, chunk), seed, deviation, chunk.config)


def _writes_residual(name: str) -> bool:
    return name.endswith(("linear_proj.weight", "linear_fc2.weight", ".weight2"))


def global_name(name: str, chunk: LanguageModel) -> str:
    """The parameter's name with global layer and expert numbers.

    A tied output layer on a later pipeline stage is the embedding.
    """
    if name == "output_layer.weight" and chunk.share_embeddings_and_output_weights:
        return "embedding.word_embeddings.weight"
    first = chunk.global_layers.start
    name = re.sub(r"(?<=\blayers\.)\d+", lambda m: str(int(m[0]) + first), name, count=1)
    experts = chunk.config.num_moe_experts
    if experts:
        offset = _expert_offset(chunk.config)
        name = re.sub(r"(?<=local_experts\.)\d+", lambda m: str(int(m[0]) + offset), name)
    return name


def _expert_offset(config: ModelConfig) -> int:
    local = config.num_moe_experts // config.expert_model_parallel_size
    return parallel_state.get_expert_model_parallel_rank() * local


def _fill(
    parameter: torch.nn.Parameter, name: str, seed: int, std: float, config: ModelConfig
) -> None:
    with torch.no_grad():
        if name.endswith((".weight1", ".weight2")):
            _fill_grouped(parameter, name, seed, std, config)
            return
        part = _slice(parameter, name, config)
        values = draw(part, seed, std)
        if name == "embedding.word_embeddings.weight" or name == "output_layer.weight":
            _zero_padding(values, part, config.architecture.vocab_size)
        parameter.copy_(values)


def _slice(parameter: torch.nn.Parameter, name: str, config: ModelConfig) -> Slice:
    """The slice of a Megatron parallel linear, from the marks Megatron left on the parameter."""
    rows, columns = parameter.shape
    if not getattr(parameter, "tensor_model_parallel", False):
        return Slice(name, 0, columns, ((0, rows),))
    size, rank = _tensor_group(expert=".experts." in name)
    if parameter.partition_dim == 1:  # type: ignore[attr-defined]
        return Slice(name, 1, rows, ((rank * columns, columns),))
    gated = name.endswith("linear_fc1.weight") and config.gated_linear_unit
    return Slice(name, 0, columns, _rows_held(rows, rank, size, gated))


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


def _rows_held(rows: int, rank: int, size: int, gated: bool) -> tuple[tuple[int, int], ...]:
    if not gated:
        return ((rank * rows, rows),)
    half = rows // 2  # gate rows, then up rows, each spread over the group
    return ((rank * half, half), (size * half + rank * half, half))


def _fill_grouped(
    parameter: torch.nn.Parameter, name: str, seed: int, std: float, config: ModelConfig
) -> None:
    """Fill a grouped-experts weight, expert by expert, with what a sequential MLP would hold.

    weight1 is `[hidden, experts * out]`, weight2 `[experts * in, hidden]`: transposed linears.
    """
    local = config.num_moe_experts // config.expert_model_parallel_size
    size, rank = _tensor_group(expert=True)
    prefix, kind = name.rsplit(".", 1)
    first = kind == "weight1"
    linear = "linear_fc1" if first else "linear_fc2"
    shape = (local, config.hidden_size, -1) if first else (local, -1, config.hidden_size)
    view = parameter.view(shape)
    for expert in range(local):
        number = _expert_offset(config) + expert
        inputs, outputs = view[expert].shape
        full = f"{prefix}.local_experts.{number}.{linear}.weight"
        if first:
            held = _rows_held(outputs, rank, size, config.gated_linear_unit)
            part = Slice(full, 0, inputs, held)
        else:
            part = Slice(full, 1, outputs, ((rank * inputs, inputs),))
        view[expert].copy_(draw(part, seed, std).t())


def draw(part: Slice, seed: int, std: float) -> Tensor:
    """The slice's values, float32 on the host, `[out, in]`."""
    values = torch.cat([_draw_run(part, seed, first, count) for first, count in part.runs]) * std
    return values if part.axis == 0 else values.t()


def _draw_run(part: Slice, seed: int, first: int, count: int) -> Tensor:
    blocks = []
    for block in range(first // BLOCK, (first + count - 1) // BLOCK + 1):
        key = hashlib.sha256(f"{seed}/{part.name}/{block}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(key[:8], "little") >> 1)
        blocks.append(torch.randn(BLOCK, part.width, generator=generator))
    start = first - first // BLOCK * BLOCK
    return torch.cat(blocks)[start : start + count]


def _zero_padding(values: Tensor, part: Slice, vocab_size: int) -> None:
    row = 0
    for first, count in part.runs:
        real = max(0, min(count, vocab_size - first))
        values[row + real : row + count] = 0
        row += count
