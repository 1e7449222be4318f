"""How the parts shared by most configs are read: the decoder, rotary settings, experts, latents.

All take a config with common keys (see `ALIASES`) and return arguments of `Architecture` or parts
of it. Families decide which parts they have.
"""

from __future__ import annotations

from typing import Any

from msllm.errors import InputError
from msllm.models.architecture import MLA, MoE, Rope
from msllm.models.families.family import Config, Fields
from msllm.models.families.values import (
    flag,
    is_number,
    names,
    number,
    numbers,
    optional_size,
    record,
    size,
    whole,
)

ALIASES = {
    "layer_norm_epsilon": "rms_norm_eps",
    "layernorm_epsilon": "rms_norm_eps",
    "layer_norm_eps": "rms_norm_eps",
    "norm_epsilon": "rms_norm_eps",
    "num_local_experts": "num_experts",
    "n_routed_experts": "num_experts",
    "moe_topk": "num_experts_per_tok",
    "num_shared_experts": "n_shared_experts",
    "num_shared_expert": "n_shared_experts",
    "moe_router_scaling_factor": "routed_scaling_factor",
    "scoring_func": "score_function",
    "num_mtp_modules": "num_nextn_predict_layers",
}
"""Spellings of one thing in different families; the common key wins where both are there."""

ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "relu2": "relu2",
}
ROPE_KINDS = ("linear", "dynamic", "llama3", "yarn", "longrope")
_ROPE_NAMES = {"su": "longrope"}
_WITH_ORIGINAL_LENGTH = ("llama3", "yarn", "longrope")
_NUMBERS = (
    *("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim"),
    "original_max_position_embeddings",
)
_FACTORS = ("short_factor", "long_factor")
_ROPE_NEEDS = {
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
}
"""Those without which a kind says nothing; yarn's factor also follows from lengths."""


ROUTED_BY_SIGMOID = frozenset(
    {
        "experts",
        "router: sigmoid",
        "router: balancing bias",
        "router: groups",
        "router: scaled",
        "router: scores not renormalized",
    }
)
"""Features of DeepSeek-V3's router and of those like it."""


def decoder(config: Config) -> Fields:
    """The common decoder: Llama's structure in Llama's words."""
    heads = size(config, "num_attention_heads")
    bias = flag(config, "attention_bias")
    return {
        "hidden_size": size(config, "hidden_size"),
        "num_layers": size(config, "num_hidden_layers"),
        "num_attention_heads": heads,
        "num_query_groups": optional_size(config, "num_key_value_heads") or heads,
        "head_dim": head_dim(config),
        "intermediate_size": size(config, "intermediate_size"),
        "vocab_size": size(config, "vocab_size"),
        "max_position_embeddings": optional_size(config, "max_position_embeddings"),
        "norm_eps": number(config, "rms_norm_eps", 1e-6, least=0),
        "activation": activation(config),
        "qkv_bias": bias,
        "attention_out_bias": bias,
        "mlp_bias": flag(config, "mlp_bias"),
        "tie_word_embeddings": flag(config, "tie_word_embeddings"),
        "initializer_range": number(config, "initializer_range", 0.02),
        "num_nextn_predict_layers": whole(config, "num_nextn_predict_layers", 0),
        **rotary(config),
        **window(config),
    }


def head_dim(config: Config) -> int:
    """An explicit `head_dim`, else hidden_size / num_attention_heads; of a latent query, its parts.

    Raises:
        InputError: It must be derived and does not come out whole.
    """
    if config.get("qk_nope_head_dim") is not None:
        return size(config, "qk_nope_head_dim") + size(config, "qk_rope_head_dim")
    given = optional_size(config, "head_dim")
    if given is not None:
        return given
    hidden, heads = size(config, "hidden_size"), size(config, "num_attention_heads")
    if hidden % heads:
        raise InputError(
            f"hidden_size {hidden} is not a multiple of the {heads} attention heads",
            "config.json",
            "give head_dim",
        )
    return hidden // heads


def activation(config: Config) -> str:
    """The MLP's activation, in `Architecture`'s words.

    Raises:
        InputError: One that is not known.
    """
    name = config.get("hidden_act") or "silu"
    if not isinstance(name, str) or name not in ACTIVATIONS:
        raise InputError(
            f"unknown activation {name!r}",
            "config.json: hidden_act",
            f"known are {', '.join(ACTIVATIONS)}",
        )
    return ACTIVATIONS[name]


def window(config: Config) -> Fields:
    """Sliding window, and the layers that have one where `layer_types` says so.

    A window at least as long as the longest sequence never acts and is left out.
    """
    if not flag(config, "use_sliding_window", True):
        return {}
    width = whole(config, "sliding_window", 0)
    longest = optional_size(config, "max_position_embeddings")
    if not width or (longest is not None and width >= longest):
        return {}
    types = names(config, "layer_types")
    layers = None
    if types is not None:
        types = types[: size(config, "num_hidden_layers")]
        layers = tuple(i for i, kind in enumerate(types) if kind == "sliding_attention")
        if not layers:
            return {}
        layers = None if len(layers) == len(types) else layers
    return {"sliding_window": width, "sliding_layers": layers}


def rotary(config: Config) -> Fields:
    """Rotary settings in either spelling, as one record.

    transformers 4 has `rope_theta` beside `rope_scaling`, transformers 5 one `rope_parameters`.
    Where both are there, `rope_scaling` is the later word, as in transformers; theta is taken
    from wherever it is given and never lost. Settings by kind of layer: those of full attention.

    Raises:
        InputError: A scaling of unknown kind, or of none.
    """
    parameters = record(config, "rope_parameters")
    for main in ("full_attention", "main"):
        parameters = record(parameters, main) or parameters
    scaling = dict(record(config, "rope_scaling") or parameters)
    scaling = {k: v for k, v in scaling.items() if v is not None}
    kinds = [scaling.pop(key, None) for key in ("rope_type", "type")]
    kind = _rope_kind(kinds[0] or kinds[1], scaling)
    own = {key: scaling.pop(key, None) for key in ("rope_theta", "partial_rotary_factor")}
    found = {
        k: next((v for v in (own[k], parameters.get(k), config.get(k)) if v), None) for k in own
    }
    share = number(found, "partial_rotary_factor", _rotary_share(config), above=0)
    if share > 1:
        hint = "it is the part of each head that is rotated"
        raise InputError(f"partial_rotary_factor is {share}", "config.json", hint)
    rope = Rope(
        theta=number(found, "rope_theta", 10000.0, above=0),
        partial_factor=share,
        interleaved=flag(config, "rope_interleave"),
        scaling=_rope_scaling(kind, scaling, config),
    )
    return {"rope": rope, "extra": _rope_extra(rope)}


def _rotary_share(config: Config) -> float:
    rotated = optional_size(config, "rotary_dim")
    return rotated / head_dim(config) if rotated else 1.0


def _rope_kind(kind: Any, scaling: dict[str, Any]) -> str | None:
    kind = _ROPE_NAMES.get(kind, kind) if isinstance(kind, str) else kind
    if kind == "default" or (kind is None and "factor" not in scaling):
        return None
    if kind not in ROPE_KINDS:
        raise InputError(
            f"unknown rope scaling {kind!r}" if kind else "rope scaling without a type",
            "config.json: rope_scaling",
            f"known are {', '.join(ROPE_KINDS)}",
        )
    return str(kind)


def _rope_scaling(
    kind: str | None, scaling: dict[str, Any], config: Config
) -> dict[str, Any] | None:
    if kind is None:
        return None
    _check_rope(kind, scaling)
    original = optional_size(config, "original_max_position_embeddings")
    if original and kind in _WITH_ORIGINAL_LENGTH:
        scaling.setdefault("original_max_position_embeddings", original)
    return {"type": kind, **scaling}


def _check_rope(kind: str, scaling: dict[str, Any]) -> None:
    where = "config.json: rope_scaling"
    for key in _ROPE_NEEDS.get(kind, ()):
        if key not in scaling:
            raise InputError(f"rope scaling {kind!r} lacks {key}", where, "take the model's own")
    for key in ("factor", "low_freq_factor", "high_freq_factor"):
        value = scaling.get(key, 1.0)
        if not is_number(value) or value <= 0:
            raise InputError(f"rope scaling's {key} is {value!r}", where, "a number above 0")
    for key in _NUMBERS:
        if not is_number(scaling.get(key, 1)):
            raise InputError(f"rope scaling's {key} is {scaling[key]!r}", where, "a number")
    for key in _FACTORS:
        factors = scaling.get(key, [])
        if not isinstance(factors, list) or not all(map(is_number, factors)):
            raise InputError(f"rope scaling's {key} is no list of numbers", where)


def _rope_extra(rope: Rope) -> tuple[str, ...]:
    scaling = rope.scaling or {}
    if scaling.get("type") == "longrope" and not all(key in scaling for key in _FACTORS):
        return ("longrope's short and long factors, which this config does not give",)
    return ()


def experts(config: Config, **given: Any) -> MoE:
    """Mixture of experts in the common words; `given` overrides what is read."""
    width = given.pop("intermediate_size", None) or size(config, "moe_intermediate_size")
    shared = optional_size(config, "shared_expert_intermediate_size")
    if shared is None:
        shared = whole(config, "n_shared_experts", 0) * width
    leading, further = dense_layers(config)
    score = config.get("score_function") or "softmax"
    values: Fields = {
        "num_experts": size(config, "num_experts"),
        "num_experts_per_tok": size(config, "num_experts_per_tok"),
        "intermediate_size": width,
        "shared_expert_intermediate_size": shared,
        "first_dense_layers": leading,
        "dense_layers": further,
        "score_function": score,
        "norm_topk_prob": flag(config, "norm_topk_prob", True),
        "routed_scaling_factor": number(config, "routed_scaling_factor", 1.0),
        "aux_loss_coef": number(config, "router_aux_loss_coef", 0.0),
        **given,
    }
    if values["score_function"] not in ("softmax", "sigmoid", "sqrtsoftplus", "sparsemixer"):
        raise InputError(f"unknown router score {score!r}", "config.json: scoring_func")
    return MoE(**values)


def groups(config: Config) -> Fields:
    """Group-limited routing; one group is no limit."""
    count = whole(config, "n_group", 1)
    chosen = whole(config, "topk_group", 1)
    return {} if count <= 1 else {"num_groups": count, "topk_groups": chosen}


def dense_layers(config: Config) -> tuple[int, tuple[int, ...]]:
    """Layers of a mixture-of-experts model with a dense MLP: how many lead, and which further."""
    count = size(config, "num_hidden_layers")
    kinds = names(config, "mlp_layer_types")
    if kinds is not None:
        dense = [i for i, kind in enumerate(kinds[:count]) if kind == "dense"]
    else:
        first = whole(config, "first_k_dense_replace", 0)
        step = whole(config, "decoder_sparse_step", 1, least=1)
        only = set(numbers(config, "mlp_only_layers"))
        dense = [i for i in range(count) if i < first or i in only or (i + 1) % step]
    leading = next((i for i, layer in enumerate(dense) if layer != i), len(dense))
    return leading, tuple(dense[leading:])


def latents(config: Config) -> Fields:
    """Multi-head latent attention: each head has keys and values of its own."""
    mla = MLA(
        q_lora_rank=optional_size(config, "q_lora_rank"),
        kv_lora_rank=size(config, "kv_lora_rank"),
        qk_nope_head_dim=size(config, "qk_nope_head_dim"),
        qk_rope_head_dim=size(config, "qk_rope_head_dim"),
        v_head_dim=size(config, "v_head_dim"),
        scale_latents=flag(config, "mla_scale_q_lora"),
    )
    return {"mla": mla, "num_query_groups": size(config, "num_attention_heads")}
