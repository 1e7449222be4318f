"""Mistakes that one could make in a weight map; parity must tell each of them."""

from __future__ import annotations

from dataclasses import replace

from msllm.models.weight_map import WeightMap

ATTENTION = "decoder.layers.1.self_attention."
EXPERTS = "decoder.layers.1.mlp.experts.local_experts."


def swap_query_halves(weights: WeightMap) -> WeightMap:
    """The first query head's halves change places, as between two ways of rotating."""
    name = ATTENTION + "linear_qkv.weight"
    heads, *rest = weights[name].runs
    half = 12  # of a head of 24
    halves = (heads.part(half, half), heads.part(0, half), heads.part(24, heads.count - 24))
    return weights | {name: replace(weights[name], runs=(*halves, *rest))}


def skip_an_expert(weights: WeightMap) -> WeightMap:
    """The second expert gets the first one's weights."""
    parts = ("linear_fc1.weight", "linear_fc2.weight")
    return weights | {f"{EXPERTS}1.{part}": weights[f"{EXPERTS}0.{part}"] for part in parts}


def transpose_a_square(weights: WeightMap) -> WeightMap:
    """A square matrix is taken for its transpose: no shape tells."""
    name = ATTENTION + "linear_proj.weight"
    (run,) = weights[name].runs
    return weights | {name: replace(weights[name], runs=(replace(run, transposed=True),))}


def swap_gate_and_up(weights: WeightMap) -> WeightMap:
    """Up rows come before gate rows."""
    name = "decoder.layers.1.mlp.linear_fc1.weight"
    return weights | {name: replace(weights[name], runs=weights[name].runs[::-1])}


def swap_norms(weights: WeightMap) -> WeightMap:
    """Attention's norm and the MLP's change places."""
    one, other = (f"decoder.layers.1.{name}_layernorm.weight" for name in ("input", "pre_mlp"))
    return weights | {one: weights[other], other: weights[one]}


def take_stacked_columns_for_halves(weights: WeightMap) -> WeightMap:
    """Of experts in one tensor, gate's columns come before up's instead of between them."""
    name = EXPERTS + "1.linear_fc1.weight"
    gate, up = weights[name].runs
    halves = (replace(gate, step=1), replace(up, first=gate.count, step=1))
    return weights | {name: replace(weights[name], runs=halves)}


def swap_shared_gate_and_up(weights: WeightMap) -> WeightMap:
    """Up rows of the shared experts come before gate rows."""
    name = "decoder.layers.1.mlp.shared_experts.linear_fc1.weight"
    return weights | {name: replace(weights[name], runs=weights[name].runs[::-1])}


MUTATIONS = {
    function.__name__: function
    for function in (
        swap_query_halves,
        skip_an_expert,
        transpose_a_square,
        swap_gate_and_up,
        swap_norms,
        take_stacked_columns_for_halves,
        swap_shared_gate_and_up,
    )
}
