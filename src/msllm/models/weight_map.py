"""Which rows of which published tensor make up each parameter of Megatron-core.

A parameter is described whole, as if no parallelism cut it, as runs of rows of published tensors:
pure integers, read in either direction. Copying, grouping heads into `linear_qkv`, stacking gate
on up and taking fused tensors apart are all the same thing here. No tensor is touched.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from msllm.models.architecture import Architecture


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorNames:
    """How a family's published tensors are called, without `.weight` and `.bias`.

    Names of a layer stand behind `layer`, those of an expert have `{expert}` in them.
    """

    embedding: str = "model.embed_tokens"
    final_norm: str = "model.norm"
    head: str = "lm_head"
    layer: str = "model.layers.{layer}."
    input_norm: str = "input_layernorm"
    mlp_norm: str = "post_attention_layernorm"
    query: str = "self_attn.q_proj"
    key: str = "self_attn.k_proj"
    value: str = "self_attn.v_proj"
    out: str = "self_attn.o_proj"
    query_norm: str = "self_attn.q_norm"
    key_norm: str = "self_attn.k_norm"
    gate: str = "mlp.gate_proj"
    up: str = "mlp.up_proj"
    down: str = "mlp.down_proj"
    router: str = "mlp.gate"
    expert_gate: str = "mlp.experts.{expert}.gate_proj"
    expert_up: str = "mlp.experts.{expert}.up_proj"
    expert_down: str = "mlp.experts.{expert}.down_proj"


@dataclass(frozen=True, slots=True)
class Run:
    """Rows `first` to `first + count` of a published tensor."""

    tensor: str
    first: int
    count: int


@dataclass(frozen=True, slots=True)
class Weight:
    """A Megatron parameter, whole: its rows in order; `width` columns, or None for a vector."""

    runs: tuple[Run, ...]
    width: int | None

    def cut(self, first: int, count: int) -> Iterator[Run]:
        """Give the runs that make up `count` of its rows from `first`; padding rows are in none."""
        start = 0
        for run in self.runs:
            low, high = max(first, start), min(first + count, start + run.count)
            if low < high:
                yield Run(run.tensor, run.first + low - start, high - low)
            start += run.count


WeightMap = dict[str, Weight]
"""Weights by Megatron's parameter name, with global numbers of layers and experts."""


def weight_map(architecture: Architecture, names: TensorNames) -> WeightMap:
    """Map all parameters of a decoder."""
    hidden, vocab = architecture.hidden_size, architecture.vocab_size
    found = {"embedding.word_embeddings.weight": _copy(f"{names.embedding}.weight", vocab, hidden)}
    for layer in range(architecture.num_layers):
        theirs, ours = names.layer.format(layer=layer), f"decoder.layers.{layer}."
        found |= {
            ours + name: _under(theirs, weight)
            for name, weight in (
                *_attention(architecture, names),
                *_mlp(architecture, names, layer),
            )
        }
    found["decoder.final_layernorm.weight"] = _copy(f"{names.final_norm}.weight", hidden)
    if not architecture.tie_word_embeddings:
        found["output_layer.weight"] = _copy(f"{names.head}.weight", vocab, hidden)
    return found


def published_shapes(weights: WeightMap) -> dict[str, tuple[int, ...]]:
    """Shapes of all published tensors that the map reads."""
    ends: dict[str, tuple[int, int | None]] = {}
    for weight in weights.values():
        for run in weight.runs:
            end = max(run.first + run.count, ends.get(run.tensor, (0, None))[0])
            ends[run.tensor] = (end, weight.width)
    return {
        name: (rows,) if width is None else (rows, width) for name, (rows, width) in ends.items()
    }


def _copy(tensor: str, rows: int, width: int | None = None) -> Weight:
    return Weight((Run(tensor, 0, rows),), width)


def _under(prefix: str, weight: Weight) -> Weight:
    runs = tuple(Run(prefix + run.tensor, run.first, run.count) for run in weight.runs)
    return Weight(runs, weight.width)


def _attention(a: Architecture, names: TensorNames) -> Iterator[tuple[str, Weight]]:
    yield "input_layernorm.weight", _copy(f"{names.input_norm}.weight", a.hidden_size)
    yield "self_attention.linear_qkv.weight", _grouped_heads(a, names, "weight", a.hidden_size)
    if a.qkv_bias:
        yield "self_attention.linear_qkv.bias", _grouped_heads(a, names, "bias", None)
    width = a.num_attention_heads * a.head_dim
    yield "self_attention.linear_proj.weight", _copy(f"{names.out}.weight", a.hidden_size, width)
    if a.attention_out_bias:
        yield "self_attention.linear_proj.bias", _copy(f"{names.out}.bias", a.hidden_size)
    if a.qk_norm == "head":
        yield "self_attention.q_layernorm.weight", _copy(f"{names.query_norm}.weight", a.head_dim)
        yield "self_attention.k_layernorm.weight", _copy(f"{names.key_norm}.weight", a.head_dim)


def _grouped_heads(a: Architecture, names: TensorNames, kind: str, width: int | None) -> Weight:
    """Group by key-value head: its query heads, then its key, then its value."""
    queries = a.num_attention_heads // a.num_query_groups * a.head_dim
    runs = [
        Run(f"{tensor}.{kind}", group * rows, rows)
        for group in range(a.num_query_groups)
        for tensor, rows in (
            (names.query, queries),
            (names.key, a.head_dim),
            (names.value, a.head_dim),
        )
    ]
    return Weight(tuple(runs), width)


def _mlp(a: Architecture, names: TensorNames, layer: int) -> Iterator[tuple[str, Weight]]:
    yield "pre_mlp_layernorm.weight", _copy(f"{names.mlp_norm}.weight", a.hidden_size)
    if not a.has_experts(layer):
        dense = (names.gate, names.up, names.down)
        yield from _gated("mlp.", dense, a.intermediate_size, a.hidden_size, a.mlp_bias)
        return
    assert a.moe is not None
    router = _copy(f"{names.router}.weight", a.moe.num_experts, a.hidden_size)
    yield "mlp.router.weight", router
    for number in range(a.moe.num_experts):
        expert = tuple(
            name.format(expert=number)
            for name in (names.expert_gate, names.expert_up, names.expert_down)
        )
        ours = f"mlp.experts.local_experts.{number}."
        yield from _gated(ours, expert, a.moe.intermediate_size, a.hidden_size, bias=False)


def _gated(
    ours: str, names: tuple[str, ...], inner: int, hidden: int, bias: bool
) -> Iterator[tuple[str, Weight]]:
    """Stack gate on up in `linear_fc1`; `linear_fc2` is down."""
    gate, up, down = names
    for kind, widths in (("weight", (hidden, inner)), ("bias", (None, None))):
        if kind == "bias" and not bias:
            return
        runs = (Run(f"{gate}.{kind}", 0, inner), Run(f"{up}.{kind}", 0, inner))
        yield f"{ours}linear_fc1.{kind}", Weight(runs, widths[0])
        yield f"{ours}linear_fc2.{kind}", _copy(f"{down}.{kind}", hidden, widths[1])
