"""Parameters and FLOPs of an Architecture: pure integer arithmetic, item by item.

What a parameter takes in memory, and how it is spread over devices, is the planner's business.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from msllm.models.architecture import Architecture, MoE

EMBEDDING = "embedding"
LM_HEAD = "lm head"
ATTENTION = "attention"
NORMS = "norms"
DENSE_MLP = "dense mlp"
ROUTER = "router"
ROUTED = "routed experts"
SHARED = "shared experts"
SSM = "state space"
LINEAR = "linear attention"
INDEXER = "indexer"
HYPER = "hyper-connections"
MTP = "mtp"

ITEMS = (
    EMBEDDING, ATTENTION, LINEAR, SSM, INDEXER, DENSE_MLP, ROUTER, ROUTED, SHARED,
    HYPER, NORMS, LM_HEAD,
)  # fmt: skip
"""Every item of a breakdown, in the order in which a model runs them."""


@dataclass(frozen=True, slots=True)
class ParameterCount:
    """Trained parameters of a model.

    Attributes:
        total: All but those of multi-token prediction, which most frameworks leave out. Tied
            embeddings count once; biases that only balance experts are not trained and not counted.
        active: Those that one token meets: all, less the routed experts it is not sent to. The
            embedding counts whole, as published figures have it.
        mtp: Those of the multi-token-prediction layers (embedding and head are the model's).
        items: The total by item (`ITEMS`), without items that are 0.
    """

    total: int
    active: int
    mtp: int
    items: Mapping[str, int]


def parameters(arch: Architecture) -> ParameterCount:
    """Count a model's parameters."""
    items = Counter(model_parameters(arch))
    unused = 0
    for layer, times in _distinct_layers(arch).items():
        counts = layer_parameters(arch, layer)
        items.update({item: count * times for item, count in counts.items()})
        unused += _unused(arch.moe, counts) * times
    total = items.total()
    ordered = {item: items[item] for item in ITEMS if items[item]}
    return ParameterCount(total, total - unused, mtp_parameters(arch), ordered)


def model_parameters(arch: Architecture) -> dict[str, int]:
    """Parameters outside the layers, by item."""
    h, v = arch.hidden_size, arch.vocab_size
    head = 0 if arch.tie_word_embeddings else h * v
    items = {
        EMBEDDING: h * v,
        NORMS: _norm(arch) * (2 if arch.embedding_norm else 1),
        LM_HEAD: head + (v if arch.lm_head_bias else 0),
    }
    if arch.position_embedding == "learned":
        items[EMBEDDING] += h * (arch.max_position_embeddings or 0)
    if streams := arch.hyper_connections:
        items[HYPER] = streams * streams * h + streams + 1
    return {item: count for item, count in items.items() if count}


def layer_parameters(arch: Architecture, layer: int) -> dict[str, int]:
    """Parameters of layer `layer` (from 0), by item; items that are 0 are left out."""
    items: Counter[str] = Counter()
    kind = arch.layer_kind(layer)
    if kind == "mamba":
        items[SSM] = _mamba(arch)
    elif kind == "linear_attention":
        items[LINEAR] = _linear_attention(arch)
    elif kind == "attention":
        items[ATTENTION] = _attention(arch, layer) * arch.sublayers
        items[INDEXER] = _indexer(arch, layer)
    if arch.has_mlp(layer):
        items.update(_mlp(arch, layer))
    items[NORMS] = _layer_norms(arch)
    if streams := arch.hyper_connections:
        mixed = (2 + streams) * streams
        items[HYPER] = 2 * (mixed * streams * arch.hidden_size + mixed + 3)
    return {item: count for item, count in items.items() if count}


def mtp_parameters(arch: Architecture) -> int:
    """Parameters of the multi-token-prediction layers (arXiv:2412.19437, section 2.2).

    Each is a layer like the model's last, a projection [2h -> h], two norms before it and one
    behind the layer; embedding and output layer are the model's own.
    """
    if not arch.num_nextn_predict_layers:
        return 0
    last = arch.num_layers - 1
    layer = layer_parameters(arch, last)
    if arch.mtp_dense:
        for item in (ROUTER, ROUTED, SHARED):
            layer.pop(item, None)
        layer[DENSE_MLP] = _dense(arch, arch.intermediate_size)
        layer[ATTENTION] = _attention(arch, last)
        layer[NORMS] = layer[NORMS] // arch.sublayers
    one = sum(layer.values()) + 2 * arch.hidden_size**2 + 3 * _norm(arch)
    return one * arch.num_nextn_predict_layers


def flops_per_token(arch: Architecture, seq_length: int) -> float:
    """Floating-point operations that training spends on one token, forward and backward.

    Model FLOPs as PaLM counts them (arXiv:2204.02311, appendix B): 6 for each parameter of a
    matrix multiplication the token meets (2 forward, 4 backward), the output layer included and
    the embedding's look-up not, and for attention 12 x heads x head size x keys a layer. Keys are
    those a token really sees on average under a causal mask, half the sequence, as Megatron-LM and
    FlashAttention count, fewer under a window. State-space and delta-net layers add 7 operations
    for each element of their state (Megatron-LM's figure), times 3 for backward. Recomputation is
    not counted, and neither is multi-token prediction.

    Args:
        arch: The model.
        seq_length: Tokens of a sample.
    """
    head = arch.hidden_size * arch.vocab_size
    total = 6.0 * head
    for layer in range(arch.num_layers):
        counts = layer_parameters(arch, layer)
        matmul = sum(counts.values()) - _unused(arch.moe, counts) - counts[NORMS]
        total += 6.0 * matmul + 3.0 * _mixing(arch, layer, seq_length)
    return total


def _mixing(arch: Architecture, layer: int, seq_length: int) -> float:
    """Forward operations of one token's mixing with others, outside of weights."""
    kind = arch.layer_kind(layer)
    if kind == "mamba" and arch.mamba:
        return 7.0 * arch.mamba.inner_size(arch.hidden_size) * arch.mamba.state_size
    if kind == "linear_attention" and arch.linear_attention:
        linear = arch.linear_attention
        return 7.0 * linear.num_value_heads * linear.key_head_dim * linear.value_head_dim
    if kind != "attention":
        return 0.0
    value_dim = arch.mla.v_head_dim if arch.mla else arch.head_dim
    seen, indexed = _keys(arch, layer, seq_length)
    attention = 2.0 * arch.heads(layer) * (arch.head_dim + value_dim) * seen * arch.sublayers
    return attention + indexed


def _keys(arch: Architecture, layer: int, seq_length: int) -> tuple[float, float]:
    """Keys a token sees on average, and operations of the indexer that chooses them."""
    causal = seq_length / 2
    window = _within(arch.sliding_window, seq_length) if arch.is_sliding(layer) else causal
    sparse = arch.sparse_attention
    if sparse is None:
        return window, 0.0
    index = 2.0 * sparse.index_n_heads * sparse.index_head_dim
    if compressed := arch.compressed_attention:
        kind = compressed.kinds[layer]
        if kind == "sliding":
            return window, 0.0
        if kind == "heavy":
            return window + causal / compressed.heavy_ratio, 0.0
        groups = seq_length // compressed.sparse_ratio
        return window + _within(sparse.index_topk, groups), index * groups / 2
    owns = sparse.indexer_layers is None or layer in sparse.indexer_layers
    return _within(sparse.index_topk, seq_length), index * causal if owns else 0.0


def _within(limit: int | None, length: int) -> float:
    """Mean of min(position, limit) over a sequence."""
    if limit is None or limit >= length:
        return length / 2
    return limit * (1 - limit / (2 * length))


def _distinct_layers(arch: Architecture) -> dict[int, int]:
    """One layer of each shape, and how many there are."""
    moe = arch.moe
    if not (
        arch.layer_types
        or arch.kv_sharing > 1
        or arch.sliding_num_attention_heads
        or arch.sparse_attention
        or (moe and moe.dense_layers)
    ):
        # the usual model, counted at once: `list-models` counts them all
        leading = moe.first_dense_layers if moe else 0
        last = {arch.num_layers - 1: arch.num_layers - leading}
        return {0: leading, **last} if leading else last
    first: dict[tuple[object, ...], int] = {}
    times: Counter[int] = Counter()
    compressed, sparse = arch.compressed_attention, arch.sparse_attention
    for layer in range(arch.num_layers):
        shape = (
            arch.layer_kind(layer),
            arch.has_experts(layer),
            arch.owns_kv(layer),
            arch.heads(layer),
            compressed and compressed.kinds[layer],
            sparse and (sparse.indexer_layers is None or layer in sparse.indexer_layers),
        )
        times[first.setdefault(shape, layer)] += 1
    return times


def _unused(moe: MoE | None, counts: Mapping[str, int]) -> int:
    """Parameters of the routed experts a token is not sent to, in a layer with `counts`.

    Where some experts are empty, the choices a token spends on those by chance are not counted.
    """
    routed = counts.get(ROUTED, 0)
    if moe is None or not routed:
        return 0
    met = moe.num_experts_per_tok * moe.num_experts // (moe.num_experts + moe.zero_experts)
    return routed // moe.num_experts * (moe.num_experts - met)


def _norm(arch: Architecture) -> int:
    return arch.hidden_size * (2 if arch.norm == "LayerNorm" else 1)


def _layer_norms(arch: Architecture) -> int:
    if arch.mamba:
        return _norm(arch)
    return _norm(arch) * (4 if arch.sandwich_norm else 2) * arch.sublayers


def _attention(arch: Architecture, layer: int) -> int:
    if arch.compressed_attention:
        return _compressed_attention(arch, layer)
    if arch.mla:
        return _latent_attention(arch)
    h, d, heads = arch.hidden_size, arch.head_dim, arch.heads(layer)
    q, kv = heads * d, 2 * arch.num_query_groups * d if arch.owns_kv(layer) else 0
    if arch.attention_output_gate:
        q *= 2
    count = h * (q + kv) + heads * d * h
    count += q + kv if arch.qkv_bias else 0
    count += h if arch.attention_out_bias else 0
    if arch.qk_norm == "head":
        count += 2 * d if kv else d
    elif arch.qk_norm == "full":
        count += q + kv // 2
    count += heads if arch.attention_sinks else 0
    return count + (h * heads if arch.attention_head_gate else 0)


def _latent_attention(arch: Architecture) -> int:
    mla, h, heads = arch.mla, arch.hidden_size, arch.num_attention_heads
    assert mla is not None
    q = heads * arch.head_dim
    if mla.q_lora_rank is None:
        count = h * q
    else:
        count = h * mla.q_lora_rank + mla.q_lora_rank * (1 + q)
        count += mla.q_lora_rank if arch.qkv_bias else 0
    down = mla.kv_lora_rank + mla.qk_rope_head_dim
    count += h * down + (down if arch.qkv_bias else 0)
    count += mla.kv_lora_rank * (1 + heads * (mla.qk_nope_head_dim + mla.v_head_dim))
    return count + heads * mla.v_head_dim * h + (h if arch.attention_out_bias else 0)


def _compressed_attention(arch: Architecture, layer: int) -> int:
    attention, h, d = arch.compressed_attention, arch.hidden_size, arch.head_dim
    assert attention is not None
    heads, rank = arch.num_attention_heads, attention.q_lora_rank
    count = h * rank + rank + rank * heads * d + h * d + d
    out = attention.o_groups * attention.o_lora_rank
    count += heads * d // attention.o_groups * out + out * h + heads
    kind = attention.kinds[layer]
    if kind == "heavy":
        count += _compressor(h, d, d, attention.heavy_ratio)
    elif kind == "sparse":
        count += _compressor(h, d, 2 * d, attention.sparse_ratio)
    return count


def _compressor(h: int, d: int, width: int, ratio: int) -> int:
    """Keys, their gates, a bias for each place in a group, a norm."""
    return 2 * h * width + ratio * width + d


def _indexer(arch: Architecture, layer: int) -> int:
    sparse, h = arch.sparse_attention, arch.hidden_size
    if sparse is None:
        return 0
    d, heads = sparse.index_head_dim, sparse.index_n_heads
    if compressed := arch.compressed_attention:
        if compressed.kinds[layer] != "sparse":
            return 0
        queries = compressed.q_lora_rank * heads * d
        return queries + h * heads + _compressor(h, d, 2 * d, compressed.sparse_ratio)
    if sparse.indexer_layers is not None and layer not in sparse.indexer_layers:
        return 0
    rank = (arch.mla.q_lora_rank if arch.mla else None) or h
    return rank * heads * d + h * d + 2 * d + h * heads


def _linear_attention(arch: Architecture) -> int:
    linear, h = arch.linear_attention, arch.hidden_size
    assert linear is not None
    key = linear.num_key_heads * linear.key_head_dim
    value = linear.num_value_heads * linear.value_head_dim
    count = h * (2 * key + 2 * value + 2 * linear.num_value_heads) + value * h
    count += (2 * key + value) * linear.conv_kernel
    return count + 2 * linear.num_value_heads + linear.value_head_dim


def _mamba(arch: Architecture) -> int:
    mamba, h = arch.mamba, arch.hidden_size
    assert mamba is not None
    inner = mamba.inner_size(h)
    heads = inner // mamba.head_dim
    convolved = inner + 2 * mamba.num_groups * mamba.state_size
    count = h * (inner + convolved + heads) + inner * h + inner + 3 * heads
    count += convolved * ((mamba.conv_kernel or 0) + (1 if mamba.conv_bias else 0))
    return count + (inner + convolved + heads + h if mamba.linear_bias else 0)


def _mlp(arch: Architecture, layer: int) -> dict[str, int]:
    moe, h = arch.moe, arch.hidden_size
    if moe is None or not arch.has_experts(layer):
        return {DENSE_MLP: _dense(arch, arch.intermediate_size)}
    expert = _dense(arch, moe.intermediate_size, bias=moe.expert_linear_bias)
    outputs = moe.num_experts + moe.zero_experts
    items = {
        ROUTED: expert * moe.num_experts,
        ROUTER: h * outputs + (outputs if moe.router_bias else 0),
    }
    if width := moe.shared_expert_intermediate_size:
        items[SHARED] = _dense(arch, width, bias=False) + (h if moe.shared_expert_gate else 0)
    if arch.sublayers > 1:
        items[DENSE_MLP] = _dense(arch, arch.intermediate_size) * arch.sublayers
    return items


def _dense(arch: Architecture, width: int, bias: bool | None = None) -> int:
    matrices = 3 if arch.gated_mlp else 2
    count = matrices * arch.hidden_size * width
    if arch.mlp_bias if bias is None else bias:
        count += (matrices - 1) * width + arch.hidden_size
    return count
