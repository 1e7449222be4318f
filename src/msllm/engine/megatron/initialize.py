"""Initial weights that depend only on the seed and on what a parameter is.

Each parameter is filled from random streams keyed by the seed, its global name (with its global
layer and expert number) and the position of a block of rows, so a model starts from the same
numbers at any TP, PP, VPP, EP and DP, on any device, and a rank draws only what it keeps.
Biases start at zero and norms at one, as their modules made them.
"""

from __future__ import annotations

import hashlib
import math

import torch
from torch import Tensor

from msllm.engine.megatron.model import LanguageModel
from msllm.engine.megatron.slices import parts
from msllm.engine.weights.slice import Slice

BLOCK = 64
"""Rows (or columns, where those are cut) drawn from one random stream."""


def initialize(chunks: list[LanguageModel], seed: int, std: float) -> None:
    """Fill all matrices of this rank's chunks.

    Normal with deviation `std`; the projections that write to the residual stream (attention
    output, MLP down) have it divided by sqrt(2 num_layers), as Megatron-LM and GPT-2 do.
    """
    config = chunks[0].config
    scaled = std / math.sqrt(2 * config.num_layers)

    for part, held in parts(chunks):
        if part.is_vector:
            continue
        drawn = draw(part, seed, scaled if _writes_residual(part.name) else std)
        if part.name in ("embedding.word_embeddings.weight", "output_layer.weight"):
            _zero_padding(drawn, part, config.architecture.vocab_size)
        held.copy_(drawn)


def _writes_residual(name: str) -> bool:
    return name.endswith(("linear_proj.weight", "linear_fc2.weight"))


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
