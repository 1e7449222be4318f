"""ChatGLM 2, 3 and GLM-4-9B under their first config: interleaved rotary on half of each head."""

from __future__ import annotations

from collections.abc import Iterator

from msllm.models.architecture import Rope
from msllm.models.families.family import Config, Family, Fields
from msllm.models.families.llama import BIASES
from msllm.models.families.values import flag, number, size
from msllm.models.weight_map import Gated, TensorNames

_NAMES = TensorNames(
    embedding="transformer.embedding.word_embeddings",
    final_norm="transformer.encoder.final_layernorm",
    head="transformer.output_layer",
    layer="transformer.encoder.layers.{layer}.",
    qkv="self_attention.query_key_value",
    out="self_attention.dense",
    dense=Gated(gate="mlp.dense_h_to_4h", up="mlp.dense_h_to_4h", down="mlp.dense_4h_to_h"),
)


def _fields(config: Config) -> Fields:
    heads = size(config, "num_attention_heads")
    grouped = flag(config, "multi_query_attention")
    bias = flag(config, "add_bias_linear")
    return {
        "num_query_groups": size(config, "multi_query_group_num") if grouped else heads,
        "rope": Rope(
            theta=10000.0 * number(config, "rope_ratio", 1.0),
            partial_factor=0.5,
            interleaved=True,
        ),
        "norm": "RMSNorm" if flag(config, "rmsnorm", True) else "LayerNorm",
        "qkv_bias": bias or flag(config, "add_qkv_bias"),
        "attention_out_bias": bias,
        "mlp_bias": bias,
        "extra": tuple(_beyond(config)),
    }


def _beyond(config: Config) -> Iterator[str]:
    """Settings that no published model of the kind has."""
    if not flag(config, "multi_query_attention"):
        yield "queries, keys and values of each head side by side"
    if not flag(config, "post_layer_norm", True):
        yield "no norm behind the last layer"
    if flag(config, "apply_residual_connection_post_layernorm"):
        yield "residuals of normed states"


FAMILIES = (
    Family(
        name="chatglm",
        model_types=("chatglm",),
        renames={
            "num_layers": "num_hidden_layers",
            "padded_vocab_size": "vocab_size",
            "ffn_hidden_size": "intermediate_size",
            "kv_channels": "head_dim",
            "seq_length": "max_position_embeddings",
        },
        defaults={"rms_norm_eps": 1e-5},
        fields=_fields,
        trains=BIASES | {"partial rotary", "interleaved rotary"},
        tensors=_NAMES,
    ),
)
