"""The auxiliary losses of mixtures of experts, read out of Megatron's tracker once a step."""

from __future__ import annotations

import torch
from megatron.core.transformer.moe.moe_utils import (
    clear_aux_losses_tracker,
    get_moe_layer_wise_logging_tracker,
    reduce_aux_losses_tracker_across_ranks,
)

from msllm.engine.megatron.model_config import ModelConfig

_NAMES = {"seq_load_balancing_loss": "moe_aux", "z_loss": "moe_z"}
"""Megatron's name of a loss -> its name in metrics.jsonl."""


def collect(config: ModelConfig, num_batches: int) -> dict[str, float]:
    """Mean over layers, micro-batches and ranks of each auxiliary loss; empty for dense models.

    All ranks take part and get the same figures.
    """
    names = _used(config)
    if not names:
        return {}
    further = config.mtp_num_layers or 0  # layers like the last one
    tracker = get_moe_layer_wise_logging_tracker()
    for name in names:  # a stage without expert layers must still join the sum over stages
        values = torch.zeros(config.num_layers + further, device=config.torch_device)
        tracker.setdefault(name, {"values": values})
    reduce_aux_losses_tracker_across_ranks(names)
    layers = sum(config.moe_layer_freq) + further * config.moe_layer_freq[-1]
    found = {
        _NAMES[name]: float(tracker[name]["values"].sum()) / layers / num_batches for name in names
    }
    clear_aux_losses_tracker()
    return found


def _used(config: ModelConfig) -> list[str]:
    if not config.num_moe_experts:
        return []
    used = {
        "seq_load_balancing_loss": config.moe_router_load_balancing_type == "seq_aux_loss",
        "z_loss": config.moe_z_loss_coeff is not None,
    }
    return [name for name, on in used.items() if on]
