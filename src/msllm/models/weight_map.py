"""Which rows of which published tensor make up each parameter of Megatron-core.

A parameter is described whole, as if no parallelism cut it, as runs of rows of published tensors:
pure integers, read in either direction. Copying, grouping heads into `linear_qkv`, stacking gate
on up, taking fused tensors apart and picking an expert out of a tensor of all are the same thing
here. No tensor is touched.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from msllm.models.architecture import MLA, Architecture, MoE


@dataclass(frozen=True, slots=True, kw_only=True)
class Gated:
    """The tensors of a gated MLP; gate rows come before up rows where one tensor holds both."""

    gate: str
    up: str
    down: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Stacked:
    """The tensors of all experts of a layer, `[e, in, out]`; gate and up columns alternate.

    Biases, `[e, out]`, have `_bias` behind the name.
    """

    gate_up: str
    down: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Latent:
    """The tensors of latent attention: down to the latents, their norms, up to the heads."""

    query_down: str = "self_attn.q_a_proj"
    query_norm: str = "self_attn.q_a_layernorm"
    query_up: str = "self_attn.q_b_proj"
    down: str = "self_attn.kv_a_proj_with_mqa"
    norm: str = "self_attn.kv_a_layernorm"
    up: str = "self_attn.kv_b_proj"


@dataclass(frozen=True, slots=True, kw_only=True)
class Further:
    """What a layer of multi-token prediction has beside a layer's tensors, behind its prefix."""

    embedding_norm: str = "enorm"
    hidden_norm: str = "hnorm"
    projection: str = "eh_proj"
    final_norm: str = "shared_head.norm"
    embedding: str = "embed_tokens"
    """A copy of the model's."""
    head: str = "shared_head.head"
    """A copy of the model's."""


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
    attention_post_norm: str = "post_self_attn_layernorm"
    mlp_post_norm: str = "post_mlp_layernorm"
    query: str = "self_attn.q_proj"
    key: str = "self_attn.k_proj"
    value: str = "self_attn.v_proj"
    qkv: str | None = None
    """One tensor of all queries, all keys and all values, where there is one."""
    qkv_grouped: bool = False
    """That tensor has each group's queries, key and value together, as Megatron's has."""
    out: str = "self_attn.o_proj"
    sinks: str = "self_attn.sinks"
    query_norm: str = "self_attn.q_norm"
    key_norm: str = "self_attn.k_norm"
    latent: Latent = Latent()
    further: Further = Further()
    dense: Gated = Gated(gate="mlp.gate_proj", up="mlp.up_proj", down="mlp.down_proj")
    router: str = "mlp.gate"
    expert: Gated = Gated(
        gate="mlp.experts.{expert}.gate_proj",
        up="mlp.experts.{expert}.up_proj",
        down="mlp.experts.{expert}.down_proj",
    )
    stacked: Stacked | None = None
    """The experts, where a layer's are in one tensor."""
    shared: Gated = Gated(
        gate="mlp.shared_experts.gate_proj",
        up="mlp.shared_experts.up_proj",
        down="mlp.shared_experts.down_proj",
    )
    shared_gate: str = "mlp.shared_expert_gate"
    router_correction: str = "mlp.gate.e_score_correction_bias"
    """The balancing bias; its name is whole, it is no `.bias` of a module."""


@dataclass(frozen=True, slots=True)
class Run:
    """Rows `first`, `first + step`, ... of a published matrix or vector: `count` of them.

    Attributes:
        tensor: The published tensor that holds it.
        expert: Which of the tensor's matrices, where it stacks those of all experts.
        transposed: The matrix is stored `[in, out]`: its rows are the tensor's columns.
    """

    tensor: str
    first: int
    count: int
    step: int = 1
    expert: int | None = None
    transposed: bool = False

    def part(self, skip: int, count: int) -> Run:
        """`count` of its rows, after the first `skip`."""
        return replace(self, first=self.first + skip * self.step, count=count)


@dataclass(frozen=True, slots=True)
class Weight:
    """A Megatron parameter, whole: its rows in order; `width` columns, or None for a vector."""

    runs: tuple[Run, ...]
    width: int | None
    copies: tuple[str, ...] = ()
    """Published tensors that say the same once more: written, and not read."""

    @property
    def rows(self) -> int:
        """How many rows it has."""
        return sum(run.count for run in self.runs)

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape."""
        return (self.rows,) if self.width is None else (self.rows, self.width)

    def duplicates(self) -> Iterator[Weight]:
        """Give each copy as a weight of its own."""
        for tensor in self.copies:
            yield _copy(tensor, self.rows, self.width)

    def cut(self, first: int, count: int) -> Iterator[Run]:
        """Give the runs that make up `count` of its rows from `first`; padding rows are in none."""
        start = 0
        for run in self.runs:
            low, high = max(first, start), min(first + count, start + run.count)
            if low < high:
                yield run.part(low - start, high - low)
            start += run.count


WeightMap = dict[str, Weight]
"""Weights by Megatron's parameter name, with global numbers of layers and experts."""


def weight_map(architecture: Architecture, names: TensorNames) -> WeightMap:
    """Map all parameters of a decoder."""
    hidden, vocab = architecture.hidden_size, architecture.vocab_size
    found: WeightMap = {}

    def add(layer: int, ours: str, weights: Iterable[tuple[str, Weight]]) -> None:
        theirs = names.layer.format(layer=layer)
        found.update({ours + name: _under(theirs, weight) for name, weight in weights})

    for layer in range(architecture.num_layers):
        add(layer, f"decoder.layers.{layer}.", _layer(architecture, names, layer))
    further = range(architecture.num_nextn_predict_layers)
    for number in further:
        layer, ours = architecture.num_layers + number, f"mtp.layers.{number}."
        add(layer, f"{ours}transformer_layer.", _layer(architecture, names, layer))
        add(layer, ours, _further(names.further, hidden))
    prefixes = [names.layer.format(layer=architecture.num_layers + i) for i in further]

    def shared(name: str, copy: str) -> Weight:
        copies = tuple(f"{prefix}{copy}.weight" for prefix in prefixes)
        return replace(_copy(f"{name}.weight", vocab, hidden), copies=copies)

    theirs = names.further
    found["embedding.word_embeddings.weight"] = shared(names.embedding, theirs.embedding)
    found |= _norm(architecture, "decoder.final_layernorm", names.final_norm)
    if not architecture.tie_word_embeddings:
        found["output_layer.weight"] = shared(names.head, theirs.head)
    if architecture.lm_head_bias:
        found["output_layer.bias"] = _copy(f"{names.head}.bias", vocab)
    return found


def _layer(a: Architecture, names: TensorNames, layer: int) -> Iterator[tuple[str, Weight]]:
    yield from _attention(a, names)
    yield from _mlp(a, names, layer)


def _further(names: Further, hidden: int) -> Iterator[tuple[str, Weight]]:
    yield "enorm.weight", _copy(f"{names.embedding_norm}.weight", hidden)
    yield "hnorm.weight", _copy(f"{names.hidden_norm}.weight", hidden)
    yield "eh_proj.weight", _copy(f"{names.projection}.weight", hidden, 2 * hidden)
    yield "final_layernorm.weight", _copy(f"{names.final_norm}.weight", hidden)


def published_shapes(weights: WeightMap) -> dict[str, tuple[int, ...]]:
    """Shapes of all published tensors that the map reads."""
    rows: dict[str, int] = {}
    experts: dict[str, int] = {}
    forms: dict[str, tuple[int | None, bool]] = {}
    for weight in [w for one in weights.values() for w in (one, *one.duplicates())]:
        for run in weight.runs:
            end = run.first + (run.count - 1) * run.step + 1
            rows[run.tensor] = max(end, rows.get(run.tensor, 0))
            forms[run.tensor] = (weight.width, run.transposed)
            if run.expert is not None:
                experts[run.tensor] = max(run.expert + 1, experts.get(run.tensor, 0))
    shapes = {}
    for name, (width, transposed) in forms.items():
        matrix = (rows[name],) if width is None else (rows[name], width)
        stack = (experts[name],) if name in experts else ()
        shapes[name] = (*stack, *(matrix[::-1] if transposed else matrix))
    return shapes


def _copy(tensor: str, rows: int, width: int | None = None) -> Weight:
    return Weight((Run(tensor, 0, rows),), width)


def _norm(a: Architecture, ours: str, theirs: str) -> dict[str, Weight]:
    """Weight, and bias where there is one, of a norm over the hidden size."""
    kinds = ("weight", "bias") if a.norm == "LayerNorm" else ("weight",)
    return {f"{ours}.{kind}": _copy(f"{theirs}.{kind}", a.hidden_size) for kind in kinds}


def _under(prefix: str, weight: Weight) -> Weight:
    return Weight(
        tuple(replace(run, tensor=prefix + run.tensor) for run in weight.runs), weight.width
    )


def _attention(a: Architecture, names: TensorNames) -> Iterator[tuple[str, Weight]]:
    yield from _norm(a, "input_layernorm", names.input_norm).items()
    yield from _heads(a, names) if a.mla is None else _latents(a, a.mla, names)
    if a.attention_out_bias:
        yield "self_attention.linear_proj.bias", _copy(f"{names.out}.bias", a.hidden_size)
    if a.attention_sinks:
        sinks = _copy(names.sinks, a.num_attention_heads)
        yield "self_attention.core_attention.softmax_offset", sinks
    if a.sandwich_norm:
        yield from _norm(a, "self_attn_bda.norm", names.attention_post_norm).items()


def _heads(a: Architecture, names: TensorNames) -> Iterator[tuple[str, Weight]]:
    yield "self_attention.linear_qkv.weight", _grouped_heads(a, names, "weight", a.hidden_size)
    if a.qkv_bias:
        yield "self_attention.linear_qkv.bias", _grouped_heads(a, names, "bias", None)
    width = a.num_attention_heads * a.head_dim
    yield "self_attention.linear_proj.weight", _copy(f"{names.out}.weight", a.hidden_size, width)
    if a.qk_norm is not None:
        queries, keys = (
            (1, 1) if a.qk_norm == "head" else (a.num_attention_heads, a.num_query_groups)
        )
        for ours, theirs, heads in (
            ("q_layernorm", names.query_norm, queries),
            ("k_layernorm", names.key_norm, keys),
        ):
            yield f"self_attention.{ours}.weight", _copy(f"{theirs}.weight", heads * a.head_dim)


def _latents(a: Architecture, mla: MLA, names: TensorNames) -> Iterator[tuple[str, Weight]]:
    """Each head's rows are those without positions, then the turned ones, or then its value."""
    theirs, heads = names.latent, a.num_attention_heads
    queries, turned = heads * a.head_dim, mla.qk_rope_head_dim
    values = heads * mla.v_head_dim
    kept = heads * mla.qk_nope_head_dim + values
    matrices = [
        ("linear_kv_down_proj", theirs.down, mla.kv_lora_rank + turned, a.hidden_size),
        ("linear_kv_up_proj", theirs.up, kept, mla.kv_lora_rank),
        ("linear_proj", names.out, a.hidden_size, values),
    ]
    norms = [("kv_layernorm", theirs.norm, mla.kv_lora_rank)]
    if mla.q_lora_rank is None:
        matrices.append(("linear_q_proj", names.query, queries, a.hidden_size))
    else:
        norms.append(("q_layernorm", theirs.query_norm, mla.q_lora_rank))
        matrices += [
            ("linear_q_down_proj", theirs.query_down, mla.q_lora_rank, a.hidden_size),
            ("linear_q_up_proj", theirs.query_up, queries, mla.q_lora_rank),
        ]
    for ours, name, rows, width in matrices:
        yield f"self_attention.{ours}.weight", _copy(f"{name}.weight", rows, width)
    for ours, name, rows in norms:
        yield f"self_attention.{ours}.weight", _copy(f"{name}.weight", rows)


def _grouped_heads(a: Architecture, names: TensorNames, kind: str, width: int | None) -> Weight:
    """Group by key-value head: its query heads, then its key, then its value."""
    if names.qkv is not None and names.qkv_grouped:
        rows = (a.num_attention_heads + 2 * a.num_query_groups) * a.head_dim
        return _copy(f"{names.qkv}.{kind}", rows, width)
    d, per_group = a.head_dim, a.num_attention_heads // a.num_query_groups * a.head_dim
    parts = [(names.query, 0, per_group), (names.key, 0, d), (names.value, 0, d)]
    if names.qkv is not None:
        keys = a.num_attention_heads * d
        values = keys + a.num_query_groups * d
        parts = [(names.qkv, 0, per_group), (names.qkv, keys, d), (names.qkv, values, d)]
    runs = [
        Run(f"{tensor}.{kind}", start + group * rows, rows)
        for group in range(a.num_query_groups)
        for tensor, start, rows in parts
    ]
    return Weight(tuple(runs), width)


def _mlp(a: Architecture, names: TensorNames, layer: int) -> Iterator[tuple[str, Weight]]:
    yield from _norm(a, "pre_mlp_layernorm", names.mlp_norm).items()
    if a.sandwich_norm:
        yield from _norm(a, "mlp_bda.norm", names.mlp_post_norm).items()
    if not a.has_experts(layer):
        yield from _gated("mlp.", names.dense, a.intermediate_size, a.hidden_size, a.mlp_bias)
        return
    assert a.moe is not None
    yield from _router(a.moe, names, a.hidden_size)
    yield from _shared_experts(a.moe, names, a.hidden_size)
    for number in range(a.moe.num_experts):
        ours = f"mlp.experts.local_experts.{number}."
        if names.stacked is not None:
            yield from _stacked(ours, names.stacked, number, a.moe, a.hidden_size)
            continue
        expert = Gated(
            gate=names.expert.gate.format(expert=number),
            up=names.expert.up.format(expert=number),
            down=names.expert.down.format(expert=number),
        )
        bias = a.moe.expert_linear_bias
        yield from _gated(ours, expert, a.moe.intermediate_size, a.hidden_size, bias)


def _router(moe: MoE, names: TensorNames, hidden: int) -> Iterator[tuple[str, Weight]]:
    yield "mlp.router.weight", _copy(f"{names.router}.weight", moe.num_experts, hidden)
    if moe.router_bias:
        yield "mlp.router.bias", _copy(f"{names.router}.bias", moe.num_experts)
    if moe.expert_bias:
        yield "mlp.router.expert_bias", _copy(names.router_correction, moe.num_experts)


def _shared_experts(moe: MoE, names: TensorNames, hidden: int) -> Iterator[tuple[str, Weight]]:
    """One MLP as wide as all shared experts together."""
    width = moe.shared_expert_intermediate_size
    if not width:
        return
    yield from _gated("mlp.shared_experts.", names.shared, width, hidden, bias=False)
    if moe.shared_expert_gate:
        yield "mlp.shared_experts.gate_weight", _copy(f"{names.shared_gate}.weight", 1, hidden)


def _gated(
    ours: str, names: Gated, inner: int, hidden: int, bias: bool
) -> Iterator[tuple[str, Weight]]:
    """Stack gate on up in `linear_fc1`; `linear_fc2` is down."""
    second = inner if names.gate == names.up else 0  # one tensor may hold both
    for kind, widths in (("weight", (hidden, inner)), ("bias", (None, None))):
        if kind == "bias" and not bias:
            return
        runs = (Run(f"{names.gate}.{kind}", 0, inner), Run(f"{names.up}.{kind}", second, inner))
        yield f"{ours}linear_fc1.{kind}", Weight(runs, widths[0])
        yield f"{ours}linear_fc2.{kind}", _copy(f"{names.down}.{kind}", hidden, widths[1])


def _stacked(
    ours: str, names: Stacked, number: int, moe: MoE, hidden: int
) -> Iterator[tuple[str, Weight]]:
    """Take one expert out of the tensors of all."""
    inner = moe.intermediate_size
    for kind, suffix in (("weight", ""), ("bias", "_bias")):
        is_matrix = kind == "weight"
        if not (is_matrix or moe.expert_linear_bias):
            return
        gate, up = (
            Run(names.gate_up + suffix, first, inner, 2, number, is_matrix) for first in (0, 1)
        )
        down = Run(names.down + suffix, 0, hidden, 1, number, is_matrix)
        yield f"{ours}linear_fc1.{kind}", Weight((gate, up), hidden if is_matrix else None)
        yield f"{ours}linear_fc2.{kind}", Weight((down,), inner if is_matrix else None)
