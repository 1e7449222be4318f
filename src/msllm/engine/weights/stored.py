"""Where Megatron's `torch_dist` checkpoints keep each parameter.

Megatron stores all layers of a kind, and all experts of a layer, as one tensor with a further axis
for each; norms go by the names they have when fused into the linear behind them. The tests hold
these names to the ones that Megatron itself writes.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from msllm.errors import Problem
from msllm.models.architecture import Architecture
from msllm.models.weight_map import WeightMap

if TYPE_CHECKING:
    from msllm.engine.weights.torch_dist import StoredWeights

FUSED_NORMS = {
    "input_layernorm.": "self_attention.linear_qkv.layer_norm_",
    "pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_",
}
"""A layer's modules that go by other names where they are fused into what follows."""


READABLE = ("torch.float32", "torch.bfloat16", "torch.float16")
"""Types of weights; torch is not imported for a check."""
BY_VOCABULARY = ("embedding.word_embeddings.weight", "output_layer.weight", "output_layer.bias")
"""Tensors with a row a token; a layout may pad them with further rows."""


@dataclass(frozen=True, slots=True)
class Place:
    """A parameter inside a stored tensor.

    Attributes:
        key: The stored tensor.
        index: Its position on the leading axes, of layers or of experts.
        sizes: Lengths of those axes.
    """

    key: str
    index: tuple[int, ...] = ()
    sizes: tuple[int, ...] = ()


def fused_norms(architecture: Architecture) -> dict[str, str]:
    """A layer's modules that are stored under other names: none around latent attention."""
    return dict(FUSED_NORMS) if architecture.mla is None else {}


def places(names: Mapping[str, object], architecture: Architecture) -> dict[str, Place]:
    """Find where parameters with these global names are stored."""
    stacked = architecture.moe is None  # Megatron's own rule
    return {name: _place(name, architecture, stacked) for name in names}


def _place(name: str, architecture: Architecture, stacked: bool) -> Place:
    found = re.fullmatch(r"(decoder\.layers|mtp\.layers)\.(\d+)\.(transformer_layer\.)?(.+)", name)
    if found is None:
        return Place(name)
    block, layer, inside, rest = found[1], int(found[2]), found[3] or "", found[4]
    for ours, theirs in fused_norms(architecture).items():
        if rest.startswith(ours):
            rest = theirs + rest.removeprefix(ours)
    if stacked and block == "decoder.layers":
        return Place(f"{block}.{rest}", (layer,), (architecture.num_layers,))
    return _expert(f"{block}.{layer}.{inside}{rest}", architecture)


def _expert(key: str, architecture: Architecture) -> Place:
    expert = re.fullmatch(r"(.+\.experts\.)local_experts\.(\d+)\.(.+)", key)
    if expert is None:
        return Place(key)
    assert architecture.moe is not None
    return Place(
        f"{expert[1]}experts.{expert[3]}", (int(expert[2]),), (architecture.moe.num_experts,)
    )


def differences(
    stored: StoredWeights, weights: WeightMap, architecture: Architecture, where: str
) -> Iterator[Problem]:
    """List what keeps a checkpoint from being the model's; rows may pad the vocabulary."""
    wanted: dict[str, tuple[int, ...]] = {}
    found_places = places(weights, architecture)
    for name, weight in weights.items():
        place = found_places[name]
        wanted[place.key] = place.sizes + weight.shape
    for key, shape in wanted.items():
        tensor = stored.tensors.get(key)
        if tensor is None:
            yield Problem(f"the model has {key}, and the checkpoint does not", where)
        elif not _fits(key, tensor.shape, shape):
            theirs, ours = list(tensor.shape), list(shape)
            yield Problem(f"{key} is {theirs} in the checkpoint and {ours} in the model", where)
        elif str(tensor.dtype) not in READABLE:
            yield Problem(f"{key} is stored as {tensor.dtype}", where, "floats only are weights")
    for key in stored.tensors.keys() - wanted.keys():
        yield Problem(f"the checkpoint has {key}, and the model does not", where)
    yield from stored.faults()


def _fits(key: str, found: tuple[int, ...], wanted: tuple[int, ...]) -> bool:
    padded = key in BY_VOCABULARY and found[1:] == wanted[1:] and found[0] >= wanted[0]
    return found == wanted or padded
