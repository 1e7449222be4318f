"""Calls of every operator that has an implementation for the NPU; see `operators_check`.

A case makes its arguments in a dtype, on the host, and computes with a set of operators. Floating
tensors that are differentiated require a gradient; what is compared are the results and these.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from msllm.engine.ops.rotary import cos_sin
from tests.npu.ops import attention_cases, expert_cases
from tests.npu.ops.case import LOOKS, Arguments, Case, Device, operator, tensor


def cases() -> Iterator[Case]:
    yield from attention_cases.attention()
    yield from attention_cases.ring()
    yield from expert_cases.products()
    yield from expert_cases.experts()
    yield from _elementwise()
    yield from _rotary()
    yield from _adamw()


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
                "x": tensor(5, 2, 16, dtype=dtype),
                "weight": tensor(16, dtype=weight or dtype),
                "eps": 1e-5,
                **options,
            },
            operator("rms_norm"),
        )
    yield Case(
        "layer_norm",
        (),
        lambda dtype: {
            "x": tensor(5, 2, 16, dtype=dtype),
            "weight": tensor(16, dtype=dtype),
            "bias": tensor(16, dtype=dtype),
            "eps": 1e-5,
        },
        operator("layer_norm"),
    )
    gated: dict[str, tuple[str, tuple[str, ...], Arguments]] = {
        "swiglu": ("swiglu", ("npu_swiglu", "npu_swiglu_backward"), {}),
        "swiglu: limit": ("swiglu", (), {"limit": 0.5}),
        "swiglu: limit and alpha": ("swiglu", (), {"limit": 0.5, "alpha": 1.7}),
        "geglu": ("geglu", ("npu_geglu",), {}),
        "geglu: erf": ("geglu", ("npu_geglu",), {"approximate": "none"}),
        "geglu: limit": ("geglu", (), {"limit": 0.5}),
    }
    for name, (gate, calls, options) in gated.items():
        yield Case(
            name,
            calls,
            lambda dtype, options=options: {"x": tensor(3, 4, 10, dtype=dtype), **options},
            operator(gate),
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
            x = tensor(7, 3, 2, 16, dtype=dtype)
            return {"x": x, "cos": cos, "sin": sin, "interleaved": interleaved}

        yield Case(f"rotary: {name}", calls, arguments, operator("rotary"))


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
