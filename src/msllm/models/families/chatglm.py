"""ChatGLM 2, 3 and GLM-4-9B under their first config: interleaved rotary on half of each head."""

from __future__ import annotations

from msllm.models.architecture import Rope
from msllm.models.families.decoder import flag, number, size
from msllm.models.families.family import Config, Family, Fields


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
    }


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
    ),
)
