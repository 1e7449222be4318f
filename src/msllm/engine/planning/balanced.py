"""Token dispatchers that take the routing for balanced instead of looking at it.

A trace has no values, so how many tokens each expert gets can't be read from the routing map.
Everything else, each permutation and each collective, is Megatron's.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.token_dispatcher import (
    MoEAllGatherTokenDispatcher,
    MoEAlltoAllTokenDispatcher,
)
from torch import Tensor

from msllm.engine.planning.operators import picked


def balance(chunk: torch.nn.Module, imbalance: float) -> None:
    """Give each expert layer of a chunk a dispatcher that assumes balanced routing.

    Args:
        chunk: A pipeline chunk.
        imbalance: Tokens of this rank's experts over the mean of all.
    """
    for layer in chunk.modules():
        if isinstance(layer, MoELayer):
            kind = BALANCED[layer.config.moe_token_dispatcher_type]
            layer.token_dispatcher = kind(layer, imbalance)


def forget(chunk: torch.nn.Module) -> None:
    """Drop what dispatchers keep of their last micro-batch, and so its graph."""
    for module in chunk.modules():
        if isinstance(module, MoELayer):
            for name, value in vars(module.token_dispatcher).items():
                if isinstance(value, Tensor):
                    setattr(module.token_dispatcher, name, None)


def shares(total: int, parts: int) -> list[int]:
    """`total` in `parts` that differ by one at most."""
    return [(total * (i + 1)) // parts - (total * i) // parts for i in range(parts)]


def _groups(layer: MoELayer) -> ProcessGroupCollection:
    """The process groups that a layer gave its first dispatcher."""
    first = layer.token_dispatcher
    return ProcessGroupCollection(
        ep=first.ep_group, expt_tp=first.tp_group, tp_ep=first.tp_ep_group
    )


class BalancedAlltoAll(MoEAlltoAllTokenDispatcher):
    """All-to-all with balanced counts."""

    def __init__(self, layer: MoELayer, imbalance: float):
        super().__init__(
            layer.num_local_experts, layer.local_expert_indices, layer.config, _groups(layer)
        )
        self.imbalance = imbalance
        # Rows are copied into the order of experts: in one piece, where Megatron takes a piece
        # for each expert of each rank. Values of numpy's arrays can be read in a trace.
        self.sort_input_by_local_experts = self.restore_output_by_local_experts = np.array([0])

    def preprocess(self, routing_map: Tensor) -> Any:
        """Say how many tokens go where, given the map `[t, e]`: from its shape alone."""
        chosen = routing_map.size(0) * self.config.moe_router_topk
        self.num_out_tokens = chosen
        sent = shares(chosen, self.num_experts)
        counts = routing_map.sum(dim=0).long()
        local = len(self.local_expert_indices)
        first = self.local_expert_indices[0]
        mine = [round(n * self.imbalance) for n in sent[first : first + local]]
        if self.ep_size > 1 or self.tp_size > 1:
            gather_from_sequence_parallel_region(counts, group=self.tp_ep_group)
            self.input_splits = [
                sum(sent[i * local : (i + 1) * local]) for i in range(self.ep_size)
            ]
            self.output_splits = [sum(mine)] * self.ep_size
            self.output_splits_tp = np.array([sum(mine) * self.ep_size] * self.tp_size)
        else:
            mine = sent
        if local > 1:
            rows = sum(mine) * self.tp_size * self.ep_size
            self.num_global_tokens_per_local_expert = np.array([[rows]])
        return np.array(mine) * self.tp_size * self.ep_size

    def _maybe_dtoh_and_synchronize(self, point: str, tokens_per_expert: Any = None) -> Any:
        """Leave the counts where they are: on the host."""
        return tokens_per_expert


class BalancedAllGather(MoEAllGatherTokenDispatcher):
    """All-gather with balanced counts."""

    routing_map: Any

    def __init__(self, layer: MoELayer, imbalance: float):
        super().__init__(
            layer.num_local_experts, layer.local_expert_indices, layer.config, _groups(layer)
        )
        self.imbalance = imbalance

    def dispatch_postprocess(self, hidden_states: Tensor, probs: Tensor) -> tuple[Any, ...]:
        """Pick the rows for this rank's experts, as many as balanced routing gives them."""
        from megatron.core.transformer.moe import token_dispatcher

        self.hidden_shape_before_permute = hidden_states.shape
        first, last = self.local_expert_indices[0], self.local_expert_indices[-1] + 1
        self.local_map = self.routing_map[:, first:last].contiguous()
        self.local_probs = probs[:, first:last].contiguous()
        self.local_map.sum(dim=0).long()
        experts = self.config.num_moe_experts
        all_counts = shares(hidden_states.size(0) * self.router_topk, experts)
        counts = [round(n * self.imbalance) for n in all_counts[first:last]]
        if last - first == experts:
            counts = all_counts
        permuted, _, self.reversed_local_input_permutation_mapping = token_dispatcher.permute(
            hidden_states, self.local_map, num_out_tokens=sum(counts)
        )
        transposed = self.local_probs.T.contiguous()
        self.local_probs = picked(transposed, self.local_map.T.contiguous(), sum(counts))
        self.routing_map = None
        return permuted, np.array(counts), self.local_probs


BALANCED: dict[str, Any] = {"alltoall": BalancedAlltoAll, "allgather": BalancedAllGather}
