"""Multi-token prediction (arXiv:2412.19437, section 2.2): layers that predict tokens further ahead.

Megatron-core has the layers and their loss. They are on the last pipeline stage.
"""

from __future__ import annotations

import torch
from megatron.core import parallel_state
from megatron.core.transformer.multi_token_prediction import (
    MTPLossLoggingHelper,
    MultiTokenPredictionBlockSubmodules,
    get_mtp_layer_spec_for_backend,
)

from msllm.engine.megatron.model_config import ModelConfig
from msllm.engine.megatron.parallel import sum_over
from msllm.engine.megatron.provider import SpecProvider, layer_spec


def block_spec(config: ModelConfig) -> MultiTokenPredictionBlockSubmodules | None:
    """The modules of all these layers, each like the model's last; None where there are none."""
    if not config.mtp_num_layers:
        return None
    layers = range(config.num_layers, config.num_layers + config.mtp_num_layers)
    backend = SpecProvider()
    specs = [get_mtp_layer_spec_for_backend(layer_spec(config, i), backend) for i in layers]
    return MultiTokenPredictionBlockSubmodules(layer_specs=specs)


def collect(config: ModelConfig, num_batches: int) -> dict[str, float]:
    """Mean over layers, micro-batches and ranks of their loss; empty where there are none.

    All ranks take part and get the same figure.
    """
    count = config.mtp_num_layers
    if not count:
        return {}
    tracker = MTPLossLoggingHelper.tracker
    held = tracker.get("values")  # on the last stage only
    values = torch.zeros(count, device=config.torch_device) if held is None else held.clone()
    sum_over(values, parallel_state.get_pipeline_model_parallel_group())
    sum_over(values, parallel_state.get_data_parallel_group(with_context_parallel=True))
    ranks = parallel_state.get_data_parallel_world_size(with_context_parallel=True)
    tracker.clear()
    return {"mtp": float(values.sum()) / count / ranks / num_batches}
