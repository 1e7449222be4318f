"""Counts against the real parameters of transformers' models, and FLOPs against those counted."""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from msllm.models.counts import flops_per_token, layer_parameters, model_parameters, parameters
from msllm.models.hf_config import architecture_from_config
from tests.models.tiny_configs import cases


def _built(model_type, arguments):
    config = CONFIG_MAPPING[model_type](**arguments)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    return architecture_from_config(config.to_dict()), model


@pytest.mark.parametrize(("model_type", "arguments"), cases())
def test_total_is_that_of_the_model(model_type, arguments):
    arch, model = _built(model_type, arguments)
    assert parameters(arch).total == sum(p.numel() for p in model.parameters())


ITEM_OF = {
    "embedding": ("embed",),
    "lm head": ("lm_head",),
    "norms": ("layernorm", "model.norm."),
    "attention": ("self_attn",),
    "router": ("mlp.gate.weight", "shared_expert_gate"),
    "routed experts": ("mlp.experts",),
    "shared experts": ("shared_expert.", "shared_experts."),
}


@pytest.mark.parametrize("model_type", ["llama", "qwen2_moe", "deepseek_v3", "qwen3_next"])
def test_items_are_those_of_the_model(model_type):
    """Sums by item, the model's own names deciding what belongs where."""
    arch, model = _built(model_type, cases_of(model_type)[-1])
    found = dict.fromkeys(ITEM_OF, 0)
    for name, parameter in model.named_parameters():
        for item, parts in ITEM_OF.items():
            if any(part in name for part in parts) and not (
                item == "norms" and ("self_attn" in name or "linear_attn" in name)
            ):
                found[item] += parameter.numel()
    counted = dict(parameters(arch).items)
    if arch.moe and arch.moe.shared_expert_gate:
        # the gate of the shared expert is counted with it
        gates = arch.hidden_size * arch.num_layers
        found["router"] -= gates
        found["shared experts"] += gates
    for item, total in found.items():
        assert counted.get(item, 0) == total, item


def cases_of(model_type):
    return [case.values[1] for case in cases() if case.values[0] == model_type]


@pytest.mark.parametrize(("model_type", "arguments"), cases())
def test_layers_and_the_rest_add_up(model_type, arguments):
    """The short way of counting alike layers once equals going through all."""
    arch = architecture_from_config(CONFIG_MAPPING[model_type](**arguments).to_dict())
    layers = [layer_parameters(arch, layer) for layer in range(arch.num_layers)]
    total = sum(model_parameters(arch).values()) + sum(sum(layer.values()) for layer in layers)
    assert parameters(arch).total == total


def test_layer_is_the_models_layer():
    arch, model = _built("deepseek_v2", cases_of("deepseek_v2")[0])
    for index, layer in enumerate(model.model.layers):
        counted = sum(layer_parameters(arch, index).values())
        assert counted == sum(p.numel() for p in layer.parameters())


def test_active_leaves_out_the_experts_a_token_is_not_sent_to():
    arch, model = _built("mixtral", cases_of("mixtral")[0])
    expert = sum(p.numel() for n, p in model.named_parameters() if "experts" in n) // 8
    count = parameters(arch)
    assert count.total - count.active == 6 * expert


def test_experts_without_weights_take_their_share_of_a_tokens_choices():
    """transformers keeps rows for LongCat's identity experts, which the published model has not."""
    (arguments,) = cases_of("longcat_flash")
    arguments = {**arguments, "n_routed_experts": 8, "zero_expert_num": 4, "moe_topk": 3}
    arch, model = _built("longcat_flash", arguments)
    real = 0
    for name, parameter in model.named_parameters():
        whole = name.endswith("experts.gate_up_proj")
        real += parameter[:8].numel() if whole else parameter.numel()
    count = parameters(arch)
    assert count.total == real
    expert = 3 * arch.hidden_size * 40
    assert count.total - count.active == arch.num_layers * (8 - 2) * expert


def test_prediction_layers_are_counted_beside():
    """DeepSeek-V3's technical report: 671B, and 14B with the embedding and head it shares."""
    arch, _ = _built("deepseek_v3", cases_of("deepseek_v3")[0])
    without = parameters(arch)
    last = sum(layer_parameters(arch, arch.num_layers - 1).values())
    h = arch.hidden_size
    assert arch.num_nextn_predict_layers == 1
    assert without.mtp == last + 2 * h * h + 3 * h
    assert "mtp" not in without.items


@pytest.mark.parametrize("model_type", ["llama", "gemma", "mistral", "minicpm3"])
def test_flops_are_those_torch_counts(model_type):
    """Forward FLOPs of the real model, whose attention is not halved by the causal mask, x 3."""
    arguments = {**cases_of(model_type)[0], "sliding_window": None}
    arch, model = _built(model_type, arguments)
    model.set_attn_implementation("eager")
    length = 64
    with FlopCounterMode(display=False) as counter:
        model(torch.zeros(1, length, dtype=torch.long, device="meta"))
    value = arch.mla.v_head_dim if arch.mla else arch.head_dim
    widths = arch.num_attention_heads * (arch.head_dim + value)
    attention = 6 * arch.num_layers * widths * length
    counted = 3 * counter.get_total_flops() / length
    ours = flops_per_token(arch, length) + attention / 2
    # rotary tables are a small matmul in transformers
    assert counted == pytest.approx(ours, rel=2e-3)


def test_flops_count_only_the_experts_met():
    arch, model = _built("mixtral", cases_of("mixtral")[0])
    norms = sum(p.numel() for n, p in model.named_parameters() if "norm" in n)
    embedding = model.get_input_embeddings().weight.numel()
    matmul = parameters(arch).active - norms - embedding
    attention = 6 * arch.num_layers * arch.num_attention_heads * arch.head_dim * 128
    assert flops_per_token(arch, 128) == 6 * matmul + attention


@pytest.mark.parametrize(("window", "length"), [(32, 64), (32, 4096), (500, 100)])
def test_window_counts_the_keys_it_leaves(window, length):
    arguments = {**cases_of("mistral")[0], "max_position_embeddings": 10_000}
    config = CONFIG_MAPPING["mistral"](**{**arguments, "sliding_window": window})
    arch = architecture_from_config(config.to_dict())
    full = CONFIG_MAPPING["mistral"](**{**arguments, "sliding_window": None})
    plain = architecture_from_config(full.to_dict())
    seen = sum(min(i + 1, window) for i in range(length)) / length
    keys = 12 * arch.num_layers * arch.num_attention_heads * arch.head_dim
    rest = flops_per_token(plain, length) - keys * length / 2
    # half a key a token is what halving the square leaves out
    assert flops_per_token(arch, length) == pytest.approx(rest + keys * (seen - 0.5), rel=1e-2)


def test_layers_with_heads_of_their_own():
    """Step-3.5, of which transformers has the text model of Step-3.7 without an output layer."""
    from transformers.models.step3p7.configuration_step3p7 import Step3p7TextConfig
    from transformers.models.step3p7.modeling_step3p7 import Step3p7TextModel

    kinds = ["full_attention", "sliding_attention"] * 2
    config = Step3p7TextConfig(
        vocab_size=96, hidden_size=64, intermediate_size=80, num_hidden_layers=4,
        num_attention_heads=4, num_key_value_heads=2, head_dim=16, n_routed_experts=8,
        num_experts_per_tok=2, moe_intermediate_size=40, share_expert_dim=24, sliding_window=16,
        num_sliding_attention_heads=6, layer_types=kinds, moe_layers_enum="2,3",
        max_position_embeddings=512, pad_token_id=0,
    )  # fmt: skip
    with torch.device("meta"):
        model = Step3p7TextModel(config)
    arch = architecture_from_config(config.to_dict())
    assert arch.is_sliding(1)
    head = arch.vocab_size * arch.hidden_size
    assert parameters(arch).total == sum(p.numel() for p in model.parameters()) + head
