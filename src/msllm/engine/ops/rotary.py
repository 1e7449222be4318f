"""Rotary position embedding (arXiv:2104.09864): frequencies, tables and the rotation.

`inverse_frequencies` knows the published ways to stretch a context; the model's layers say which
heads and positions are rotated.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from msllm.engine.ops import ascend
from msllm.errors import InputError
from msllm.models.architecture import Rope


def inverse_frequencies(
    rope: Rope, head_dim: int, max_position: int | None, seq_length: int | None = None
) -> tuple[Tensor, float]:
    """Angle a position turns each pair of dimensions by, and the factor of cos and sin.

    Args:
        rope: The embedding's settings, with the published names in `rope.scaling`.
        head_dim: Size of a head; `rope.partial_factor` of it is rotated.
        max_position: The config's `max_position_embeddings`.
        seq_length: Length of the sequences to come; "dynamic" and "longrope" depend on it.

    Returns:
        fp32 [r / 2] for r rotated dimensions, and the attention factor (1.0 for most kinds).

    Raises:
        InputError: A kind of scaling that is not known, or one that lacks a parameter.
    """
    r = int(head_dim * rope.partial_factor)
    if rope.scaling is None:
        return _plain(rope.theta, r), 1.0
    scaling = {"original_max_position_embeddings": max_position, **rope.scaling}
    kind = scaling.get("type") or scaling.get("rope_type")
    rule = _RULES.get(str(kind))
    if rule is None:
        raise InputError(
            f"unknown rope scaling {kind!r}",
            where="rope_scaling.type",
            hint=f"known are {', '.join(sorted(_RULES))}",
        )
    try:
        return rule(rope.theta, r, scaling, max_position, seq_length)
    except (KeyError, TypeError) as error:
        raise InputError(
            f"rope scaling {kind!r} lacks a parameter or has one of the wrong type: {error}",
            where="rope_scaling",
        ) from error


def cos_sin(
    inv_freq: Tensor, positions: Tensor, attention_factor: float = 1.0, interleaved: bool = False
) -> tuple[Tensor, Tensor]:
    """Tables for `rotary`, fp32 [s, 1, 1, r] from positions [s], or [s, b, 1, r] from [b, s]."""
    if positions.dim() == 1:
        positions = positions.unsqueeze(0)
    angles = positions.t().unsqueeze(-1).float() * inv_freq.float()
    if interleaved:
        angles = angles.repeat_interleave(2, dim=-1)
    else:
        angles = torch.cat((angles, angles), dim=-1)
    angles = angles.unsqueeze(2)
    return angles.cos() * attention_factor, angles.sin() * attention_factor


def rotary(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False) -> Tensor:
    """Rotate the first r dimensions of each head, like `x` [s, b, n, d].

    Args:
        x: Queries or keys [s, b, n, d].
        cos: Table of `cos_sin`, [s, 1 or b, 1, r] with r <= d.
        sin: As `cos`.
        interleaved: A pair is dimensions (2i, 2i + 1); otherwise (i, i + r / 2).

    Computed in the tables' fp32 and rounded once. An own backward pass (the turn back) gained less
    than a tenth on a CPU.
    """
    r = cos.shape[-1]
    turned, rest = x[..., :r], x[..., r:]
    turned = (turned * cos + _quarter_turn(turned, interleaved) * sin).to(x.dtype)
    return torch.cat((turned, rest), dim=-1) if rest.shape[-1] else turned


def rotary_npu(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False) -> Tensor:
    """As `rotary`, by `npu_rotary_mul` in its layout SBND: like `x` [s, b, n, d].

    `r1` and `r2` are cos and sin, as wide as what is turned; `rotary_mode` is "half" or
    "interleave". The kernel computes in one dtype, so the tables are rounded to x's first (as
    Megatron and transformers do); in bf16 that is an error of the size of the result's rounding.
    Where not all of a head is turned, the rest is cut off and put back.

    The reference computes what is beyond the documented limits: r of 896 or more, 1000 or more
    heads or sequences (interleaved: heads times sequences), interleaved pairs with a table a
    sequence.

    Raises:
        ValueError: Tables that do not fit `x`; an odd r.
    """
    s, b, n, d = x.shape
    r = cos.shape[-1]
    fits = cos.shape in ((s, 1, 1, r), (s, b, 1, r)) and sin.shape == cos.shape
    if not fits or r > d or r % 2:
        raise ValueError(
            f"rotary tables {tuple(cos.shape)} and {tuple(sin.shape)} do not fit {tuple(x.shape)}"
        )
    ascend.require_one_dtype("rotary", x=x)
    many = b * n >= 1000 or cos.shape[1] > 1 if interleaved else max(b, n) >= 1000
    if r >= 896 or many:
        ascend.left_to_reference("rotary", f"{n} heads of {r} in {b} sequences")
        return rotary(x, cos, sin, interleaved)
    turned: Tensor = ascend.torch_npu().npu_rotary_mul(
        x[..., :r],
        cos.to(x.dtype),
        sin.to(x.dtype),
        rotary_mode="interleave" if interleaved else "half",
    )
    return torch.cat((turned, x[..., r:]), dim=-1) if r < d else turned


def _quarter_turn(x: Tensor, interleaved: bool) -> Tensor:
    if interleaved:
        return torch.stack((-x[..., 1::2], x[..., 0::2]), dim=-1).flatten(-2)
    first, second = x.chunk(2, dim=-1)
    return torch.cat((-second, first), dim=-1)


Scaling = Mapping[str, Any]
_Rule = Callable[[float, int, Scaling, int | None, int | None], tuple[Tensor, float]]


def _plain(theta: float, r: int) -> Tensor:
    return 1.0 / theta ** (torch.arange(0, r, 2, dtype=torch.float32) / r)


def _default(
    theta: float, r: int, scaling: Scaling, max_position: int | None, seq_length: int | None
) -> tuple[Tensor, float]:
    return _plain(theta, r), 1.0


def _linear(
    theta: float, r: int, scaling: Scaling, max_position: int | None, seq_length: int | None
) -> tuple[Tensor, float]:
    """Positions divided by `factor` (arXiv:2306.15595)."""
    return _plain(theta, r) / scaling["factor"], 1.0


def _dynamic(
    theta: float, r: int, scaling: Scaling, max_position: int | None, seq_length: int | None
) -> tuple[Tensor, float]:
    """Grow the base once a sequence is longer than the trained context (NTK-aware)."""
    if max_position is None:
        raise KeyError("max_position_embeddings")
    factor, length = scaling["factor"], max(seq_length or 0, max_position)
    stretch = factor * length / max_position - (factor - 1)
    return _plain(theta * stretch ** (r / (r - 2)), r), 1.0


def _llama3(
    theta: float, r: int, scaling: Scaling, max_position: int | None, seq_length: int | None
) -> tuple[Tensor, float]:
    """Long waves are stretched, short ones kept, those between blended (Llama 3.1)."""
    factor = scaling["factor"]
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    inv_freq = _plain(theta, r)
    turns = scaling["original_max_position_embeddings"] * inv_freq / (2 * math.pi)
    kept = ((turns - low) / (high - low)).clamp(0, 1)
    return (1 - kept) * inv_freq / factor + kept * inv_freq, 1.0


def _yarn(
    theta: float, r: int, scaling: Scaling, max_position: int | None, seq_length: int | None
) -> tuple[Tensor, float]:
    """YaRN (arXiv:2309.00071): stretched by the number of turns in the original context."""
    original = scaling["original_max_position_embeddings"]
    factor = _stretch(scaling, max_position)

    def dimension(turns: float) -> float:
        return r * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low = dimension(scaling.get("beta_fast") or 32)
    high = dimension(scaling.get("beta_slow") or 1)
    if scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, r - 1)
    ramp = (torch.arange(r // 2, dtype=torch.float32) - low) / (high - low or 0.001)
    kept = 1 - ramp.clamp(0, 1)
    inv_freq = _plain(theta, r)
    return inv_freq / factor * (1 - kept) + inv_freq * kept, _yarn_attention(scaling, factor)


def _yarn_attention(scaling: Scaling, factor: float) -> float:
    """Factor of cos and sin; its square is the paper's 1 / temperature (section 3.4)."""

    def mscale(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    given = scaling.get("attention_factor")
    if given is not None:
        return float(given)
    numerator, denominator = scaling.get("mscale"), scaling.get("mscale_all_dim")
    if numerator and denominator:  # DeepSeek
        return mscale(numerator) / mscale(denominator)
    return mscale(1.0)


def _longrope(
    theta: float, r: int, scaling: Scaling, max_position: int | None, seq_length: int | None
) -> tuple[Tensor, float]:
    """LongRoPE (arXiv:2402.13753): a searched factor a frequency, one set a length."""
    original = scaling["original_max_position_embeddings"]
    longer = seq_length is not None and seq_length > original
    factors = torch.tensor(scaling["long_factor" if longer else "short_factor"])
    if factors.shape != (r // 2,):
        raise TypeError(f"{factors.numel()} factors for {r // 2} frequencies")
    attention_factor = scaling.get("attention_factor")
    if "short_mscale" in scaling:  # Phi-3.5-MoE gives both
        attention_factor = scaling["long_mscale" if longer else "short_mscale"]
    if attention_factor is None:
        factor = _stretch(scaling, max_position)
        grown = math.log(factor) / math.log(original) if factor > 1 else 0.0
        attention_factor = math.sqrt(1 + grown)
    return _plain(theta, r) / factors, float(attention_factor)


def _stretch(scaling: Scaling, max_position: int | None) -> float:
    factor = scaling.get("factor")
    if factor is not None:
        return float(factor)
    if max_position is None:
        raise KeyError("factor")
    return max_position / float(scaling["original_max_position_embeddings"])


_RULES: dict[str, _Rule] = {
    "default": _default,
    "linear": _linear,
    "dynamic": _dynamic,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
}
