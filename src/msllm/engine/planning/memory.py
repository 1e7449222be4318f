"""Memory that a device will need, item by item, from formulas: no model is built.

Parameters, gradients and optimizer state are exact; the peak of a step is within a sixth of what
real models need on the CPU (tests/engine/planning). Experts are assumed to get equal shares of the
tokens. Activations follow Korthikanti et al. (arXiv:2205.05198), with what our own operators keep
for the backward pass. The pipeline's fullest stage counts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from msllm.config import LayoutConfig, RunConfig
from msllm.engine.layout import Layout, divides
from msllm.models import counts
from msllm.models.architecture import Architecture

BYTES = {"bf16": 2, "fp32": 4}
GRADIENT = 4
"""Bytes of a gradient: kept and summed in float32."""
QUERY_BLOCK = 128
"""Queries of a block where attention writes its scores out, see `engine.ops.attention`."""
MOMENTS = {"adamw": 8, "muon": 4}
"""Bytes of optimizer state a parameter: two float32 moments, or one momentum; Muon leaves the
embedding and the head to Adam."""

PROCESS = {"cpu": 500 << 20, "cuda": 1 << 30, "npu": 2 << 30}
"""The process itself. cpu: torch, Megatron-core and gloo's buffers, measured as what the peak of
resident memory exceeds the other items by (tiny-qwen3, fp32, 8 x 256 tokens: 489 MiB, 483 with full
recompute, 524 at tp 2). cuda and npu: context and communicators, assumed and not measured."""

ITEMS = (
    "parameters", "gradients", "main parameters", "optimizer state", "activations", "logits",
    "backward", "communication", "process",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Estimate:
    """Bytes on the device of the fullest pipeline stage, by item (`ITEMS`)."""

    items: Mapping[str, int]
    stage: int = 0
    parameters: Mapping[str, int] = field(default_factory=dict)
    """Numbers of parameters there: `dense` (sharded over dp) and `experts` (over expert dp)."""

    @property
    def total(self) -> int:
        """All bytes."""
        return sum(self.items.values())


def estimate(architecture: Architecture, layout: Layout, run: RunConfig, kind: str) -> Estimate:
    """Estimate the memory of a device of `kind` on the fullest pipeline stage."""
    stages = [_stage(architecture, layout, run, kind, stage) for stage in range(layout.pp)]
    return max(stages, key=lambda stage: stage.total)


def three_ways_down(
    run: RunConfig, architecture: Architecture, layout: Layout, kind: str
) -> list[str]:
    """Name up to three changes that save most, each with the estimate that it leads to."""
    now = estimate(architecture, layout, run, kind).total
    found: list[tuple[int, str]] = []
    for words, config in _changes(run):
        changed = Layout.from_world(config.layout, layout.world_size)
        if divides(config.layout, layout.world_size) or changed.problems(architecture):
            continue
        total = estimate(architecture, changed, config, kind).total
        if total < 0.99 * now:
            found.append((total, f"{words}: {total / 2**30:.2f} GiB"))
    ways = [text for _, text in sorted(found)[:3]]
    others = [
        "more devices, with a larger --tp or --pp",
        "a shorter --seq-length",
        "a smaller model",
    ]
    return ways + others[: 3 - len(ways)]


def stage_parameters(architecture: Architecture, layout: Layout, stage: int) -> dict[str, int]:
    """Numbers of parameters on one device of a stage: `dense` and `experts`."""
    held = range(stage, layout.num_chunks, layout.pp)
    layers = [layer for chunk in held for layer in _layers(architecture, layout, chunk)]
    dense = experts = 0
    for layer in layers:
        items = counts.layer_parameters(architecture, layer)
        experts += items.pop(counts.ROUTED, 0) // (layout.ep * layout.etp)
        dense += sum(_share(architecture, item, n, layout.tp) for item, n in items.items())
    dense += _ends(architecture, layout, stage)
    if stage == layout.pp - 1:
        dense += _further(architecture, layout)
    return {"dense": dense, "experts": experts}


def _layers(architecture: Architecture, layout: Layout, chunk: int) -> list[int]:
    """Layers of a pipeline chunk; those of multi-token prediction are like the last one."""
    layers = list(layout.chunks(architecture.num_layers)[chunk])
    last = chunk == layout.num_chunks - 1
    further = architecture.num_nextn_predict_layers if last else 0
    return layers + [architecture.num_layers - 1] * further


def _further(architecture: Architecture, layout: Layout) -> int:
    """Parameters of multi-token prediction beside its layers, with the embedding it reads."""
    count, hidden = architecture.num_nextn_predict_layers, architecture.hidden_size
    if not count:
        return 0
    beside = 2 * hidden * hidden // layout.tp + 3 * hidden
    table = -(-architecture.vocab_size // layout.tp) * hidden
    has_embedding = layout.pp == 1 or architecture.tie_word_embeddings
    return count * beside + (0 if has_embedding else table)


def _share(architecture: Architecture, item: str, count: int, tp: int) -> int:
    """Parameters of a layer's item on one of `tp` ranks; norms and routers are on all of them."""
    if item in (counts.NORMS, counts.ROUTER, counts.HYPER):
        return count
    whole = 0
    if item == counts.ATTENTION:
        if (mla := architecture.mla) is not None:  # the way down to the latents, and their norms
            latents = mla.kv_lora_rank + (mla.q_lora_rank or 0)
            whole += (latents + mla.qk_rope_head_dim) * architecture.hidden_size + latents
        if architecture.qk_norm == "head":
            whole += 2 * architecture.head_dim
        if architecture.attention_out_bias:
            whole += architecture.hidden_size
    if item == counts.DENSE_MLP and architecture.mlp_bias:
        whole += architecture.hidden_size  # that of the down projection
    moe = architecture.moe
    if item == counts.SHARED and moe is not None and moe.shared_expert_gate:
        whole += architecture.hidden_size
    return (count - whole) // tp + whole


def _ends(architecture: Architecture, layout: Layout, stage: int) -> int:
    """Parameters of the embedding (first stage), of the head and the last norm (last stage)."""
    items = counts.model_parameters(architecture)
    rows = -(-architecture.vocab_size // layout.tp)
    table = rows * architecture.hidden_size
    first, last = stage == 0, stage == layout.pp - 1
    count = table if first else 0
    if last:
        count += items.get(counts.NORMS, 0) + (items.get(counts.HYPER, 0))
        tied_here = architecture.tie_word_embeddings and first
        count += 0 if tied_here else table
        count += rows if architecture.lm_head_bias else 0
    return count


def _stage(
    architecture: Architecture, layout: Layout, run: RunConfig, kind: str, stage: int
) -> Estimate:
    numbers = stage_parameters(architecture, layout, stage)
    count = numbers["dense"] + numbers["experts"]
    sharded = run.layout.distributed_optimizer and run.train.optimizer == "adamw"
    expert_dp = max(1, layout.world_size // (layout.etp * layout.ep * layout.pp))
    kept = (
        numbers["dense"] // (layout.dp * layout.cp) + numbers["experts"] // expert_dp
        if sharded
        else count
    )
    by_adam = _ends(architecture, layout, stage) if run.train.optimizer == "muon" else 0
    activations, inside = _activations(architecture, layout, run, stage)
    logits = _logits(architecture, layout, run) if stage == layout.pp - 1 else 0
    items = {
        "parameters": count * BYTES[run.dtype],
        "gradients": count * GRADIENT,
        "main parameters": kept * 4 if run.dtype == "bf16" else 0,
        "optimizer state": kept * MOMENTS[run.train.optimizer] + by_adam * 4,
        "activations": activations,
        "logits": logits,
        "backward": max(0, inside - logits),  # the logits are gone before the layers' turn
        "communication": _communication(architecture, layout, run),
        "process": PROCESS[kind],
    }
    return Estimate(items, stage, numbers)


def micro_batches(layout: Layout, run: RunConfig) -> int:
    """Micro-batches of a step on each data parallel rank."""
    samples = run.train.global_batch or run.train.micro_batch * layout.dp
    return max(1, samples // (run.train.micro_batch * layout.dp))


def in_flight(layout: Layout, stage: int, count: int) -> int:
    """Micro-batches, times chunks where they interleave, that a stage holds at once.

    One forward, one backward: a stage runs ahead by the number of stages behind it
    (arXiv:2104.04473, figure 4).
    """
    if layout.vpp == 1:
        return min(layout.pp - stage, count)
    ahead = 2 * (layout.pp - stage - 1) + (layout.vpp - 1) * layout.pp + 1
    return min(ahead, count * layout.vpp)


def _activations(
    architecture: Architecture, layout: Layout, run: RunConfig, stage: int
) -> tuple[int, int]:
    """Bytes kept by all micro-batches in flight on a stage, and those inside one backward pass.

    The latter are the activations of the block that is computed again, the gradients of one
    layer's activations, and that of its largest matrix, before it joins the float32 sums.
    """
    held_chunks = range(stage, layout.num_chunks, layout.pp)
    chunks = [_layers(architecture, layout, chunk) for chunk in held_chunks]
    layers = [layer for chunk in chunks for layer in chunk]
    width = BYTES[run.dtype] * _tokens(layout, run)
    border = architecture.hidden_size // (layout.tp if layout.sequence_parallel else 1)
    held = in_flight(layout, stage, micro_batches(layout, run))
    none = run.model_copy(update={"train": run.train.model_copy(update={"recompute": "none"})})
    whole = {layer: _layer(architecture, layout, none, layer) for layer in layers}
    if run.train.recompute == "full":
        block = run.train.recompute_layers
        a_chunk = max((-(-len(chunk) // block) * border for chunk in chunks), default=0)
        again = max((sum(whole[i] for i in chunk[:block]) for chunk in chunks), default=0)
    else:
        kept = {layer: _layer(architecture, layout, run, layer) for layer in layers}
        a_chunk = max((sum(kept[i] for i in chunk) for chunk in chunks), default=0)
        again = max((whole[i] - kept[i] for i in layers), default=0)
    gradients = max((_gradients(architecture, layout, layer) for layer in layers), default=0)
    matrix = max((_largest_matrix(architecture, layout, layer) for layer in layers), default=0)
    inside = width * (again + gradients) + BYTES[run.dtype] * matrix
    if stage < layout.pp - 1:
        return width * held * a_chunk, inside
    last_norm = 2 * border * width  # its input and output
    # inputs and outputs of the norms of multi-token prediction, and what they are joined to
    further = 8 * border * width * architecture.num_nextn_predict_layers
    kept_here = width * held * a_chunk + last_norm + further
    return kept_here, inside - last_norm  # gone before the layers' turn


def _gradients(architecture: Architecture, layout: Layout, layer: int) -> int:
    """Elements a token of a layer's gradients at their most, in the MLP.

    They are the residual's and the branch's, the product's and those of its factors.
    """
    border = architecture.hidden_size // (layout.tp if layout.sequence_parallel else 1)
    wide = 3 if architecture.gated_mlp else 2
    moe = architecture.moe
    if moe is None or not architecture.has_experts(layer):
        return 2 * border + wide * architecture.intermediate_size // layout.tp
    tokens = layout.tp if layout.sequence_parallel else 1
    inner = wide * moe.intermediate_size // layout.etp
    return 2 * border + moe.num_experts_per_tok * inner // tokens


def _largest_matrix(architecture: Architecture, layout: Layout, layer: int) -> int:
    """Elements of the largest weight of a layer on one rank; all experts' are one."""
    halves = 2 if architecture.gated_mlp else 1
    moe = architecture.moe
    if moe is None or not architecture.has_experts(layer):
        return halves * architecture.hidden_size * architecture.intermediate_size // layout.tp
    experts = moe.num_experts // layout.ep
    return halves * architecture.hidden_size * moe.intermediate_size * experts // layout.etp


def _tokens(layout: Layout, run: RunConfig) -> int:
    """Tokens of a micro-batch on one context parallel rank."""
    return run.train.micro_batch * run.data.seq_length // layout.cp


def _layer(architecture: Architecture, layout: Layout, run: RunConfig, layer: int) -> int:
    """Elements a token that a layer keeps on one rank.

    Both norms keep their input, the linears theirs; attention keeps what enters its kernel and
    what leaves it; a gated MLP its two halves, silu(gate) and the product.
    """
    again = set(run.train.recompute_modules) if run.train.recompute == "selective" else set()
    border = architecture.hidden_size // (layout.tp if layout.sequence_parallel else 1)
    norms = 2 * border + (0 if "layernorm" in again else 2 * border)
    if architecture.sandwich_norm:
        norms += 2 * border  # what enters those behind the sublayers
    attention = _attention(architecture, layout, run, layer, "core_attn" in again)
    if architecture.has_experts(layer):
        mlp = 0 if "moe" in again else _experts(architecture, layout, "moe_act" in again)
    elif "mlp" in again:
        mlp = 0
    else:
        mlp = _mlp_elements(architecture, architecture.intermediate_size) // layout.tp
    return norms + attention + mlp


def _attention(
    architecture: Architecture, layout: Layout, run: RunConfig, layer: int, core_again: bool
) -> int:
    """Queries, keys and values before and after the rotary embedding, and the output.

    Where the softmax is written out (soft caps and sinks), its probabilities are kept too, in the
    parameters' precision and as the float32 they are computed in; so are capped scores.
    """
    heads, d = architecture.heads(layer), architecture.head_dim
    if (mla := architecture.mla) is not None:
        latents = 2 * (mla.kv_lora_rank + (mla.q_lora_rank or 0)) + mla.qk_rope_head_dim
        latents //= layout.tp if layout.sequence_parallel else 1
        # queries and keys, what keys and values are cut from, and the output
        per_head = 2 * d + mla.qk_nope_head_dim + 2 * mla.v_head_dim
        return latents + heads * per_head // layout.tp
    groups = max(architecture.num_query_groups, layout.tp)
    copies = 2 + (architecture.qk_norm is not None)
    elements = copies * (heads + groups) * d + groups * d + heads * d
    capped = architecture.attention_softcap is not None
    if (capped or architecture.attention_sinks) and not core_again:
        window = architecture.sliding_window if architecture.is_sliding(layer) else None
        # float32 and rounded to another precision; sinks are cut off in one more copy
        rounded = run.dtype != "fp32" or architecture.attention_sinks
        copies = (1 + capped) * 4 // BYTES[run.dtype] + rounded
        elements += heads * _keys_held(run.data.seq_length, window) * copies
    return elements // layout.tp


def _keys_held(length: int, window: int | None) -> int:
    """Keys of a query's row of scores on average, where they are computed in blocks of queries."""
    blocks = range(0, length, QUERY_BLOCK)
    held = 0
    for start in blocks:
        end = min(start + QUERY_BLOCK, length)
        first = 0 if window is None else max(start - window + 1, 0)
        held += (end - start) * (end - first)
    return held // length


def _mlp_elements(architecture: Architecture, width: int) -> int:
    """Gate, up, silu(gate), the product; gpt-oss has a clamped gate, its sigmoid and up + 1."""
    more = 3 if architecture.swiglu_alpha is not None else 0
    return (4 + more if architecture.gated_mlp else 2) * width


def _experts(architecture: Architecture, layout: Layout, activation_again: bool) -> int:
    """Copies of a token for its experts, what these keep, and their outputs."""
    moe = architecture.moe
    assert moe is not None
    hidden = architecture.hidden_size
    inner = _mlp_elements(architecture, moe.intermediate_size) // layout.etp
    if activation_again:
        inner //= 2
    tokens = layout.tp if layout.sequence_parallel else 1
    routed = moe.num_experts_per_tok * (2 * hidden + inner) // tokens
    shared = _mlp_elements(architecture, moe.shared_expert_intermediate_size) // layout.tp
    drawn = moe.score_function == "sparsemixer"  # twice, with what is left, near and its shares
    scores = (12 if drawn else 2) * moe.num_experts
    noise = 2 * hidden if moe.input_jitter else 0  # and the noisy input
    return routed + shared + (scores + noise) // tokens


def _logits(architecture: Architecture, layout: Layout, run: RunConfig) -> int:
    """The logits and their loss, or the gradients of logits and head: whichever is more.

    Megatron's cross entropy turns float32 logits into their gradient in place, and first copies
    those of another precision; rows that pad the vocabulary are masked in one more copy. A soft
    cap keeps its hyperbolic tangent, and its gradient is one more copy where no cast made one.
    """
    rows = -(-architecture.vocab_size // layout.tp)
    tokens, size = _tokens(layout, run), BYTES[run.dtype]
    padded = architecture.vocab_size % layout.tp != 0
    loss = 4 + (size if run.dtype != "fp32" else 0) + (size if padded else 0)
    if architecture.logit_softcap is not None:
        loss += size * (2 if run.dtype == "fp32" else 1)
    largest = max(tokens * loss, (tokens + architecture.hidden_size) * size)
    further = tokens * 4 * architecture.num_nextn_predict_layers  # gradients that wait their turn
    return rows * (largest + further)


def _communication(architecture: Architecture, layout: Layout, run: RunConfig) -> int:
    """One gathered sequence (sequence parallel), and a sent and a received one (pipeline)."""
    one = _tokens(layout, run) * architecture.hidden_size * BYTES[run.dtype]
    cut = layout.tp if layout.sequence_parallel else 1
    gathered = one if layout.sequence_parallel else 0
    return gathered + (2 * one // cut if layout.pp > 1 else 0)


def _changes(run: RunConfig) -> list[tuple[str, RunConfig]]:
    """Changes worth a try, with the words for them."""
    train, layout = run.train, run.layout

    def with_layout(**sizes: int | bool) -> RunConfig:
        new = LayoutConfig(**{**layout.model_dump(), "pp_layout": None, **sizes})
        return run.model_copy(update={"layout": new})

    def with_train(**values: object) -> RunConfig:
        return run.model_copy(update={"train": train.model_copy(update=values)})

    changes = []
    if train.recompute != "full":
        changes.append(("--recompute full", with_train(recompute="full")))
    if train.micro_batch > 1:
        half = train.micro_batch // 2
        changes.append((f"--micro-batch {half}", with_train(micro_batch=half)))
    changes.append((f"--tp {2 * layout.tp}", with_layout(tp=2 * layout.tp)))
    changes.append((f"--pp {2 * layout.pp}", with_layout(pp=2 * layout.pp)))
    changes.append((f"--ep {2 * layout.ep}", with_layout(ep=2 * layout.ep)))
    if not layout.distributed_optimizer:
        words = "--set layout.distributed_optimizer=true"
        changes.append((words, with_layout(distributed_optimizer=True)))
    return changes
