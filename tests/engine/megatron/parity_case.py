"""Copies transformers models into Megatron ones, and reports how far logits and gradients differ.

Usage: parity_case.py OUT.json, alone in its job. The mapping of names is written here anew and
shares no code with msllm: rows of `linear_qkv` are grouped by key-value head (its query heads,
then key, then value), `linear_fc1` is gate rows then up rows.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from msllm.config import RunConfig
from msllm.engine.device import select_device
from msllm.engine.layout import Layout
from msllm.engine.megatron.backend import MegatronBackend
from msllm.models.hf_config import architecture_from_config

LENGTH = 48
BASE: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 24,
    "intermediate_size": 96,
    "vocab_size": 131,
    "max_position_embeddings": 128,
    "rms_norm_eps": 3e-6,
    "tie_word_embeddings": False,
    "initializer_range": 0.1,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
LINEAR = {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 40}

CASES: dict[str, tuple[Any, ...]] = {
    "llama": ("llama", {}),
    "llama, llama3 rope, tied": ("llama", {"rope_parameters": LLAMA3, "tie_word_embeddings": True}),
    "llama, linear rope": ("llama", {"rope_parameters": LINEAR}),
    "mistral": ("mistral", {"sliding_window": 9}),
    "qwen2": ("qwen2", {"head_dim": None, "tie_word_embeddings": True}),
    "qwen3": ("qwen3", {}),
    "qwen3_moe": ("qwen3_moe", EXPERTS | {"norm_topk_prob": True}),
    "qwen3_moe, plain top-k": ("qwen3_moe", EXPERTS | {"norm_topk_prob": False}),
    "qwen3_moe, square experts": ("qwen3_moe", EXPERTS | {"moe_intermediate_size": 64}),
    "qwen3_moe, an MLP each": ("qwen3_moe", EXPERTS | {"norm_topk_prob": True}, False),
    "mixtral": ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "mixtral, an MLP each": ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}, False),
}
"""Name -> transformers' model type, what is special, and whether experts are grouped."""


def reference(kind: str, over: dict[str, Any]) -> Any:
    torch.manual_seed(0)
    settings = {k: v for k, v in (BASE | over).items() if v is not None}
    config = AutoConfig.for_model(kind, **settings, attn_implementation="eager")
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).train()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:  # norms of one and biases of zero would hide a mix-up
                parameter.add_(0.1 * torch.randn_like(parameter))
            assert parameter.isfinite().all(), name
    return model


def to_megatron(hf: dict[str, torch.Tensor], config: Any, name: str) -> torch.Tensor:
    """The Megatron parameter `name`, made of transformers' tensors."""
    layer = name.split("layers.")[1].split(".")[0] if "layers." in name else ""
    p = f"model.layers.{layer}"
    heads, groups, d = (
        config.num_attention_heads, config.num_key_value_heads, head_dim(config),
    )  # fmt: skip

    def qkv(kind: str) -> torch.Tensor:
        q, k, v = (hf[f"{p}.self_attn.{x}_proj.{kind}"] for x in "qkv")
        rest = q.shape[1:]
        q = q.view(groups, heads // groups * d, *rest)
        k, v = k.view(groups, d, *rest), v.view(groups, d, *rest)
        return torch.cat((q, k, v), dim=1).reshape(-1, *rest)

    def expert(which: int) -> torch.Tensor:
        gate_up = hf[f"{p}.mlp.experts.gate_up_proj"]  # [e, 2 f, h]
        down = hf[f"{p}.mlp.experts.down_proj"]  # [e, h, f]
        # Megatron keeps its grouped weights expert by expert, each transposed.
        return torch.stack([w.t() for w in (gate_up if which == 1 else down)]).view(-1)

    leaf = name.split(f"layers.{layer}.")[-1] if layer else name
    if leaf == "mlp.experts.weight1":
        return expert(1)
    if leaf == "mlp.experts.weight2":
        return expert(2)
    if leaf.startswith("mlp.experts.local_experts."):
        number, linear = leaf.split(".")[3:5]
        kind = {"linear_fc1": "gate_up_proj", "linear_fc2": "down_proj"}[linear]
        return hf[f"{p}.mlp.experts.{kind}"][int(number)]
    table = {
        "embedding.word_embeddings.weight": "model.embed_tokens.weight",
        "decoder.final_layernorm.weight": "model.norm.weight",
        "output_layer.weight": "lm_head.weight",
        "input_layernorm.weight": f"{p}.input_layernorm.weight",
        "pre_mlp_layernorm.weight": f"{p}.post_attention_layernorm.weight",
        "self_attention.linear_proj.weight": f"{p}.self_attn.o_proj.weight",
        "self_attention.q_layernorm.weight": f"{p}.self_attn.q_norm.weight",
        "self_attention.k_layernorm.weight": f"{p}.self_attn.k_norm.weight",
        "mlp.linear_fc2.weight": f"{p}.mlp.down_proj.weight",
        "mlp.router.weight": f"{p}.mlp.gate.weight",
    }
    if leaf in table:
        return hf[table[leaf]]
    if leaf.startswith("self_attention.linear_qkv."):
        return qkv(leaf.rsplit(".", 1)[1])
    assert leaf == "mlp.linear_fc1.weight", name
    return torch.cat((hf[f"{p}.mlp.gate_proj.weight"], hf[f"{p}.mlp.up_proj.weight"]))


def head_dim(config: Any) -> int:
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def compare(kind: str, over: dict[str, Any], grouped: bool = True) -> dict[str, float]:
    model = reference(kind, over)
    tokens = torch.randint(0, 131, (2, LENGTH + 1), generator=torch.Generator().manual_seed(1))
    inputs, labels = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    truth = model(inputs).logits
    loss = torch.nn.functional.cross_entropy(truth.flatten(0, 1), labels.flatten())
    loss.backward()
    backend = build(model, kind, grouped)
    weights = {name: p.detach() for name, p in model.named_parameters()}
    gradients = {name: p.grad for name, p in model.named_parameters()}
    chunk = backend.chunks[0].module
    with torch.no_grad():
        for name, parameter in chunk.named_parameters():
            parameter.copy_(to_megatron(weights, model.config, name).view_as(parameter))
    ours = backend.logits(inputs)
    batch = {
        "tokens": inputs,
        "labels": labels,
        "loss_mask": torch.ones(2, LENGTH),
        "position_ids": torch.arange(LENGTH).repeat(2, 1),
    }
    swapped = swapped_logits(backend, inputs)
    result = backend.train_step([batch], 1)
    differences = []
    for name, parameter in chunk.named_parameters():
        expected = to_megatron(gradients, model.config, name).view_as(parameter)
        differences.append((parameter.main_grad - expected).norm() / expected.norm())
    from megatron.core import parallel_state

    parallel_state.destroy_model_parallel()
    return {
        "logits": float((ours - truth).abs().max()),
        "largest": float(truth.abs().max()),
        "swapped": float((swapped - truth).abs().max()),
        "loss": abs(result.loss - float(loss)),
        "gradients": float(torch.stack(differences).max()),  # not a number stays so
        "clip": result.grad_norm,
    }


def build(model: Any, kind: str, grouped: bool) -> MegatronBackend:
    config = json.loads(json.dumps(model.config.to_dict(), default=str))
    run = RunConfig(
        model=kind,
        device="cpu",
        dtype="fp32",
        data={"seq_length": LENGTH},
        train={"micro_batch": 2, "global_batch": 2, "clip_grad": 0.0, "lr": 1e-6},
        moe={"aux_loss_coeff": 0.0, "grouped_gemm": grouped},
    )
    return MegatronBackend(architecture_from_config(config), Layout(), run, select_device("cpu"))


def swapped_logits(backend: MegatronBackend, inputs: torch.Tensor) -> torch.Tensor:
    """Logits with the two halves of the first layer's first query head swapped: a wrong mapping."""
    layer = backend.chunks[0].module.decoder.layers[0]
    weight = layer.self_attention.linear_qkv.weight
    half = backend.config.kv_channels // 2
    before = weight.detach().clone()
    with torch.no_grad():
        weight[:half], weight[half : 2 * half] = before[half : 2 * half], before[:half]
        logits = backend.logits(inputs)
        weight.copy_(before)
    return logits


def main() -> None:
    found = {name: compare(*case) for name, case in CASES.items()}
    Path(sys.argv[1]).write_text(json.dumps(found))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
