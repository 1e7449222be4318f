"""Calls of grouped products, permutations and choices of experts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from msllm.engine.ops import grouped_matmul
from msllm.models.architecture import MoE
from tests.npu.ops.case import VALUES, Arguments, Case, Device, operator, tensor

COUNTS = {
    "some": [3, 0, 4, 5],
    "all in one": [0, 12, 0, 0],
    "one group": [12],
    "none": [0, 0, 0, 0],
}


def products() -> Iterator[Case]:
    for name, counts in COUNTS.items():
        for trans_b in (False, True):
            yield Case(
                f"grouped_matmul: {name}{' transposed' * trans_b}",
                ("npu_grouped_matmul",) * (3 if sum(counts) else 0),
                lambda dtype, counts=counts, trans_b=trans_b: {
                    "x": tensor(sum(counts), 6, dtype=dtype),
                    "weight": tensor(len(counts), *((8, 6) if trans_b else (6, 8)), dtype=dtype),
                    "counts": torch.tensor(counts),
                    "trans_b": trans_b,
                },
                operator("grouped_matmul"),
                rungs=Case.rungs if sum(counts) else VALUES,
            )
    yield Case(
        "grouped_matmul: strided, counts on the host",
        ("npu_grouped_matmul",) * 3,
        lambda dtype: {
            "x": tensor(6, 12, dtype=dtype),
            "weight": tensor(8, 6, 4, dtype=dtype),
        },
        lambda device, arguments: device.ops.grouped_matmul(
            arguments["x"].t(),
            arguments["weight"].permute(2, 1, 0),
            torch.tensor(COUNTS["some"], device="cpu"),
        ),
    )
    yield Case(
        "add_weight_gradient",
        ("npu_grouped_matmul_add_",),
        lambda dtype: {
            "into": torch.randn(4, 6, 8),
            "x": torch.randn(12, 6).to(dtype),
            "grad": torch.randn(12, 8).to(dtype),
            "counts": torch.tensor(COUNTS["some"]),
        },
        lambda device, arguments: device.function(grouped_matmul, "add_weight_gradient")(
            **arguments
        ),
        (torch.bfloat16, torch.float16),
    )


def routed(tokens: int, experts: int, k: int) -> Tensor:
    chosen = torch.randn(tokens, experts).topk(k).indices
    return torch.zeros(tokens, experts, dtype=torch.bool).scatter_(1, chosen, True)


def _untied(rows: int, columns: int) -> Tensor:
    """Numbers of which no two in a row are the same in any dtype."""
    return torch.stack([torch.randperm(columns) / 4 - 2 for _ in range(rows)])


def _there_and_back(device: Device, arguments: Arguments) -> Any:
    """As Megatron's dispatchers do, with the probabilities on the way there or back."""
    tokens, chosen = arguments["tokens"], arguments["chosen"]
    there, back = arguments.get("there"), arguments.get("back")
    rows, weights, indices = device.ops.permute(tokens, chosen, probs=there, **arguments["options"])
    weighed = rows if weights is None else (rows * weights.unsqueeze(-1)).to(rows.dtype)
    restored = device.ops.unpermute(
        weighed * 1.5, indices, tokens.shape, probs=back, routing_map=chosen
    )
    return rows, weights, restored


PERMUTE = (
    "npu_moe_token_permute_with_routing_map",
    "_npu_moe_token_unpermute_with_routing_map",
    "npu_moe_token_unpermute_with_routing_map_grad",
    "npu_moe_token_permute_with_routing_map_grad",
)


SIGMOID: Arguments = {
    "score_function": "sigmoid", "norm_topk_prob": True, "routed_scaling_factor": 2.5
}  # fmt: skip


GROUPS: Arguments = {"num_groups": 4, "topk_groups": 2, "group_best": 1}


def experts() -> Iterator[Case]:
    for name, k, probs, wide, count, calls in (
        ("plain", 2, None, False, 18, PERMUTE),
        ("one expert a token", 1, "there", False, 9, PERMUTE),
        ("probabilities there", 3, "there", False, 27, PERMUTE),
        ("probabilities back", 3, "back", False, 27, PERMUTE),
        ("fp32 probabilities there", 2, "there", True, 18, PERMUTE),
        ("an unknown number", 2, "there", False, None, ()),
        ("a counted number", 2, "there", False, torch.tensor(18), ()),
    ):

        def arguments(
            dtype: torch.dtype,
            k: int = k,
            probs: str | None = probs,
            wide: bool = wide,
            count: Any = count,
        ) -> Arguments:
            given: Arguments = {"options": {"num_out_tokens": count}}
            if probs is not None:
                given[probs] = tensor(9, 5, dtype=torch.float32 if wide else dtype)
            return given | {"tokens": tensor(9, 4, dtype=dtype), "chosen": routed(9, 5, k)}

        floats = (torch.float32, torch.bfloat16) if wide else Case.dtypes
        rungs = Case.rungs if calls else VALUES
        yield Case(f"permute: {name}", calls, arguments, _there_and_back, floats, rungs)
    for name, calls, bias, settings in (
        ("softmax", True, False, {}),
        ("softmax, scaled", True, True, {"routed_scaling_factor": 2.5}),
        ("sigmoid", True, True, SIGMOID),
        ("sigmoid of one", True, True, SIGMOID | {"num_experts_per_tok": 1}),
        ("groups by two", True, True, SIGMOID | {"num_groups": 4, "topk_groups": 2}),
        ("groups by one", True, True, GROUPS | {"num_experts_per_tok": 2}),
        ("plain sigmoid", False, True, SIGMOID | {"norm_topk_prob": False}),
        ("softmax over the chosen", False, False, {"norm_topk_prob": True}),
        ("groups of two", False, True, GROUPS | {"num_groups": 8}),
    ):
        default: Arguments = {"norm_topk_prob": False, "num_experts_per_tok": 3}
        moe = MoE(num_experts=16, intermediate_size=8, **(default | settings))
        yield Case(
            f"by_scores: {name}",
            ("npu_moe_gating_top_k",) if calls else ("npu_gather_backward",),
            lambda dtype, moe=moe, bias=bias: {
                "logits": _untied(11, 16).to(dtype).requires_grad_(),
                "moe": moe,
                "bias": torch.randn(16) * 0.1 if bias else None,
            },
            operator("by_scores"),
        )
