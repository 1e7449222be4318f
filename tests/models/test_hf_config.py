"""Reading configs: against transformers' own config objects and modules, and against bad ones."""

from __future__ import annotations

import json
from importlib import import_module

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from msllm.errors import InputError
from msllm.models.architecture import Rope
from msllm.models.families import MODULES, families
from msllm.models.hf_config import architecture_from_config, read_config
from tests.models.tiny_configs import cases

MODULE_NAMES = [f"msllm.models.families.{name}" for name in MODULES]
LLAMA = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 80,
    "vocab_size": 96,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
}

# architecture's field -> names under which transformers' config objects have it
SAME = {
    "hidden_size": ("hidden_size",),
    "num_layers": ("num_hidden_layers",),
    "num_attention_heads": ("num_attention_heads",),
    "vocab_size": ("vocab_size",),
    "tie_word_embeddings": ("tie_word_embeddings",),
    "initializer_range": ("initializer_range",),
    "norm_eps": ("rms_norm_eps", "layer_norm_epsilon"),
}


@pytest.mark.parametrize(("model_type", "arguments"), cases())
def test_fields_are_those_of_the_config_object(model_type, arguments):
    config = CONFIG_MAPPING[model_type](**arguments)
    arch = architecture_from_config(config.to_dict())
    assert arch.model_type == model_type
    for field, names in SAME.items():
        expected = next((getattr(config, n) for n in names if hasattr(config, n)), None)
        if model_type == "longcat_flash" and field == "num_layers":
            expected = config.num_layers  # transformers' num_hidden_layers counts halves
        if expected is not None and not (model_type == "mamba2" and "heads" in field):
            assert getattr(arch, field) == expected, field
    theta = (getattr(config, "rope_parameters", None) or {}).get("rope_theta")
    if theta is not None:
        assert arch.rope.theta == theta
    if arch.moe:
        names = ("n_routed_experts", "num_experts", "num_local_experts")
        experts = next(getattr(config, name) for name in names if hasattr(config, name))
        assert arch.moe.num_experts == experts
        topk = getattr(config, "num_experts_per_tok", None) or config.moe_topk
        assert arch.moe.num_experts_per_tok == topk


@pytest.mark.parametrize(("model_type", "arguments"), cases())
def test_attention_is_scaled_as_the_module_does(model_type, arguments):
    """cases C17: the scale of latent attention is of its query's size, times yarn's square."""
    config = CONFIG_MAPPING[model_type](**arguments)
    arch = architecture_from_config(config.to_dict())
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    scales = {
        module.scaling
        for name, module in model.named_modules()
        if name.endswith("self_attn") and hasattr(module, "scaling")
    }
    for scale in scales:
        assert (arch.attention_scale or arch.head_dim**-0.5) == pytest.approx(scale)


@pytest.mark.parametrize(
    ("model_type", "index"), [("mistral", 0), ("qwen2", 1), ("gemma2", 0), ("gpt_oss", 0)]
)
def test_windows_are_in_the_same_layers(model_type, index):
    arguments = [c.values[1] for c in cases() if c.values[0] == model_type][index]
    config = CONFIG_MAPPING[model_type](**arguments)
    arch = architecture_from_config(config.to_dict())
    assert arch.sliding_window == config.sliding_window
    kinds = getattr(config, "layer_types", None) or ["sliding_attention"] * arch.num_layers
    expected = [kind == "sliding_attention" for kind in kinds]
    assert [arch.is_sliding(i) for i in range(arch.num_layers)] == expected
    # configs of transformers 4 do not name layers
    older = {k: v for k, v in config.to_dict().items() if k != "layer_types"}
    again = architecture_from_config(older)
    assert [again.is_sliding(i) for i in range(arch.num_layers)] == expected


def test_dense_layers_among_experts_are_the_modules():
    arguments = next(c.values[1] for c in cases() if c.id == "qwen3_moe-1")
    config = CONFIG_MAPPING["qwen3_moe"](**arguments)
    arch = architecture_from_config(config.to_dict())
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    sparse = [hasattr(layer.mlp, "experts") for layer in model.model.layers]
    assert [arch.has_experts(i) for i in range(4)] == sparse
    assert len(set(sparse)) == 2


# ---------------------------------------------------------------- rotary settings


def rope_of(**settings):
    return architecture_from_config({**LLAMA, **settings}).rope


YARN = {"factor": 4.0, "original_max_position_embeddings": 128}


def test_both_spellings_are_one_record():
    old = rope_of(rope_theta=1e6, rope_scaling={"type": "yarn", **YARN})
    new = rope_of(rope_parameters={"rope_type": "yarn", "rope_theta": 1e6, **YARN})
    assert old == new == Rope(theta=1e6, scaling={"type": "yarn", **YARN})


@pytest.mark.parametrize(
    "settings",
    [
        {"rope_theta": 1e6},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
        {"rope_parameters": {"rope_theta": 1e6}},
        {"rope_theta": 1e6, "rope_scaling": None, "rope_parameters": None},
    ],
)
def test_overriding_the_scaling_keeps_theta(settings):
    """cases C11."""
    assert rope_of(**settings) == Rope(theta=1e6)
    overridden = rope_of(**{**settings, "rope_scaling": {"rope_type": "yarn", **YARN}})
    assert overridden == Rope(theta=1e6, scaling={"type": "yarn", **YARN})


def test_scaling_values_arrive_as_published():
    """cases: a factor of 32 stays 32."""
    values = {"factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    found = rope_of(rope_scaling={"rope_type": "llama3", **values}).scaling
    assert found == {"type": "llama3", **values}


def test_original_length_beside_the_scaling_is_found():
    """Phi-3.5 gives it at the top, and writes an old name for longrope."""
    factors = {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
    rope = rope_of(rope_scaling={"type": "su", **factors}, original_max_position_embeddings=4096)
    assert rope.scaling == {
        "type": "longrope",
        **factors,
        "original_max_position_embeddings": 4096,
    }


def test_partial_rotary_is_found_wherever_it_is():
    assert rope_of(partial_rotary_factor=0.5).partial_factor == 0.5
    assert rope_of(rope_parameters={"partial_rotary_factor": 0.5}).partial_factor == 0.5
    assert rope_of(rotary_dim=4).partial_factor == 0.25


def test_longrope_without_factors_is_told():
    arch = architecture_from_config({**LLAMA, "rope_scaling": {"type": "longrope"}})
    assert "longrope" in arch.extra[0]


@pytest.mark.parametrize(
    ("scaling", "problem"),
    [
        ({"type": "spiral", "factor": 2.0}, "unknown rope scaling 'spiral'"),
        ({"factor": 2.0}, "rope scaling without a type"),
    ],
)
def test_unknown_scaling_is_refused(scaling, problem):
    with pytest.raises(InputError, match=problem) as error:
        rope_of(rope_scaling=scaling)
    assert "yarn" in error.value.problems[0].hint


@pytest.mark.parametrize(
    ("scaling", "problem"),
    [
        ({"type": "linear"}, "'linear' lacks factor"),
        ({"rope_type": "llama3", "factor": 8.0}, "'llama3' lacks low_freq_factor"),
        ({"type": "linear", "factor": 0}, "factor is 0"),
        ({"type": "yarn", "factor": "4"}, "factor is '4'"),
        ({"type": "dynamic", "factor": True}, "factor is True"),
    ],
)
def test_scaling_that_says_nothing_is_refused(scaling, problem):
    """cases C09."""
    with pytest.raises(InputError, match=problem):
        rope_of(rope_scaling=scaling)


# ---------------------------------------------------------------- sizes


def test_explicit_head_size_wins_and_null_is_derived():
    """cases C16."""
    assert architecture_from_config({**LLAMA, "head_dim": 32}).head_dim == 32
    assert architecture_from_config({**LLAMA, "head_dim": None}).head_dim == 16
    assert architecture_from_config(LLAMA).head_dim == 16


def test_head_size_that_cannot_be_derived_is_refused():
    with pytest.raises(InputError, match="hidden_size 64 is not a multiple of the 5"):
        architecture_from_config({**LLAMA, "num_attention_heads": 5})


@pytest.mark.parametrize("value", [None, 0, -4, "64", 1.5, True])
def test_sizes_must_be_positive_whole_numbers(value):
    with pytest.raises(InputError, match="hidden_size is"):
        architecture_from_config({**LLAMA, "hidden_size": value})


def test_key_value_heads_are_the_heads_where_absent():
    config = {k: v for k, v in LLAMA.items() if k != "num_key_value_heads"}
    assert architecture_from_config(config).num_query_groups == 4


def test_unknown_activation_is_refused():
    with pytest.raises(InputError, match="unknown activation 'tanh'"):
        architecture_from_config({**LLAMA, "hidden_act": "tanh"})


def test_window_longer_than_any_sequence_never_acts():
    arch = architecture_from_config({**LLAMA, "sliding_window": 512})
    assert arch.sliding_window is None


# ---------------------------------------------------------------- families in words of their own


def test_language_model_of_a_larger_config():
    arch = architecture_from_config(
        {"model_type": "some_vl", "tie_word_embeddings": True, "text_config": LLAMA}
    )
    assert arch.model_type == "llama"
    assert arch.hidden_size == 64
    assert arch.tie_word_embeddings


def test_chatglm():
    arch = architecture_from_config(
        {
            "model_type": "chatglm", "hidden_size": 64, "num_layers": 3, "num_attention_heads": 4,
            "multi_query_attention": True, "multi_query_group_num": 2, "kv_channels": 16,
            "ffn_hidden_size": 80, "padded_vocab_size": 128, "vocab_size": 100,
            "seq_length": 2048, "layernorm_epsilon": 1e-5, "add_qkv_bias": True,
            "add_bias_linear": False, "rope_ratio": 50, "rmsnorm": True,
        }
    )  # fmt: skip
    assert arch.num_layers == 3
    assert arch.num_query_groups == 2
    assert arch.intermediate_size == 80
    assert arch.rope == Rope(theta=500_000.0, partial_factor=0.5, interleaved=True)
    assert (arch.qkv_bias, arch.attention_out_bias, arch.mlp_bias) == (True, False, False)
    assert arch.norm_eps == 1e-5
    assert arch.max_position_embeddings == 2048


def test_chatglm_embedding_has_its_padded_size():
    """The config gives both; the tensors have the padded one."""
    arch = architecture_from_config(
        {
            "model_type": "chatglm", "hidden_size": 64, "num_layers": 3, "num_attention_heads": 4,
            "ffn_hidden_size": 80, "padded_vocab_size": 128, "vocab_size": 100,
        }
    )  # fmt: skip
    assert arch.vocab_size == 128


def test_first_qwen():
    arch = architecture_from_config(
        {
            "model_type": "qwen", "hidden_size": 64, "num_hidden_layers": 2,
            "num_attention_heads": 4, "kv_channels": 16, "intermediate_size": 160,
            "vocab_size": 96, "layer_norm_epsilon": 1e-6, "rotary_emb_base": 1000000,
        }
    )  # fmt: skip
    assert arch.intermediate_size == 80
    assert arch.qkv_bias
    assert not arch.attention_out_bias
    assert arch.rope.theta == 1e6


def test_baichuan_is_told_apart_by_what_its_configs_lack():
    plain = {k: v for k, v in LLAMA.items() if k not in ("model_type", "num_key_value_heads")}
    first = architecture_from_config({**plain, "model_type": "baichuan"})
    assert (first.position_embedding, first.normalized_head) == ("rope", False)
    del plain["max_position_embeddings"]
    large = {**plain, "model_type": "baichuan", "model_max_length": 4096, "z_loss_weight": 0}
    second = architecture_from_config(large)
    assert (second.position_embedding, second.normalized_head) == ("alibi", True)
    assert second.max_position_embeddings == 4096


def test_mamba_ssm_package_config():
    """Its configs name no model type, and give the tokenizer's vocabulary."""
    arch = architecture_from_config(
        {
            "d_model": 64, "n_layer": 2, "ssm_cfg": {"layer": "Mamba2"}, "vocab_size": 50277,
            "pad_vocab_size_multiple": 16, "tie_embeddings": True,
        }
    )  # fmt: skip
    assert arch.vocab_size == 50288
    assert arch.layer_types == ("mamba", "mamba")
    assert arch.tie_word_embeddings


def test_hybrid_pattern_in_letters():
    config = CONFIG_MAPPING["nemotron_h"](
        **next(c.values[1] for c in cases() if c.values[0] == "nemotron_h")
    ).to_dict()
    named = architecture_from_config(config)
    lettered = {k: v for k, v in config.items() if k != "layers_block_type"}
    assert architecture_from_config({**lettered, "hybrid_override_pattern": "M-*-"}) == named
    with pytest.raises(InputError, match="unknown kinds of layers: X"):
        architecture_from_config({**lettered, "hybrid_override_pattern": "M-X"})


def test_greedy_routing_of_deepseek_v2_knows_no_groups():
    """V2-Lite's way: groups are given and unused."""
    arguments = next(c.values[1] for c in cases() if c.id == "deepseek_v2-1")
    config = CONFIG_MAPPING["deepseek_v2"](**arguments).to_dict()
    limited = architecture_from_config(config).moe
    assert (limited.num_groups, limited.topk_groups) == (2, 1)
    greedy = architecture_from_config({**config, "topk_method": "greedy"}).moe
    assert greedy.num_groups is None


def test_minicpm_scales():
    arch = architecture_from_config(
        {
            **LLAMA,
            "model_type": "minicpm",
            "scale_emb": 12,
            "scale_depth": 1.4,
            "dim_model_base": 16,
        }
    )
    assert arch.embedding_scale == 12
    assert arch.residual_scale == pytest.approx(1.4 / 2**0.5)
    assert arch.logit_scale == pytest.approx(0.25)
    assert arch.tie_word_embeddings


# ---------------------------------------------------------------- refusals


def test_unknown_model_type_names_the_closest():
    with pytest.raises(InputError, match="unknown model type 'qwen4'") as error:
        architecture_from_config({**LLAMA, "model_type": "qwen4"})
    assert "qwen3" in error.value.problems[0].hint


def test_model_type_must_be_there():
    with pytest.raises(InputError, match="model_type is missing"):
        architecture_from_config({"hidden_size": 64})


def test_every_model_type_is_read_by_one_family():
    read = [module.FAMILIES for module in map(import_module, MODULE_NAMES)]
    names = [name for listed in read for family in listed for name in family.model_types]
    assert sorted(names) == sorted(families())


def test_config_is_read(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    assert read_config(tmp_path) == LLAMA


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (None, "no config.json"),
        ('{"a": 1,', "not valid JSON"),
        ("[1]", "not a JSON object"),
        (b"\xff\xfe", "cannot read it"),
    ],
)
def test_broken_config_is_refused(tmp_path, content, problem):
    if isinstance(content, bytes):
        (tmp_path / "config.json").write_bytes(content)
    elif content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(InputError, match=problem) as error:
        read_config(tmp_path)
    assert str(tmp_path) in error.value.problems[0].where
