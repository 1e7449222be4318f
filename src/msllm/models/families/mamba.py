"""Mamba 2, pure and mixed with attention and MLP layers. A layer is one mixer behind one norm."""

from __future__ import annotations

from typing import Any

from msllm.errors import InputError
from msllm.models.architecture import Mamba
from msllm.models.families.decoder import ACTIVATIONS, decoder
from msllm.models.families.family import Config, Family, Fields
from msllm.models.families.values import flag, number, optional_size, size

_KINDS = {
    "M": "mamba",
    "*": "attention",
    "-": "mlp",
    "linear_attention": "mamba",
    "mamba": "mamba",
    "full_attention": "attention",
    "attention": "attention",
    "mlp": "mlp",
}


def _mixer(config: Config) -> Mamba:
    inner = config.get("ssm_cfg") or {}
    return Mamba(
        state_size=inner.get("d_state") or size(config, "state_size"),
        head_dim=inner.get("headdim") or size(config, "mamba_head_dim"),
        num_groups=inner.get("ngroups") or size(config, "n_groups"),
        expand=inner.get("expand") or size(config, "expand"),
        conv_kernel=inner.get("d_conv") or size(config, "conv_kernel"),
        chunk_size=inner.get("chunk_size") or size(config, "chunk_size"),
        num_heads=optional_size(config, "mamba_num_heads"),
        conv_bias=flag(config, "use_conv_bias", True),
        linear_bias=flag(config, "use_bias"),
    )


def _padded(config: Config) -> int:
    """Rows of the embedding; configs of the mamba_ssm package give the tokenizer's size."""
    vocab, multiple = size(config, "vocab_size"), optional_size(config, "pad_vocab_size_multiple")
    return vocab if multiple is None else -(-vocab // multiple) * multiple


def _pure(config: Config) -> Fields:
    layers = size(config, "num_hidden_layers")
    return {
        "hidden_size": size(config, "hidden_size"),
        "num_layers": layers,
        "num_attention_heads": 0,
        "num_query_groups": 0,
        "head_dim": 0,
        "intermediate_size": 0,
        "vocab_size": _padded(config),
        "position_embedding": "none",
        "norm_eps": number(config, "rms_norm_eps", 1e-5),
        "tie_word_embeddings": flag(config, "tie_word_embeddings"),
        "initializer_range": number(config, "initializer_range", 0.1),
        "layer_types": ("mamba",) * layers,
        "mamba": _mixer(config),
    }


def _layers(config: Config) -> tuple[str, ...]:
    given: Any = config.get("layers_block_type") or config.get("hybrid_override_pattern")
    unknown = sorted({kind for kind in given or () if kind not in _KINDS})
    if not given or unknown:
        raise InputError(
            f"unknown kinds of layers: {', '.join(unknown)}" if given else "no layers are given",
            "config.json: hybrid_override_pattern",
            "known are M (mamba), * (attention) and - (MLP)",
        )
    return tuple(_KINDS[kind] for kind in given)


def _hybrid(config: Config) -> Fields:
    kinds = _layers(config)
    base = decoder({**config, "num_hidden_layers": len(kinds)})
    return {
        **base,
        "position_embedding": "none",
        "activation": ACTIVATIONS[config.get("mlp_hidden_act") or "relu2"],
        "gated_mlp": False,
        "layer_types": kinds,
        "mamba": _mixer(config),
    }


_DEFAULTS = {"expand": 2, "conv_kernel": 4, "rms_norm_eps": 1e-5}

FAMILIES = (
    Family(
        name="mamba2",
        model_types=("mamba2",),
        renames={
            "d_model": "hidden_size",
            "n_layer": "num_hidden_layers",
            "num_heads": "mamba_num_heads",
            "head_dim": "mamba_head_dim",
            "tie_embeddings": "tie_word_embeddings",
        },
        defaults={
            **_DEFAULTS,
            "state_size": 128,
            "mamba_head_dim": 64,
            "n_groups": 1,
            "chunk_size": 256,
        },
        base=_pure,
    ),
    Family(
        name="nemotron_h",
        model_types=("nemotron_h",),
        renames={"ssm_state_size": "state_size"},
        defaults={**_DEFAULTS, "chunk_size": 128},
        base=_hybrid,
    ),
)
