"""Calls of attention and of what a ring makes of it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from msllm.engine.ops import ring_attention
from msllm.engine.ops.attention_npu import fuse
from tests.npu.ops.case import LOOKS, Arguments, Case, Device, tensor

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


def attention() -> Iterator[Case]:
    for name, options in ATTENTION.items():

        def arguments(dtype: torch.dtype, options: Arguments = options) -> Arguments:
            options = dict(options)
            d, dv, s = options.pop("d", 16), options.pop("dv", 16), options.pop("s", 24)
            b = 1 if {"cu_seqlens", "device_ends"} & options.keys() else 2
            shapes = {"q": (s, b, 6, d), "k": (24, b, 2, d), "v": (24, b, 2, dv)}
            if options.pop("sinks", False):
                shapes["sinks"] = (6,)
            return {"scale": 0.3, **options} | {
                key: tensor(*shape, dtype=dtype) for key, shape in shapes.items()
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
        lambda dtype: {"mixed": tensor(12, 2, 4, 32, dtype=dtype)},
        lambda device, arguments: device.ops.attention(
            arguments["mixed"][..., :8],
            arguments["mixed"][:, :, :2, 8:16],
            arguments["mixed"][:, :, 2:, 16:24],
            scale=0.4,
        ),
    )


def ring() -> Iterator[Case]:
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
    for packed in (False, True):
        yield Case(
            f"attention in two steps of a ring{': packed' * packed}",
            ("npu_fusion_attention", "npu_fusion_attention", "npu_ring_attention_update"),
            lambda dtype: {
                name: torch.randn(shape).to(dtype)
                for name, shape in {
                    "q": (6, 1, 4, 8),
                    "k": (10, 1, 2, 8),
                    "v": (10, 1, 2, 8),
                }.items()
            },
            lambda device, given, packed=packed: _two_steps(device, given, packed),
        )


def _two_steps(device: Device, given: Arguments, packed: bool) -> Any:
    """Attention over 4 keys and then 6 more, or over all at once."""
    q, k, v = given["q"], given["k"], given["v"]
    if not device.npu:
        return device.ops.attention(q, k, v, scale=0.3, causal=False).flatten(2)
    parts = []
    for keys in (slice(0, 4), slice(4, 10)):
        tensors = [x.squeeze(1) if packed else x.flatten(2) for x in (q, k[keys], v[keys])]
        parts.append(
            fuse(
                *tensors,
                heads=4,
                layout="TND" if packed else "SBH",
                scale=0.3,
                ends=([6], [keys.stop - keys.start]) if packed else None,
                softmax_layout="TND" if packed else "",
            )
        )
    cu_seqlens = torch.tensor([0, 6], device=q.device) if packed else None
    merge = device.function(ring_attention, "merge_attention")
    return merge(*parts, cu_seqlens)[0].reshape(6, 1, 32)
