"""Calls of every operator that has an implementation for the NPU; see `operators_check`.

A case makes its arguments in a dtype, on the host, and computes with a set of operators. Floating
tensors that are differentiated require a gradient; what is compared are the results and these.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from msllm.engine.ops import REFERENCE, Operators, grouped_matmul, operators_for, ring_attention
from msllm.engine.ops.rotary import cos_sin
from msllm.models.architecture import MoE

Arguments = dict[str, Any]


@dataclass(frozen=True)
class Device:
    """Which implementations a case computes with."""

    npu: bool

    @property
    def ops(self) -> Operators:
        return operators_for("npu") if self.npu else REFERENCE

    def function(self, module: ModuleType, name: str) -> Callable[..., Any]:
        """An operator that no layer calls."""
        return getattr(module, name + "_npu" * self.npu)  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Case:
    name: str
    calls: tuple[str, ...]
    """The `npu::` operators that must have been called, once each way where there are two."""
    arguments: Callable[[torch.dtype], Arguments]
    compute: Callable[[Device, Arguments], Any]
    dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.bfloat16, torch.float16)
    rungs: tuple[str, ...] = ("trace", "launch", "values")


def cases() -> Iterator[Case]:
    yield from _attention()
    yield from _elementwise()
    yield from _rotary()
    yield from _products()
    yield from _experts()
    yield from _ring()
    yield from _adamw()


LOOKS = ("launch", "values")
"""What looks at lengths on the device can't be traced."""
VALUES = ("values",)


def _operator(name: str) -> Callable[[Device, Arguments], Any]:
    return lambda device, arguments: getattr(device.ops, name)(**arguments)


def _tensor(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape).to(dtype).requires_grad_()


FLASH = ("npu_fusion_attention", "npu_fusion_attention_grad")
ENDS = torch.tensor([0, 5, 5, 14, 24])

ATTENTION: dict[str, Arguments] = {
    "causal": {},
    "full": {"causal": False},
    "queries at the end": {"s": 7},
    "window": {"window": 5},
    "window of queries at the end": {"window": 5, "s": 7},
    "window longer than the keys": {"window": 99},
    "window of one": {"window": 1},
    "sinks": {"sinks": True},
    "sinks and window": {"sinks": True, "window": 4},
    "narrow values": {"d": 24, "dv": 16},
    "wide values": {"d": 8, "dv": 16},
    "packed": {"cu_seqlens": ENDS},
    "packed, int32": {"cu_seqlens": ENDS.int()},
    "packed, on the device": {"device_ends": ENDS},
    "packed, full": {"cu_seqlens": ENDS, "causal": False},
    "packed, window": {"cu_seqlens": ENDS, "window": 3},
    "packed, sinks and narrow values": {"cu_seqlens": ENDS, "sinks": True, "d": 24, "dv": 16},
}


def _attention() -> Iterator[Case]:
    for name, options in ATTENTION.items():

        def arguments(dtype: torch.dtype, options: Arguments = options) -> Arguments:
            options = dict(options)
            d, dv, s = options.pop("d", 16), options.pop("dv", 16), options.pop("s", 24)
            b = 1 if {"cu_seqlens", "device_ends"} & options.keys() else 2
            shapes = {"q": (s, b, 6, d), "k": (24, b, 2, d), "v": (24, b, 2, dv)}
            if options.pop("sinks", False):
                shapes["sinks"] = (6,)
            return {"scale": 0.3, **options} | {
                key: _tensor(*shape, dtype=dtype) for key, shape in shapes.items()
            }

        def compute(device: Device, arguments: Arguments) -> Any:
            if "device_ends" in arguments:
                arguments["cu_seqlens"] = arguments.pop("device_ends")
            return device.ops.attention(**arguments)

        rungs = LOOKS if "device_ends" in options else Case.rungs
        yield Case(f"attention: {name}", FLASH, arguments, compute, rungs=rungs)
    yield Case(
        "attention: slices of one projection",
        FLASH,
        lambda dtype: {"mixed": _tensor(12, 2, 4, 32, dtype=dtype)},
        lambda device, arguments: device.ops.attention(
            arguments["mixed"][..., :8],
            arguments["mixed"][:, :, :2, 8:16],
            arguments["mixed"][:, :, 2:, 16:24],
            scale=0.4,
        ),
    )


def _elementwise() -> Iterator[Case]:
    norm = ("npu_rms_norm", "npu_rms_norm_backward")
    for name, weight, options in (
        ("plain", None, {}),
        ("zero-centred", None, {"zero_centered": True}),
        ("fp32 weight", torch.float32, {}),
    ):
        yield Case(
            f"rms_norm: {name}",
            norm,
            lambda dtype, weight=weight, options=options: {
                "x": _tensor(5, 2, 16, dtype=dtype),
                "weight": _tensor(16, dtype=weight or dtype),
                "eps": 1e-5,
                **options,
            },
            _operator("rms_norm"),
        )
    yield Case(
        "layer_norm",
        (),
        lambda dtype: {
            "x": _tensor(5, 2, 16, dtype=dtype),
            "weight": _tensor(16, dtype=dtype),
            "bias": _tensor(16, dtype=dtype),
            "eps": 1e-5,
        },
        _operator("layer_norm"),
    )
    gated: dict[str, tuple[str, tuple[str, ...], Arguments]] = {
        "swiglu": ("swiglu", ("npu_swiglu", "npu_swiglu_backward"), {}),
        "swiglu: limit": ("swiglu", (), {"limit": 0.5}),
        "swiglu: limit and alpha": ("swiglu", (), {"limit": 0.5, "alpha": 1.7}),
        "geglu": ("geglu", ("npu_geglu",), {}),
        "geglu: erf": ("geglu", ("npu_geglu",), {"approximate": "none"}),
        "geglu: limit": ("geglu", (), {"limit": 0.5}),
    }
    for name, (operator, calls, options) in gated.items():
        yield Case(
            name,
            calls,
            lambda dtype, options=options: {"x": _tensor(3, 4, 10, dtype=dtype), **options},
            _operator(operator),
        )


def _rotary() -> Iterator[Case]:
    called = ("npu_rotary_mul", "npu_rotary_mul_backward")
    for name, r, interleaved, batched, calls in (
        ("half", 16, False, False, called),
        ("half, partial", 8, False, False, called),
        ("half, positions a sequence", 16, False, True, called),
        ("interleaved", 16, True, False, called),
        ("interleaved, partial", 4, True, False, called),
        ("interleaved, positions a sequence", 16, True, True, ()),
    ):

        def arguments(
            dtype: torch.dtype, r: int = r, interleaved: bool = interleaved, batched: bool = batched
        ) -> Arguments:
            positions = torch.arange(7) + 5 * torch.arange(3)[:, None] if batched else None
            cos, sin = cos_sin(
                0.1 ** torch.arange(r // 2),
                torch.arange(7) if positions is None else positions,
                1.1,
                interleaved,
            )
            x = _tensor(7, 3, 2, 16, dtype=dtype)
            return {"x": x, "cos": cos, "sin": sin, "interleaved": interleaved}

        yield Case(f"rotary: {name}", calls, arguments, _operator("rotary"))


COUNTS = {"": [3, 0, 4, 5], "all in one": [0, 12, 0, 0], "none": [0, 0, 0, 0]}


def _products() -> Iterator[Case]:
    for name, counts in COUNTS.items():
        for trans_b in (False, True):
            yield Case(
                f"grouped_matmul: {name}{' transposed' * trans_b}",
                ("npu_grouped_matmul",) * (3 if sum(counts) else 0),
                lambda dtype, counts=counts, trans_b=trans_b: {
                    "x": _tensor(sum(counts), 6, dtype=dtype),
                    "weight": _tensor(4, *((8, 6) if trans_b else (6, 8)), dtype=dtype),
                    "counts": torch.tensor(counts),
                    "trans_b": trans_b,
                },
                _operator("grouped_matmul"),
                rungs=Case.rungs if sum(counts) else VALUES,
            )
    yield Case(
        "grouped_matmul: strided, counts on the host",
        ("npu_grouped_matmul",) * 3,
        lambda dtype: {
            "x": _tensor(6, 12, dtype=dtype),
            "weight": _tensor(8, 6, 4, dtype=dtype),
        },
        lambda device, arguments: device.ops.grouped_matmul(
            arguments["x"].t(),
            arguments["weight"].permute(2, 1, 0),
            torch.tensor(COUNTS[""], device="cpu"),
        ),
    )
    yield Case(
        "add_weight_gradient",
        ("npu_grouped_matmul_add_",),
        lambda dtype: {
            "into": torch.randn(4, 6, 8),
            "x": torch.randn(12, 6).to(dtype),
            "grad": torch.randn(12, 8).to(dtype),
            "counts": torch.tensor(COUNTS[""]),
        },
        lambda device, arguments: device.function(grouped_matmul, "add_weight_gradient")(
            **arguments
        ),
        (torch.bfloat16, torch.float16),
    )


def _untied(rows: int, columns: int) -> Tensor:
    """Numbers of which no two in a row are the same in any dtype."""
    return torch.stack([torch.randperm(columns) / 4 - 2 for _ in range(rows)])


def routed(tokens: int, experts: int, k: int) -> Tensor:
    chosen = torch.randn(tokens, experts).topk(k).indices
    return torch.zeros(tokens, experts, dtype=torch.bool).scatter_(1, chosen, True)


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


def _experts() -> Iterator[Case]:
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
                given[probs] = _tensor(9, 5, dtype=torch.float32 if wide else dtype)
            return given | {"tokens": _tensor(9, 4, dtype=dtype), "chosen": routed(9, 5, k)}

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
            _operator("by_scores"),
        )


SIGMOID: Arguments = {
    "score_function": "sigmoid", "norm_topk_prob": True, "routed_scaling_factor": 2.5
}  # fmt: skip
GROUPS: Arguments = {"num_groups": 4, "topk_groups": 2, "group_best": 1}


def _ring() -> Iterator[Case]:
    def arguments(dtype: torch.dtype, packed: bool) -> Arguments:
        outs, softmax = ((12, 3, 4), (12, 3, 8)) if packed else ((12, 2, 12), (2, 3, 12, 8))
        sides = [
            (torch.randn(outs).to(dtype), torch.randn(softmax), torch.rand(softmax) + 1)
            for _ in range(2)
        ]
        # The eight values of a row are copies.
        sides = [(o, *(x[..., :1].expand(softmax).contiguous() for x in ms)) for o, *ms in sides]
        ends = torch.tensor([0, 5, 12]) if packed else None
        return {"before": sides[0], "now": sides[1], "cu": ends}

    for packed in (False, True):
        yield Case(
            f"merge_attention{': packed' * packed}",
            ("npu_ring_attention_update",),
            lambda dtype, packed=packed: arguments(dtype, packed),
            lambda device, given: device.function(ring_attention, "merge_attention")(
                given["before"], given["now"], given["cu"]
            ),
        )


def _train(device: Device, arguments: Arguments) -> Any:
    """Three steps of our optimizer, then two more of another that gets its state."""
    settings = {"lr": 0.01, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.1}
    parameter = torch.nn.Parameter(arguments["start"].clone())
    optimizers = (device.ops.adamw([parameter], **settings), torch.optim.AdamW([parameter]))
    for optimizer, gradients in zip(optimizers, arguments["gradients"].split(3), strict=True):
        if optimizer is optimizers[1]:
            state = optimizers[0].state_dict()
            for group in state["param_groups"]:
                group.update(fused=False, foreach=True)
            optimizer.load_state_dict(state)
            device.ops.fuse_adamw(optimizer)
        for gradient in gradients:
            parameter.grad = gradient.clone()
            optimizer.step()
    state = optimizers[1].state[parameter]
    return parameter.detach(), state["exp_avg"], state["exp_avg_sq"], state["step"]


def _adamw() -> Iterator[Case]:
    yield Case(
        "adamw",
        (),
        lambda dtype: {"start": torch.randn(7, 5), "gradients": torch.randn(5, 7, 5)},
        _train,
        (torch.float32,),
        LOOKS,
    )
