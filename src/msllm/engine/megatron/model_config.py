"""ModelConfig: Megatron's TransformerConfig, derived from an Architecture, a Layout and a run.

Megatron hands its config to every module it builds; ours also carries the architecture and the
device's operators, which is how modules find them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer.transformer_config import TransformerConfig

from msllm.config import RunConfig
from msllm.engine.device import Device
from msllm.engine.layout import Layout
from msllm.engine.ops import Operators, operators_for
from msllm.models.architecture import Architecture


@dataclass
class ModelConfig(TransformerConfig):
    """TransformerConfig with the architecture and the operators beside it."""

    architecture: Architecture = None  # type: ignore[assignment]  # always given, see model_config
    ops: Operators = None  # type: ignore[assignment]
    torch_device: torch.device = None  # type: ignore[assignment]

    def __deepcopy__(self, memo: dict[int, Any]) -> ModelConfig:
        """Copy everything but the operators and the architecture, which are immutable."""
        import copy

        memo[id(self.ops)] = self.ops
        memo[id(self.architecture)] = self.architecture
        new = object.__new__(type(self))
        memo[id(self)] = new
        new.__dict__.update({k: copy.deepcopy(v, memo) for k, v in self.__dict__.items()})
        return new


DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def model_config(
    architecture: Architecture,
    layout: Layout,
    run: RunConfig,
    device: Device,
    ops: Operators | None = None,
) -> ModelConfig:
    """Derive Megatron's configuration of the model and of how it is spread.

    `ops` are the operators to compute with, if not those of the device.
    """
    return ModelConfig(
        architecture=architecture,
        ops=ops or operators_for(device.kind),
        torch_device=device.torch_device,
        # gloo reads a sent tensor after Megatron has freed it, where sends overlap with compute
        overlap_p2p_comm=layout.vpp > 1 and device.kind != "cpu",
        **_shape(architecture),
        **_parallel(architecture, layout),
        **_precision(run),
        **_recompute(run),
        **_experts(architecture, layout, run),
    )


def _shape(architecture: Architecture) -> dict[str, Any]:
    activation = {"silu": F.silu, "gelu": F.gelu, "gelu_tanh": F.gelu, "relu2": F.relu}
    return {
        "num_layers": architecture.num_layers,
        "mtp_num_layers": architecture.num_nextn_predict_layers or None,
        "hidden_size": architecture.hidden_size,
        "num_attention_heads": architecture.num_attention_heads,
        "num_query_groups": architecture.num_query_groups,
        # what a head hands to the output projection: of a latent head, its value
        "kv_channels": architecture.mla.v_head_dim if architecture.mla else architecture.head_dim,
        "ffn_hidden_size": architecture.intermediate_size,
        "normalization": architecture.norm,
        "layernorm_epsilon": architecture.norm_eps,
        "layernorm_zero_centered_gamma": architecture.norm_zero_centered,
        "activation_func": activation[architecture.activation],
        "use_te_activation_func": True,
        "gated_linear_unit": architecture.gated_mlp,
        # Megatron sums these norms' gradients over the tensor parallel group: right where all
        # ranks hold one head's norm, and not where each holds its heads' part of a wider one
        "qk_layernorm": architecture.qk_norm == "head",
        "add_qkv_bias": architecture.qkv_bias,
        "add_bias_linear": architecture.mlp_bias,
        "softmax_type": "learnable" if architecture.attention_sinks else "vanilla",
        "softmax_scale": architecture.attention_scale,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
    }


def _parallel(architecture: Architecture, layout: Layout) -> dict[str, Any]:
    return {
        "tensor_model_parallel_size": layout.tp,
        "pipeline_model_parallel_size": layout.pp,
        "virtual_pipeline_model_parallel_size": layout.vpp if layout.vpp > 1 else None,
        "context_parallel_size": layout.cp,
        "expert_model_parallel_size": layout.ep,
        "expert_tensor_parallel_size": layout.etp,
        "sequence_parallel": layout.sequence_parallel,
        "pipeline_model_parallel_layout": (
            layout.megatron_stages(architecture.num_layers, architecture.num_nextn_predict_layers)
            if layout.pp > 1
            else None
        ),
        "batch_p2p_comm": False,
        "variable_seq_lengths": False,
        "deallocate_pipeline_outputs": True,
    }


def _leave_empty(weight: torch.Tensor) -> None:
    """Fill nothing."""


def _precision(run: RunConfig) -> dict[str, Any]:
    dtype = DTYPES[run.dtype]
    return {
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": run.dtype == "bf16",
        "attention_softmax_in_fp32": True,
        "masked_softmax_fusion": False,
        "bias_dropout_fusion": False,
        "bias_activation_fusion": False,
        "apply_rope_fusion": False,
        "gradient_accumulation_fusion": False,
        # megatron.initialize fills the weights; Megatron must still mark how each is cut
        "perform_initialization": True,
        "init_method": _leave_empty,
        "output_layer_init_method": _leave_empty,
        "embedding_init_method": _leave_empty,
        "deterministic_mode": False,
        "calculate_per_token_loss": True,
        "transformer_impl": "local",
        "enable_autocast": False,
    }


def _recompute(run: RunConfig) -> dict[str, Any]:
    train = run.train
    if train.recompute == "none":
        return {}
    if train.recompute == "selective":
        return {
            "recompute_granularity": "selective",
            "recompute_modules": list(train.recompute_modules),
        }
    return {
        "recompute_granularity": "full",
        "recompute_method": "uniform",
        "recompute_num_layers": train.recompute_layers,
    }


def _experts(architecture: Architecture, layout: Layout, run: RunConfig) -> dict[str, Any]:
    moe = architecture.moe
    if moe is None:
        return {}
    coefficient = run.moe.aux_loss_coeff
    coefficient = moe.aux_loss_coef if coefficient is None else coefficient
    # Megatron scales both auxiliary losses by a rank's own tokens, then divides by those of the
    # whole tensor and context parallel group: too small by the size of that group.
    group = layout.tp * layout.cp
    # Muon orthogonalizes matrices, and a grouped weight is those of all experts side by side.
    grouped = run.moe.grouped_gemm and run.train.optimizer != "muon"
    grouped = grouped and not moe.expert_linear_bias  # Megatron's grouped experts have no biases
    pattern = [int(architecture.has_experts(i)) for i in range(architecture.num_layers)]
    return {
        "num_moe_experts": moe.num_experts,
        "moe_router_topk": moe.num_experts_per_tok,
        "moe_ffn_hidden_size": moe.intermediate_size,
        "moe_shared_expert_intermediate_size": moe.shared_expert_intermediate_size or None,
        "moe_shared_expert_gate": moe.shared_expert_gate,
        "moe_layer_freq": pattern,
        # what balances them, where experts are drawn: see `routing`
        "moe_router_score_function": (
            "softmax" if moe.score_function == "sparsemixer" else moe.score_function
        ),
        # Softmax over the chosen logits equals softmax over all, renormalized: one flag for both.
        "moe_router_pre_softmax": not (moe.norm_topk_prob or moe.softmax_after_topk),
        "moe_router_num_groups": moe.num_groups,
        "moe_router_group_topk": moe.topk_groups,
        "moe_router_topk_scaling_factor": (
            moe.routed_scaling_factor if moe.routed_scaling_factor != 1.0 else None
        ),
        "moe_router_enable_expert_bias": moe.expert_bias,
        "moe_router_dtype": "fp32",
        "moe_router_load_balancing_type": "seq_aux_loss" if coefficient else "none",
        "moe_aux_loss_coeff": coefficient * group,
        "moe_z_loss_coeff": run.moe.z_loss_coeff * group or None,
        "moe_token_dispatcher_type": run.moe.dispatcher,
        "moe_grouped_gemm": grouped,
        "moe_use_legacy_grouped_gemm": grouped,
        "moe_permute_fusion": False,
    }
