"""Forms in which the same weights are published, made with plain code."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers.integrations.finegrained_fp8 import _dequantize_fp8_weight

Tensors = dict[str, torch.Tensor]
LARGEST = 448.0
"""E4M3's."""
BLOCK = (16, 24)
FP8 = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": list(BLOCK)}


def read(folder: Path) -> Tensors:
    return {k: v for file in folder.glob("*.safetensors") for k, v in load_file(file).items()}


def write(folder: Path, tensors: Tensors, config: dict[str, Any]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file({k: v.contiguous() for k, v in tensors.items()}, folder / "model.safetensors")
    return folder


def config_of(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return found


def float8(weight: torch.Tensor, block: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor]:
    """A matrix's numbers and scales, block by block; stacks of matrices one by one."""
    if weight.dim() == 3:
        parts = [float8(matrix, block) for matrix in weight]
        return torch.stack([p[0] for p in parts]), torch.stack([p[1] for p in parts])
    rows, columns = weight.shape
    found = torch.empty(rows, columns, dtype=torch.float8_e4m3fn)
    scales = torch.empty(-(-rows // block[0]), -(-columns // block[1]))
    for i in range(scales.size(0)):
        for j in range(scales.size(1)):
            box = (
                slice(i * block[0], (i + 1) * block[0]),
                slice(j * block[1], (j + 1) * block[1]),
            )
            scales[i, j] = weight[box].float().abs().max() / LARGEST
            found[box] = (weight[box].float() / scales[i, j]).to(torch.float8_e4m3fn)
    return found, scales


def quantised(tensors: Tensors) -> tuple[Tensors, Tensors]:
    """Linears in 8 bits with their scales, the rest in bfloat16; and what that means."""
    stored: Tensors = {}
    meant: Tensors = {}
    for name, tensor in tensors.items():
        if "_proj" in name:
            stored[name], scales = float8(tensor, BLOCK)
            stored[f"{name}_scale_inv"] = scales
            matrices = zip(
                stored[name].view(-1, *tensor.shape[-2:]),
                scales.view(-1, *scales.shape[-2:]),
                strict=True,
            )
            parts = [_dequantize_fp8_weight(w, s, BLOCK, torch.float32) for w, s in matrices]
            meant[name] = torch.stack(parts).view(tensor.shape).bfloat16()
        else:
            stored[name] = meant[name] = tensor.bfloat16()
    return stored, meant


def fused(tensors: Tensors, names: tuple[str, str, str]) -> Tensors:
    """Experts of a layer in one tensor, as transformers 5 has them in memory."""
    gate, up, down = names
    found = {k: v for k, v in tensors.items() if ".experts." not in k}
    for first in [k for k in tensors if k.endswith(f".experts.0.{gate}.weight")]:
        prefix = first.removesuffix(f"0.{gate}.weight")
        experts = range(
            sum(k.startswith(prefix) and k.endswith(f".{gate}.weight") for k in tensors)
        )
        pairs = [
            torch.cat([tensors[f"{prefix}{e}.{gate}.weight"], tensors[f"{prefix}{e}.{up}.weight"]])
            for e in experts
        ]
        found[f"{prefix}gate_up_proj"] = torch.stack(pairs)
        downs = [tensors[f"{prefix}{e}.{down}.weight"] for e in experts]
        found[f"{prefix}down_proj"] = torch.stack(downs)
    return {k.replace("block_sparse_moe", "mlp"): v for k, v in found.items()}


def assert_same(found: Tensors, wanted: Tensors) -> None:
    assert found.keys() == wanted.keys()
    assert {k: v.dtype for k, v in found.items()} == {k: v.dtype for k, v in wanted.items()}
    assert [k for k in wanted if not torch.equal(found[k], wanted[k])] == []
