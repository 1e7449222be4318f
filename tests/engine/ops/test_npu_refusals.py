"""What torch_npu would let through and its kernels misread, refused without torch_npu at hand."""

import logging
from types import SimpleNamespace

import pytest
import torch

from msllm.engine.ops import ascend, operators_for
from msllm.engine.ops.attention_npu import fuse
from msllm.engine.ops.collective_matmul import (
    all_gather_matmul_npu,
    matmul_all_reduce_npu,
    matmul_reduce_scatter_npu,
)
from msllm.engine.ops.grouped_matmul import add_weight_gradient_npu
from msllm.engine.ops.ring_attention import merge_attention, merge_attention_npu

OPS = operators_for("npu")
TRIANGLE = torch.ones(2048, 2048, dtype=torch.bool).triu_(1)


def heads(s=4, b=1, n=2, g=1, d=8, dtype=torch.float32):
    return [torch.zeros(s, b, x, d, dtype=dtype) for x in (n, g, g)]


def fused(layout="BSND", **options):
    q, k, v = (x.transpose(0, 1) for x in heads())
    if layout == "TND":
        q, k, v = (x.squeeze(0) for x in (q, k, v))
    options = {"heads": 2, "scale": 1.0} | options
    return fuse(q, k, v, layout=layout, **options)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"mask": torch.zeros(4, 4)}, TypeError, "torch.bool or torch.uint8 mask"),
        ({"mask": TRIANGLE[:4, :4], "sparse_mode": 2}, ValueError, "2048 x 2048 mask, not one of"),
        ({"sparse_mode": 3}, ValueError, "without a mask would hide nothing"),
        ({"mask": TRIANGLE, "sparse_mode": 9}, ValueError, "sparse_mode 9"),
        ({"layout": "BNS"}, ValueError, "layout 'BNS'"),
        ({"layout": "SBH"}, ValueError, "wants 3 dimensions, not 4"),
        ({"heads": 3}, ValueError, "3 heads do not fit"),
        ({"sinks": torch.zeros(3)}, ValueError, "as many sinks"),
        ({"layout": "TND"}, ValueError, "ends of packed sequences"),
        ({"ends": ([4], [4])}, ValueError, "only with that"),
        ({"layout": "TND", "ends": ([2, 2, 0], [2, 4, 4])}, ValueError, "must be cumulative"),
        ({"layout": "TND", "ends": ([1, 3], [1, 4])}, ValueError, "up to the 4 tokens"),
        ({"layout": "TND", "ends": ([], [4])}, ValueError, "must be cumulative"),
        ({"layout": "TND", "ends": ([4], [1, 4])}, ValueError, "1 sequences of queries, 2 of"),
    ],
)
def test_attention_calls(options, error, message):
    with pytest.raises(error, match=message):
        fused(**options)


def test_attention_of_mixed_dtypes():
    q, k, v = heads()
    with pytest.raises(TypeError, match=r"q torch.bfloat16, k torch.float32"):
        OPS.attention(q.bfloat16(), k, v, scale=1.0)
    with pytest.raises(TypeError, match=r"needs fp32, bf16 or fp16"):
        OPS.attention(*(x.double() for x in heads()), scale=1.0)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"dropout_p": 0.1}, ValueError, "dropout 0.1 is not supported on an NPU"),
        ({"window": 0}, ValueError, "window 0"),
        ({"cu_seqlens": torch.tensor([0.0, 4.0])}, TypeError, "cu_seqlens, not torch.float32"),
        ({"cu_seqlens": torch.tensor([0, 3, 1, 4])}, ValueError, r"\[0, 3, 1, 4\] must rise"),
        ({"cu_seqlens": torch.tensor([0, 3])}, ValueError, "to the 4 tokens"),
    ],
)
def test_attention_options(options, error, message):
    with pytest.raises(error, match=message):
        OPS.attention(*heads(), scale=1.0, **options)


def test_cu_seqlens_that_was_written_to_is_read_again():
    cu_seqlens = torch.tensor([0, 4])
    with pytest.raises(TypeError, match="needs fp32"):  # past the lengths, which fit
        OPS.attention(*(x.double() for x in heads()), scale=1.0, cu_seqlens=cu_seqlens)
    cu_seqlens[1] = 3
    with pytest.raises(ValueError, match=r"\[0, 3\] must rise"):
        OPS.attention(*heads(), scale=1.0, cu_seqlens=cu_seqlens)


def test_norm_and_activations():
    x = torch.zeros(3, 8)
    with pytest.raises(ValueError, match="RMSNorm of"):
        OPS.rms_norm(x, torch.ones(4), 1e-6)
    with pytest.raises(TypeError, match="needs fp32"):
        OPS.rms_norm(x.double(), torch.ones(8, dtype=torch.float64), 1e-6)
    for gated in (OPS.swiglu, OPS.geglu):
        with pytest.raises(ValueError, match="a width of 7"):
            gated(torch.zeros(3, 7))
        with pytest.raises(TypeError, match="needs fp32"):
            gated(x.double())


@pytest.mark.parametrize("shape", [(4, 1, 1, 12), (3, 1, 1, 8), (4, 3, 1, 8), (4, 1, 2, 8)])
def test_rotary_tables_that_do_not_fit(shape):
    table = torch.zeros(shape)
    with pytest.raises(ValueError, match="do not fit"):
        OPS.rotary(heads()[0], table, table)


def test_grouped_products():
    x, weight = torch.zeros(4, 3), torch.zeros(2, 3, 5)
    counts = torch.tensor([1, 3])
    with pytest.raises(TypeError, match=r"int64 counts, not torch.int32"):
        OPS.grouped_matmul(x, weight, counts.int())
    with pytest.raises(ValueError, match="do not fit"):
        OPS.grouped_matmul(x, weight, counts + 1)
    with pytest.raises(ValueError, match="do not fit"):
        OPS.grouped_matmul(x, weight, torch.tensor([4]))
    with pytest.raises(ValueError, match="does not fit weight"):
        OPS.grouped_matmul(x, weight, counts, trans_b=True)
    with pytest.raises(TypeError, match=r"x torch.bfloat16, weight torch.float32"):
        OPS.grouped_matmul(x.bfloat16(), weight, counts)
    half, grad = x.bfloat16(), torch.zeros(4, 5).bfloat16()
    with pytest.raises(TypeError, match=r"float32 sums, not torch.bfloat16"):
        add_weight_gradient_npu(weight.bfloat16(), half, grad, counts)
    with pytest.raises(TypeError, match=r"bfloat16 or torch.float16 x"):
        add_weight_gradient_npu(weight, x, grad.float(), counts)
    with pytest.raises(ValueError, match="sums"):
        add_weight_gradient_npu(weight.transpose(1, 2), half, grad, counts)


def test_permutations():
    rows, chosen = torch.zeros(4, 3), torch.eye(4, dtype=torch.bool)
    with pytest.raises(TypeError, match=r"int32 indices, not torch.float32"):
        OPS.unpermute(rows, torch.zeros(4), (4, 3))
    with pytest.raises(TypeError, match="routing map"):
        OPS.permute(rows, chosen.float(), num_out_tokens=4)
    with pytest.raises(ValueError, match="each of 4 tokens 2 experts"):
        OPS.permute(rows, chosen, num_out_tokens=8)
    with pytest.raises(ValueError, match="routing map"):
        OPS.unpermute(rows, torch.zeros(4).int(), (4, 3), probs=torch.ones(4, 4))


def test_ring_updates():
    out, softmax = torch.zeros(4, 1, 16), torch.zeros(1, 2, 4, 8)
    good = (out, softmax, softmax)
    for merge in (merge_attention, merge_attention_npu):
        with pytest.raises(TypeError, match=r"float32 softmax results"):
            merge((out, softmax.half(), softmax), (out, softmax.half(), softmax))
        with pytest.raises(TypeError, match=r"torch.float32 and torch.bfloat16"):
            merge(good, (out.bfloat16(), softmax, softmax))
        with pytest.raises(ValueError, match="not of the same queries"):
            merge(good, (out[:3], softmax, softmax))
        with pytest.raises(ValueError, match=r"not \[..., 8\] of 4"):
            merge((out, softmax[..., :1], softmax), (out, softmax[..., :1], softmax))
        packed = (torch.zeros(4, 2, 8), *(torch.zeros(4, 2, 8),) * 2)
        with pytest.raises(TypeError, match="int64 cu_seqlens"):
            merge(packed, packed, torch.tensor([0, 4]).int())


def test_products_over_ranks():
    group = SimpleNamespace(size=lambda: 2)
    x, weight = torch.zeros(3, 256).bfloat16(), torch.zeros(256, 256).bfloat16()
    for product in (matmul_all_reduce_npu, all_gather_matmul_npu, matmul_reduce_scatter_npu):
        with pytest.raises(TypeError, match=r"bfloat16 or torch.float16 x"):
            product(x.float(), weight.float(), group)
        with pytest.raises(ValueError, match="does not fit weight"):
            product(x[:, :8], weight, group)
    for product in (all_gather_matmul_npu, matmul_reduce_scatter_npu):
        with pytest.raises(ValueError, match="sizes in"):
            product(x[:, :8], weight[:, :8], group)
        with pytest.raises(ValueError, match="ranks, not 3"):
            product(x, weight, SimpleNamespace(size=lambda: 3))
    with pytest.raises(ValueError, match="3 rows do not divide"):
        matmul_reduce_scatter_npu(x, weight, group)


def test_what_goes_to_the_reference_is_logged_once(caplog):
    ascend.left_to_reference.cache_clear()
    caplog.set_level(logging.INFO, logger="msllm")
    q, k, v = (x + 1 for x in heads())
    for _ in range(2):
        out = OPS.attention(q, k, v, scale=1.0, softcap=2.0)
    torch.testing.assert_close(out, torch.ones_like(out))
    assert [record.message for record in caplog.records] == [
        "attention: a soft cap has no fused kernel here, plain torch computes it"
    ]
