"""Architecture: a model's shape, frozen.

Built from a Hugging Face `config.json` by `msllm.models.hf_config`, it is the one place from which
parameter counts, FLOPs, memory, Megatron's TransformerConfig and weight names are derived. Names
are those of Hugging Face configs where they have one.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class Rope:
    """Rotary position embedding.

    `scaling` holds the published scaling parameters as they are in `rope_scaling`, with `type`
    always among them ("linear", "dynamic", "llama3", "yarn", "longrope"); None for no scaling.
    """

    theta: float = 10000.0
    partial_factor: float = 1.0
    interleaved: bool = False
    scaling: dict[str, Any] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class MoE:
    """Mixture of experts in the layers that have one."""

    num_experts: int
    num_experts_per_tok: int
    intermediate_size: int
    shared_expert_intermediate_size: int = 0
    """Width of all shared experts together; 0 for none."""
    shared_expert_gate: bool = False
    first_dense_layers: int = 0
    """Leading layers with a dense MLP of `Architecture.intermediate_size`."""
    dense_layers: tuple[int, ...] = ()
    """Further layers (from 0) with a dense MLP."""
    score_function: Literal["softmax", "sigmoid", "sqrtsoftplus", "sparsemixer"] = "softmax"
    softmax_after_topk: bool = False
    norm_topk_prob: bool = True
    num_groups: int | None = None
    topk_groups: int | None = None
    group_best: int = 2
    """Experts of a group whose scores say together how good the group is."""
    routed_scaling_factor: float = 1.0
    expert_bias: bool = False
    """Aux-loss-free balancing: a bias on the scores that only selects."""
    router_bias: bool = False
    """A learnt bias of the router's linear."""
    expert_linear_bias: bool = False
    zero_experts: int = 0
    """Experts that hand their input through: further outputs of the router without weights."""
    hash_layers: int = 0
    """Leading layers whose experts are looked up by token id instead of scored."""
    input_jitter: float = 0.0
    """Training noise on the router's and experts' input, 1 +- this factor."""
    router_jitter: float = 0.0
    """SparseMixer's: experts whose logits are this near to the best one are drawn among."""
    aux_loss_coef: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class MLA:
    """Multi-head latent attention. `q_lora_rank` is None where queries are not compressed."""

    q_lora_rank: int | None
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    norm_eps: float = 1e-6
    """Of the latents' norms: published models leave it at its default, whatever the others'."""
    scale_latents: bool = False
    """Normalized latents are scaled by (hidden_size / rank) ** 0.5."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mamba:
    """State-space layers (Mamba 2 and 3)."""

    state_size: int
    head_dim: int
    num_groups: int
    expand: int = 2
    conv_kernel: int | None = 4
    chunk_size: int = 256
    num_heads: int | None = None
    conv_bias: bool = True
    linear_bias: bool = False

    def inner_size(self, hidden_size: int) -> int:
        """Width of the state-space mixer: heads x head size, or expand x hidden size."""
        if self.num_heads:
            return self.num_heads * self.head_dim
        return self.expand * hidden_size


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearAttention:
    """Gated delta net layers."""

    num_key_heads: int
    num_value_heads: int
    key_head_dim: int
    value_head_dim: int
    conv_kernel: int = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class SparseAttention:
    """Lightning indexer of DeepSeek's sparse attention (DSA)."""

    index_n_heads: int
    index_head_dim: int
    index_topk: int
    indexer_layers: tuple[int, ...] | None = None
    """Layers with an indexer of their own; None for all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CompressedAttention:
    """DeepSeek-V4's attention: low-rank queries and outputs over one shared key/value head.

    `kinds` says for each layer how distant keys are seen: "sliding" not at all, "sparse" as
    indexed groups of `sparse_ratio` tokens, "heavy" as groups of `heavy_ratio`.
    """

    q_lora_rank: int
    o_lora_rank: int
    o_groups: int
    rope_head_dim: int
    kinds: tuple[Literal["sliding", "sparse", "heavy"], ...]
    sparse_ratio: int = 4
    heavy_ratio: int = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """A decoder-only language model's shape.

    `extra` names, in plain words, the parts of the published model that these fields do not
    describe; a model with any is listed but not trained.
    """

    model_type: str
    hidden_size: int
    num_layers: int
    num_attention_heads: int
    num_query_groups: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    max_position_embeddings: int | None = None
    position_embedding: Literal["rope", "alibi", "learned", "none"] = "rope"
    rope: Rope = field(default_factory=Rope)
    norm: Literal["RMSNorm", "LayerNorm"] = "RMSNorm"
    norm_eps: float = 1e-6
    norm_zero_centered: bool = False
    sandwich_norm: bool = False
    embedding_norm: bool = False
    activation: Literal["silu", "gelu", "gelu_tanh", "relu2"] = "silu"
    gated_mlp: bool = True
    qk_norm: Literal["head", "full"] | None = None
    qkv_bias: bool = False
    attention_out_bias: bool = False
    mlp_bias: bool = False
    lm_head_bias: bool = False
    tie_word_embeddings: bool = False
    sliding_window: int | None = None
    sliding_layers: tuple[int, ...] | None = None
    """Layers (from 0) with the sliding window; None for all, if `sliding_window` is set."""
    no_rope_layers: tuple[int, ...] = ()
    attention_sinks: bool = False
    attention_scale: float | None = None
    """Softmax scale; None for head_dim ** -0.5."""
    attention_softcap: float | None = None
    logit_softcap: float | None = None
    embedding_scale: float | None = None
    residual_scale: float | None = None
    logit_scale: float | None = None
    swiglu_limit: float | None = None
    """Clamps gates from above, and up projections on both sides."""
    swiglu_alpha: float | None = None
    """Where given, a gated MLP computes gate * sigmoid(alpha * gate) * (up + 1)."""
    initializer_range: float = 0.02
    num_nextn_predict_layers: int = 0
    layer_types: tuple[str, ...] | None = None
    """Kind of each layer where they differ: "attention", "linear_attention", "mamba", "mlp"."""
    attention_output_gate: bool = False
    """Attention's output is gated elementwise by a second projection beside the queries."""
    attention_head_gate: bool = False
    """Attention's output is gated by one sigmoid a head."""
    sliding_num_attention_heads: int | None = None
    """Heads of the layers with the sliding window, where they differ."""
    kv_sharing: int = 1
    """Consecutive layers that use the keys and values of the first of them."""
    sublayers: int = 1
    """Attention + dense MLP pairs in one layer (LongCat has two, beside one set of experts)."""
    hyper_connections: int = 0
    """Residual streams (arXiv:2409.19606); 0 for the plain residual."""
    mtp_dense: bool = False
    """Multi-token-prediction layers have a dense MLP although the model has experts."""
    normalized_head: bool = False
    """Rows of the output layer are L2-normalized before use (Baichuan 2's NormHead)."""
    moe: MoE | None = None
    mla: MLA | None = None
    mamba: Mamba | None = None
    linear_attention: LinearAttention | None = None
    sparse_attention: SparseAttention | None = None
    compressed_attention: CompressedAttention | None = None
    extra: tuple[str, ...] = ()

    @property
    def is_moe(self) -> bool:
        """Whether any layer has experts."""
        return self.moe is not None

    def has_experts(self, layer: int) -> bool:
        """Whether layer `layer` (from 0) is a mixture of experts."""
        moe = self.moe
        return moe is not None and layer >= moe.first_dense_layers and layer not in moe.dense_layers

    def layer_kind(self, layer: int) -> str:
        """What layer `layer` (from 0) mixes tokens with; "mlp" where it does not."""
        return self.layer_types[layer] if self.layer_types else "attention"

    @property
    def rotary_head_dim(self) -> int:
        """Dimensions of a head that positions may turn: of a latent one, the part set aside."""
        return self.mla.qk_rope_head_dim if self.mla else self.head_dim

    def has_mlp(self, layer: int) -> bool:
        """Whether the layer has an MLP; in models with Mamba layers a layer is one mixer."""
        return self.layer_kind(layer) == "mlp" if self.mamba else True

    def owns_kv(self, layer: int) -> bool:
        """Whether the layer has keys and values of its own."""
        return layer % self.kv_sharing == 0

    def is_sliding(self, layer: int) -> bool:
        """Whether the layer sees only a window."""
        if self.sliding_window is None:
            return False
        return self.sliding_layers is None or layer in self.sliding_layers

    def heads(self, layer: int) -> int:
        """Attention heads of the layer."""
        if self.sliding_num_attention_heads and self.is_sliding(layer):
            return self.sliding_num_attention_heads
        return self.num_attention_heads
