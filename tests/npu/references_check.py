"""Calls torch_npu's operators in the simulator beside what torch itself computes on the CPU.

Each case runs an operator forward and backward through torch_npu's own gradient formulas. Prints a
JSON object: case -> largest difference; and what the schemas say of the references' signatures.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

TRIANGLE = torch.ones(2048, 2048).triu(1).bool()
Outputs = Tensor | tuple[Tensor, ...]


def differences(
    ours: Callable[..., Outputs], theirs: Callable[..., Outputs], *inputs: Tensor
) -> float:
    """Compare outputs and the inputs' gradients."""
    on_npu = [x.to("npu").requires_grad_(x.is_floating_point()) for x in inputs]
    on_cpu = [x.clone().requires_grad_(x.is_floating_point()) for x in inputs]
    found, truth = ([*_backed(f, x)] for f, x in ((ours, on_npu), (theirs, on_cpu)))
    assert len(found) == len(truth)
    far = [(a.detach().cpu() - b.detach()).abs().max() for a, b in zip(found, truth, strict=True)]
    return float(torch.stack(far).max())


def _backed(function: Callable[..., Outputs], inputs: list[Tensor]) -> Iterator[Tensor]:
    out = function(*inputs)
    outs = (out,) if isinstance(out, Tensor) else out
    yield from outs
    pairs = []
    for x in outs:
        slope = torch.linspace(-1, 1, x.numel()).view(x.shape)
        pairs.append((x * slope.to(x.device)).sum())
    sum(pairs).backward()
    for x in inputs:
        if x.requires_grad:
            assert x.grad is not None, "a gradient is missing"
            yield x.grad


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def rms_norm(npu: Any) -> float:
    return differences(
        lambda x, w: npu.npu_rms_norm(x, w, epsilon=1e-3)[0],
        lambda x, w: F.rms_norm(x, w.shape, w, 1e-3),
        random(3, 5, 8), random(8, seed=1),
    )  # fmt: skip


def swiglu(npu: Any) -> float:
    def plain(x: Tensor) -> Tensor:
        return F.silu(x[..., :4]) * x[..., 4:]

    return differences(npu.npu_swiglu, plain, random(3, 8))


def geglu(npu: Any) -> float:
    return differences(
        lambda x: npu.npu_geglu(x, dim=-1, approximate=0, activate_left=True)[0],
        lambda x: F.gelu(x[..., :4]) * x[..., 4:],
        random(3, 8),
    )


def rotary(npu: Any) -> float:
    """Against multiplication of complex numbers."""
    angles = random(5, 1, 1, 3, seed=1)
    turn = torch.polar(torch.ones_like(angles), angles)

    def halves(x: Tensor) -> Tensor:
        y = torch.complex(x[..., :3].contiguous(), x[..., 3:].contiguous()) * turn
        return torch.cat((y.real, y.imag), -1)

    def pairs(x: Tensor) -> Tensor:
        return torch.view_as_real(torch.view_as_complex(x.unflatten(-1, (3, 2))) * turn).flatten(-2)

    far = []
    for mode, plain in (("half", halves), ("interleave", pairs)):
        wide = (
            torch.cat((angles, angles), -1) if mode == "half" else angles.repeat_interleave(2, -1)
        )
        cos, sin = wide.cos().to("npu"), wide.sin().to("npu")

        def ours(x: Tensor, c: Tensor = cos, s: Tensor = sin, mode: str = mode) -> Tensor:
            return npu.npu_rotary_mul(x, c, s, rotary_mode=mode)

        far.append(differences(ours, plain, random(5, 2, 3, 6)))
    return max(far)


def attention(npu: Any) -> float:
    """Causal, four heads in two groups, SBH, the compressed mask."""
    s, b, n, g, d = 7, 2, 4, 2, 6

    def ours(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return npu.npu_fusion_attention(
            q, k, v, n, "SBH", atten_mask=TRIANGLE.to("npu"), scale=0.3, sparse_mode=2
        )[0]

    def plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.unflatten(-1, (-1, d)).permute(1, 2, 0, 3) for x in (q, k, v))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.3, enable_gqa=True)
        return out.permute(2, 0, 1, 3).flatten(-2)

    return differences(ours, plain, random(s, b, n * d), random(s, b, g * d, seed=1),
                       random(s, b, g * d, seed=2))  # fmt: skip


def attention_band(npu: Any) -> float:
    """A window of three keys, BNSD, fewer queries than keys."""
    queries, keys = 5, 9
    i, j = torch.arange(queries)[:, None] + keys - queries, torch.arange(keys)
    seen = (j <= i) & (j > i - 3)

    def ours(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return npu.npu_fusion_attention(
            q, k, v, 2, "BNSD", atten_mask=TRIANGLE.to("npu"), scale=1.0, sparse_mode=4,
            pre_tockens=2, next_tockens=0,
        )[0]  # fmt: skip

    def plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, seen, scale=1.0)

    return differences(ours, plain, random(1, 2, queries, 4), random(1, 2, keys, 4, seed=1),
                       random(1, 2, keys, 4, seed=2))  # fmt: skip


def attention_packed(npu: Any) -> float:
    """Three packed sequences and a sink a head, TND."""
    ends = [2, 6, 9]

    def ours(q: Tensor, k: Tensor, v: Tensor, sink: Tensor) -> Tensor:
        return npu.npu_fusion_attention(
            q, k, v, 4, "TND", atten_mask=TRIANGLE.to("npu"), scale=0.5, sparse_mode=3,
            actual_seq_qlen=ends, actual_seq_kvlen=ends, sink=sink,
        )[0]  # fmt: skip

    def plain(q: Tensor, k: Tensor, v: Tensor, sink: Tensor) -> Tensor:
        out = []
        for first, end in zip([0, *ends], ends, strict=False):
            a, b, c = (x[first:end].transpose(0, 1) for x in (q, k, v))
            b, c = b.repeat_interleave(2, 0), c.repeat_interleave(2, 0)
            scores = a @ b.transpose(1, 2) * 0.5 + torch.full((end - first,) * 2, -1e9).triu(1)
            wide = torch.cat((scores, sink.view(4, 1, 1).expand(4, end - first, 1)), -1)
            out.append((wide.softmax(-1)[..., :-1] @ c).transpose(0, 1))
        return torch.cat(out)

    return differences(ours, plain, random(9, 4, 6), random(9, 2, 6, seed=1),
                       random(9, 2, 6, seed=2), random(4, seed=3))  # fmt: skip


def grouped_matmul(npu: Any) -> float:
    counts, x, w, dy = torch.tensor([2, 0, 3]), random(5, 4), random(3, 4, 6), random(5, 6)
    slices = list(zip(x.split([2, 0, 3]), w, dy.split([2, 0, 3]), strict=True))
    rows, columns, grads, sizes = (t.to("npu") for t in (x, w, dy, counts))
    out = npu.npu_grouped_matmul(
        [rows], [columns], group_list=sizes, split_item=3, group_type=0, group_list_type=1
    )
    dw = npu.npu_grouped_matmul(
        [rows.t()], [grads], group_list=sizes.cumsum(0), split_item=3, group_type=2
    )
    far = (out[0].cpu() - torch.cat([a @ b for a, b, _ in slices])).abs().max()
    return float(
        max(far, (dw[0].cpu() - torch.stack([a.t() @ c for a, _, c in slices])).abs().max())
    )


def permutation(npu: Any) -> float:
    """There and back, weighed, against Megatron's definition of both."""
    chosen = torch.tensor([[1, 0, 1, 0], [0, 1, 1, 0], [1, 0, 0, 1]]).bool()
    expert, token = chosen.t().nonzero(as_tuple=True)

    def ours(x: Tensor, probs: Tensor) -> tuple[Tensor, ...]:
        where = chosen.to("npu")
        rows, weights, order = npu.npu_moe_token_permute_with_routing_map(
            x, where, probs=probs, num_out_tokens=6
        )
        back = npu.npu_moe_token_unpermute_with_routing_map(
            rows * 2, order, [3, 5], probs=probs, routing_map=where
        )
        plain = npu.npu_moe_token_unpermute_with_routing_map(rows, order, [3, 5])
        return rows, weights, back, plain

    def plain(x: Tensor, probs: Tensor) -> tuple[Tensor, ...]:
        rows, weights = x[token], probs[token, expert]
        back = torch.zeros(3, 5).index_add(0, token, rows * 2 * weights[:, None])
        return rows, weights, back, torch.zeros(3, 5).index_add(0, token, rows)

    return differences(ours, plain, random(3, 5), random(3, 4, seed=1).sigmoid())


def adamw(npu: Any) -> float:
    weight = torch.nn.Parameter(random(6))
    betas, lr, decay, eps = (0.8, 0.9), 0.1, 0.3, 1e-3
    truth = torch.optim.AdamW([weight], lr=lr, betas=betas, eps=eps, weight_decay=decay)
    ours = [x.to("npu") for x in (weight.detach(), torch.zeros(6), torch.zeros(6))]
    for step in range(3):
        weight.grad = random(6, seed=step)
        truth.step()
        npu.npu_apply_adam_w(
            betas[0] ** step, betas[1] ** step, lr, decay, *betas, eps, weight.grad.to("npu"),
            None, False, False, out=ours,
        )  # fmt: skip
    return float((ours[0].cpu() - weight.detach()).abs().max())


CASES = {
    case.__name__: case
    for case in (rms_norm, swiglu, geglu, rotary, attention, attention_band, attention_packed,
                 grouped_matmul, permutation, adamw)
}  # fmt: skip


def strangers() -> list[str]:
    """References whose signature is not that of torch_npu's schema."""
    from tests.npu.references import REFERENCES

    found = []
    for key, function in REFERENCES.items():
        name, _, overload = key.partition(".")
        schema = getattr(getattr(torch.ops.npu, name), overload or "default")._schema
        theirs = [(a.name, a.kwarg_only, _default(a)) for a in schema.arguments]
        empty = inspect.Parameter.empty
        ours = [
            (p.name, p.kind is p.KEYWORD_ONLY, "needed" if p.default is empty else p.default)
            for p in inspect.signature(function).parameters.values()
        ]
        if ours != theirs:
            found.append(f"{key}: {ours} is not {theirs}")
    return found


def _default(argument: Any) -> Any:
    if not argument.has_default_value():
        return "needed"
    value = argument.default_value
    return round(value, 12) if isinstance(value, float) else value


def main() -> None:
    import torch_npu

    from tests.npu.simulator import Simulator

    with Simulator() as simulator:
        far = {name: case(torch_npu) for name, case in CASES.items()}
    print(json.dumps({"far": far, "strangers": strangers(), "called": sorted({*simulator.calls})}))


if __name__ == "__main__":
    main()
